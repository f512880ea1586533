"""Which rows and tokens the objective counts, and how much: weights made of completed rows.

A filter changes no return and no advantage, and nothing of what the loss divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

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
"""Completed rows, and in ``("rewards", "episode")`` ``[N]`` the score of each row's episode, to
weights of the rows, ``[N]``, or of their tokens, ``[N, S]``; bool or floating, 0 or more."""


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
    """Weigh rows up by the share of groups without spread, and leave those groups out.

    :func:`~torchrl_mt.objectives.functional.clip_filter_weight` of the scores before any KL.

    Args:
        rows: Completed rows ``[N]``, with each episode's score.
        max_weight: The bound, above 0.

    Returns:
        ``[N]`` float32.
    """
    return clip_filter_weight(*_scores(rows), valid=_valid(rows), max_weight=max_weight)


def top_entropy(rows: TensorDictBase, *, rho: float = 0.2) -> Tensor:
    """Keep the share of the sampled tokens at which the actor was least certain.

    :func:`~torchrl_mt.objectives.functional.entropy_mask`, over all rows.

    Args:
        rows: Completed rows ``[N]`` with ``"entropy"``.
        rho: Share, in (0, 1].

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
"""Name to filter, as :class:`~torchrl_mt.objectives.ExperienceMaker` takes it."""


def reads_group(one: Filter) -> bool:
    """Whether a filter of this module compares episodes with their groups."""
    return _name(one) in (dynamic_sampling, clip_filter)


def reads_entropy(one: Filter) -> bool:
    """Whether a filter of this module compares tokens by their entropy."""
    return _name(one) is top_entropy


def filter_weight(filters: Sequence[Filter], rows: TensorDictBase, mask: Tensor) -> Tensor:
    """Multiply the weights that filters give to rows: ``[N, S]`` float32, zero on masked tokens.

    ``mask`` ``[N, S]`` bool is true on the sampled tokens of valid rows. A weight that is negative or
    not finite, or of another shape or type, is refused.
    """
    weight = mask.float()
    for one in filters:
        # Filters of others get a copy of their own: what they do in place stays theirs.
        factor = one(rows if _name(one) in FILTERS.values() else rows.clone())
        if not isinstance(factor, Tensor):
            raise TypeError(
                f"a filter must return a tensor of weights, got {factor!r} from {one!r}."
            )
        if factor.is_complex():
            raise TypeError(f"a filter must return real weights, got {factor.dtype} from {one!r}.")
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


def _name(one: Filter) -> Filter:
    """The function itself, where arguments were bound to it."""
    return getattr(one, "func", one)


def _scores(rows: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Score of each row's episode, and its group."""
    score = read_entry(rows, EPISODE_SCORE, hint="; ExperienceMaker gives it to its filters")
    return score, read_entry(rows, ExperienceKeys.group)


def _valid(rows: TensorDictBase) -> Tensor:
    """Which rows are not rejected."""
    return read_valid(rows, ExperienceKeys.valid, read_entry(rows, ExperienceKeys.assistant_mask))
