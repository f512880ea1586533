"""What is reported of a batch, as plain numbers: mean, spread and count, over what counts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional import dynamic_sampling_mask
from torchrl_mt.objectives.row_batch import RowBatch


def summary(name: str, values: Tensor) -> dict[str, float]:
    """Mean, standard deviation (0 for one) and count of a 1-D tensor, as numbers under a name.

    Args:
        name: What the keys begin with.
        values: ``[n]`` floating.

    Examples:
        >>> summary("x", torch.tensor([1.0, 3.0]))
        {'x/mean': 2.0, 'x/std': 1.0, 'x/count': 2.0}
    """
    count = values.numel()
    mean, std = torch.stack([values.mean(), values.std(correction=0)]).tolist() if count else (0, 0)
    return {f"{name}/mean": mean, f"{name}/std": std, f"{name}/count": float(count)}


def sampled_tokens(batch: RowBatch) -> dict[str, float]:
    """How many tokens were sampled in each row and each episode that is not rejected."""
    counted = batch.counted.double()
    kept = batch.valid.new_zeros(batch.episodes.last_token.shape)
    kept[batch.episodes.of_row[batch.valid]] = True
    return {
        **summary("tokens_per_row", counted.sum(-1)[batch.valid]),
        **summary("tokens_per_episode", batch.episodes.total(counted)[kept]),
    }


def episodes_per_group(batch: RowBatch) -> dict[str, float]:
    """How many episodes that are not rejected each group has: a spread tells of torn groups."""
    group = batch.group()[batch.valid]
    episode = batch.episodes.of_row[batch.valid]
    of_group = torch.stack([group, episode], dim=1).unique(dim=0)[:, 0]
    return summary("episodes_per_group", of_group.unique(return_counts=True)[1].double())


def groups_without_spread(batch: RowBatch, outcome: Tensor) -> dict[str, float]:
    """Which share of the groups has episodes that all came to the same: comparing them says nothing.

    Args:
        batch: The rows.
        outcome: ``[N]`` floating: what each row's episode came to.
    """
    group = batch.group()
    teaches = group[dynamic_sampling_mask(outcome, group, valid=batch.valid)].unique()
    number = len(group[batch.valid].unique())
    return {"groups/without_spread": 1 - len(teaches) / number if number else 0.0}
