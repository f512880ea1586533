"""Metrics: plain numbers of a batch of rows, and detached means of a loss; always finite.

Rows of rejected episodes, masked tokens and padding never count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchrl_mt.objectives.functional import aggregate, dynamic_sampling_mask, kl_estimate
from torchrl_mt.objectives.functional.importance import effective_sample_size, log_ratio, ratio_of
from torchrl_mt.objectives.rows.batch import RowBatch

POLICY_DIAGNOSTICS = (
    "trained_tokens",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "ess",
    "entropy",
)
SUPERVISED_DIAGNOSTICS = ("trained_tokens", "entropy")
"""Those of an objective without an old policy."""
CRITIC_DIAGNOSTICS = ("value_clip_fraction", "explained_variance")
CORRECTION_DIAGNOSTICS = (
    "correction_ess",
    "correction_clip_fraction",
    "correction_mask_fraction",
)


def summary(name: str, values: Tensor) -> dict[str, float]:
    """Compute mean, standard deviation (biased) and count of a tensor ``[n]``.

    Examples:
        >>> summary("x", torch.tensor([1.0, 3.0]))
        {'x/mean': 2.0, 'x/std': 1.0, 'x/count': 2.0}
    """
    count = values.numel()
    mean, std = torch.stack([values.mean(), values.std(correction=0)]).tolist() if count else (0, 0)
    return {f"{name}/mean": mean, f"{name}/std": std, f"{name}/count": float(count)}


def merge_summaries(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge results of :func:`summary` about several sets of values, as of all values together.

    Examples:
        >>> merge_summaries([summary("x", torch.tensor([1.0])), summary("x", torch.tensor([3.0]))])
        {'x/mean': 2.0, 'x/std': 1.0, 'x/count': 2.0}
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(key.rpartition("/")[0] for one in every for key in one):
        keys = f"{name}/count", f"{name}/mean", f"{name}/std"
        parts = [tuple(one[key] for key in keys) for one in every if one.get(keys[0])]
        count = sum(n for n, _, _ in parts)
        mean = sum(n * x for n, x, _ in parts) / max(1, count)
        square = sum(n * (std**2 + (x - mean) ** 2) for n, x, std in parts) / max(1, count)
        values = {"mean": mean, "std": math.sqrt(square), "count": float(count)}
        out |= {f"{name}/{key}": value for key, value in values.items()}
    return out


def numbered(name: str, others: Iterable[str]) -> str:
    """The name in metrics; the second of a name gets ``#2``.

    Examples:
        >>> numbered("judge", ["judge", "length"])
        'judge#2'
    """
    same = sum(other == name or other.startswith(f"{name}#") for other in others)
    return f"{name}#{same + 1}" if same else name


def sampled_tokens(batch: RowBatch) -> dict[str, float]:
    """Summarise the sampled tokens per valid row and per valid episode."""
    counted = batch.counted.double()
    kept = batch.valid.new_zeros(batch.episodes.last_token.shape)
    kept[batch.episodes.of_row[batch.valid]] = True
    return {
        **summary("tokens_per_row", counted.sum(-1)[batch.valid]),
        **summary("tokens_per_episode", batch.episodes.total(counted)[kept]),
    }


def episodes_per_group(batch: RowBatch) -> dict[str, float]:
    """Summarise the valid episodes per group; a spread reveals torn groups."""
    group = batch.group()[batch.valid]
    episode = batch.episodes.of_row[batch.valid]
    of_group = torch.stack([group, episode], dim=1).unique(dim=0)[:, 0]
    return summary("episodes_per_group", of_group.unique(return_counts=True)[1].double())


def groups_without_spread(batch: RowBatch, outcome: Tensor) -> dict[str, float]:
    """Compute the share of groups whose episodes all have the same outcome ``[N]``."""
    group = batch.group()
    teaches = group[dynamic_sampling_mask(outcome, group, valid=batch.valid)].unique()
    number = len(group[batch.valid].unique())
    return {"groups/without_spread": 1 - len(teaches) / number if number else 0.0}


@torch.no_grad()
def policy_diagnostics(
    log_prob: Tensor, old: Tensor | None, entropy: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Compute :data:`POLICY_DIAGNOSTICS`; without an old policy :data:`SUPERVISED_DIAGNOSTICS`."""
    out = {"trained_tokens": mask.sum().float(), "entropy": aggregate(entropy, mask)}
    if old is None:
        return out
    difference = log_ratio(log_prob, old, mask)
    side = clipped.to(torch.int8)
    return out | {
        "clip_fraction": aggregate(side != 0, mask),
        "clip_fraction_low": aggregate(side < 0, mask),
        "clip_fraction_high": aggregate(side > 0, mask),
        "approx_kl": aggregate(kl_estimate(torch.zeros_like(difference), difference, "k3"), mask),
        "ess": effective_sample_size(ratio_of(difference), mask),
    }


@torch.no_grad()
def critic_diagnostics(
    value: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Compute :data:`CRITIC_DIAGNOSTICS`.

    The explained variance is ``1 - Var(returns - value) / Var(returns)``, 0 if returns are equal.
    """
    spread, left = _variance(returns, mask), _variance(returns - value, mask)
    # From the data: the computed variance of equal returns may be a rounding error above 0.
    highest = torch.where(mask, returns, -torch.inf).amax() if mask.numel() else 0.0
    varied = (mask & (returns != highest)).any() & (spread > 0)
    explained = torch.where(varied, 1.0 - left / torch.where(varied, spread, 1.0), 0.0)
    return {"value_clip_fraction": aggregate(clipped, mask), "explained_variance": explained}


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    return aggregate((x - aggregate(x, mask)).square(), mask)
