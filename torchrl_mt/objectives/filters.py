"""Ready-made functions for ``process``: weights of the objective for rows and tokens.

They change neither returns nor advantages nor the loss's divisor. A weight that is there is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = ["FILTERS", "clip_filter", "dynamic_sampling", "top_entropy"]


def dynamic_sampling(rows: TensorDictBase) -> TensorDictBase:
    """Keep the rows of groups whose episodes' scores differ; others get weight 0.

    :func:`~torchrl_mt.objectives.functional.dynamic_sampling_mask` of the scores before any KL. To save
    computing such rows in the loss and leave them out of its divisor, drop them:
    ``rows = rows[rows["weights", "full"].any(-1)]``.

    Args:
        rows: Rows ``[N]`` with each episode's score.

    Returns:
        The rows with ``("weights", "full")``.
    """
    return _weighted(rows, dynamic_sampling_mask(*_scores(rows), valid=valid_rows(rows)))


def clip_filter(rows: TensorDictBase, *, max_weight: float = 3.0) -> TensorDictBase:
    """Drop groups whose episodes' scores are all equal; weight the others up in exchange.

    :func:`~torchrl_mt.objectives.functional.clip_filter_weight` of the scores before any KL.

    Args:
        rows: Rows ``[N]`` with each episode's score.
        max_weight: Largest weight, above 0.

    Returns:
        The rows with ``("weights", "full")``.
    """
    weight = clip_filter_weight(*_scores(rows), valid=valid_rows(rows), max_weight=max_weight)
    return _weighted(rows, weight)


def top_entropy(rows: TensorDictBase, *, rho: float = 0.2) -> TensorDictBase:
    """Keep the sampled tokens with the highest entropy; others get weight 0.

    :func:`~torchrl_mt.objectives.functional.entropy_mask` over all rows.

    Args:
        rows: Rows ``[N]`` with ``"entropy"``, as with ``Passes(with_entropy=True)``.
        rho: Share of tokens to keep, in (0, 1].

    Returns:
        The rows with ``("weights", "full")``.
    """
    entropy = read_entry(rows, ExperienceKeys.entropy)
    mask = scored_tokens(
        read_entry(rows, ExperienceKeys.attention_mask),
        read_entry(rows, ExperienceKeys.assistant_mask),
    )
    return _weighted(rows, entropy_mask(entropy, mask & valid_rows(rows).unsqueeze(-1), rho))


FILTERS: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
    "clip_filter": clip_filter,
    "dynamic_sampling": dynamic_sampling,
    "top_entropy": top_entropy,
}
"""The functions by their names in :class:`~torchrl_mt.objectives.ExperienceMaker`."""


def is_filter(function: object) -> bool:
    """Whether a function, perhaps within ``partial``, is of this module: it only sets weights."""
    return _unbound(function) in FILTERS.values()


def reads_group(function: object) -> bool:
    """Whether a function of this module reads the rows' groups."""
    return _unbound(function) in (dynamic_sampling, clip_filter)


def reads_entropy(function: object) -> bool:
    """Whether a function of this module reads the entropies."""
    return _unbound(function) is top_entropy


def _unbound(function: object) -> object:
    """Return the function inside a ``partial``, or the function itself."""
    return getattr(function, "func", function)


def _weighted(rows: TensorDictBase, factor: Tensor) -> TensorDictBase:
    """Multiply the weight of each token by a factor, ``[N]`` or ``[N, S]``."""
    mask = read_entry(rows, ExperienceKeys.assistant_mask)
    weight = per_token(rows.get(ExperienceKeys.weight, mask)) * per_token(factor)
    return rows.set(ExperienceKeys.weight, torch.where(mask, weight, 0.0))


def per_token(weight: Tensor) -> Tensor:
    """Convert weights ``[N]`` or ``[N, S]`` to float32 that broadcasts with tokens."""
    return weight.float() if weight.ndim == 2 else weight.float().unsqueeze(-1)


def _scores(rows: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Score of each row's episode, and its group."""
    score = read_entry(rows, EPISODE_SCORE, hint="; ExperienceMaker gives it to its filters")
    return score, read_entry(rows, ExperienceKeys.group)


def valid_rows(rows: TensorDictBase) -> Tensor:
    """Which rows are valid, ``[N]`` bool."""
    return read_valid(rows, ExperienceKeys.valid, read_entry(rows, ExperienceKeys.assistant_mask))
