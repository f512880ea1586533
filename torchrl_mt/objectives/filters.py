"""Filters: weights of the objective for rows and tokens, computed from completed rows.

A filter changes neither returns nor advantages nor the loss's divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.checks import as_tensor
from torchrl_mt.objectives.functional import (
    clip_filter_weight,
    dynamic_sampling_mask,
    entropy_mask,
)
from torchrl_mt.objectives.rows.keys import EPISODE_SCORE, ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry, read_valid
from torchrl_mt.scoring.log_probs import scored_tokens

__all__ = ["FILTERS", "Filter", "clip_filter", "dynamic_sampling", "top_entropy"]

Filter = Callable[[TensorDictBase], Tensor]
"""Function from completed rows to weights of rows ``[N]`` or tokens ``[N, S]``, bool or floating, 0
or more. The rows also have the score of each row's episode, ``("rewards", "episode")`` ``[N]``."""


def dynamic_sampling(rows: TensorDictBase) -> Tensor:
    """Keep the rows of groups whose episodes' scores differ.

    :func:`~torchrl_mt.objectives.functional.dynamic_sampling_mask` of the scores before any KL.

    Args:
        rows: Completed rows ``[N]``, with each episode's score.

    Returns:
        ``[N]`` bool.
    """
    return dynamic_sampling_mask(*_scores(rows), valid=_valid(rows))


def clip_filter(rows: TensorDictBase, *, max_weight: float = 3.0) -> Tensor:
    """Drop groups whose episodes' scores are all equal; weight the others up in exchange.

    :func:`~torchrl_mt.objectives.functional.clip_filter_weight` of the scores before any KL.

    Args:
        rows: Completed rows ``[N]``, with each episode's score.
        max_weight: Largest weight, above 0.

    Returns:
        ``[N]`` float32.
    """
    return clip_filter_weight(*_scores(rows), valid=_valid(rows), max_weight=max_weight)


def top_entropy(rows: TensorDictBase, *, rho: float = 0.2) -> Tensor:
    """Keep the sampled tokens with the highest entropy.

    :func:`~torchrl_mt.objectives.functional.entropy_mask` over all rows.

    Args:
        rows: Completed rows ``[N]`` with ``"entropy"``.
        rho: Share of tokens to keep, in (0, 1].

    Returns:
        ``[N, S]`` bool.
    """
    entropy = read_entry(rows, ExperienceKeys.entropy)
    mask = scored_tokens(
        read_entry(rows, ExperienceKeys.attention_mask),
        read_entry(rows, ExperienceKeys.assistant_mask),
    )
    return entropy_mask(entropy, mask & _valid(rows).unsqueeze(-1), rho)


FILTERS: dict[str, Filter] = {
    "clip_filter": clip_filter,
    "dynamic_sampling": dynamic_sampling,
    "top_entropy": top_entropy,
}
"""Filters by their names in :class:`~torchrl_mt.objectives.ExperienceMaker`."""


def reads_group(one: Filter) -> bool:
    """Whether a filter of this module reads the rows' groups."""
    return _unbound(one) in (dynamic_sampling, clip_filter)


def reads_entropy(one: Filter) -> bool:
    """Whether a filter of this module reads the entropies."""
    return _unbound(one) is top_entropy


def filter_weight(filters: Sequence[Filter], rows: TensorDictBase, mask: Tensor) -> Tensor:
    """Multiply the weights of all filters: ``[N, S]`` float32, zero on masked tokens.

    ``mask`` ``[N, S]`` bool is true on the sampled tokens of valid rows. Weights that are negative,
    not finite, or of a wrong shape or type are refused.
    """
    weight = mask.float()
    for one in filters:
        # A user's filter gets a copy: its in-place changes must not reach the rows.
        factor = one(rows if _unbound(one) in FILTERS.values() else rows.clone())
        factor = as_tensor(f"the weights of filter {one!r}", factor).to(mask.device)
        if factor.shape not in (mask.shape[:1], mask.shape):
            raise ValueError(
                f"a filter must return weights of shape {tuple(mask.shape[:1])} or "
                f"{tuple(mask.shape)}, got {tuple(factor.shape)} from {one!r}."
            )
        factor = factor.float() if factor.ndim == 2 else factor.float().unsqueeze(-1)
        factor = torch.where(mask, factor, 0.0)
        if not bool((factor.isfinite() & (factor >= 0)).all()):
            raise ValueError(
                f"a filter must return finite weights of 0 or more, but {one!r} did not."
            )
        weight = weight * factor
    return weight


def _unbound(one: Filter) -> Filter:
    """Return the function inside a ``partial``, or the function itself."""
    return getattr(one, "func", one)


def _scores(rows: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Score of each row's episode, and its group."""
    score = read_entry(rows, EPISODE_SCORE, hint="; ExperienceMaker gives it to its filters")
    return score, read_entry(rows, ExperienceKeys.group)


def _valid(rows: TensorDictBase) -> Tensor:
    return read_valid(rows, ExperienceKeys.valid, read_entry(rows, ExperienceKeys.assistant_mask))
