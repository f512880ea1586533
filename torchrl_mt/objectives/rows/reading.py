"""Reading entries of training rows; missing, ill-shaped or non-finite ones are refused by name."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensor_collection,
)
from torch import Tensor

from torchrl_mt.checks import check_mask
from torchrl_mt.objectives.rows.keys import WRITERS, ExperienceKeys

MODEL_FAULT = (
    "the model is at fault; look for NaN in its weights, as a non-finite gradient leaves it, or try "
    "another dtype."
)
"""Advice for a model whose outputs are not finite."""
NO_LOG_PROB = "be log-probabilities, 0 or less", "Were they stored with the other sign?"
"""Requirement and advice for log-probabilities above 0."""


def read_entry(
    rows: TensorDictBase, key: NestedKey, usual: NestedKey | None = None, *, hint: str = ""
) -> Tensor:
    """Read an entry; the error for a missing one says who writes it.

    ``usual`` is the entry's default key.
    """
    value = rows.get(key, None)
    if value is None:
        if not is_tensor_collection(rows):
            raise TypeError(f"rows must be a TensorDict, got {type(rows).__name__}.")
        writer = WRITERS.get(key if usual is None else usual)
        hint = hint if writer is None else f"; {writer}{hint}"
        found = sorted(map(str, rows.keys(include_nested=True, leaves_only=True)))
        raise KeyError(f"rows lack the entry {key!r}{hint}; found {', '.join(found)}.")
    return value


def read_objects(rows: TensorDictBase, key: NestedKey) -> list[Any] | None:
    """Read one Python object per row; ``None`` if the rows have no such entry."""
    value = rows.get(key, None)
    if value is None:
        return None
    if isinstance(value, NonTensorData):
        return [value.data] * len(rows)
    if isinstance(value, (NonTensorStack, Tensor)):
        return value.tolist()
    raise TypeError(
        f"the entry {key!r} of rows must be non-tensor data or a tensor with one item for each row, "
        f"got {type(value).__name__}."
    )


def check_like(key: NestedKey, value: Tensor, other: NestedKey, shape: torch.Size) -> None:
    """Refuse an entry whose shape does not fit another entry."""
    if value.shape != shape:
        raise ValueError(
            f"the entry {key!r} of rows must have shape {tuple(shape)} to fit {other!r}, "
            f"got {tuple(value.shape)}."
        )


def check_finite(
    key: NestedKey, value: Tensor, where: Tensor, episode: Tensor | None, hint: str
) -> None:
    """Refuse an entry ``[N, S]`` that is not finite ``where`` ``[N, S]`` bool it counts.

    ``episode`` ``[N]`` is each row's episode id, for the error.
    """
    bad = (where & ~value.isfinite()).nonzero()
    if len(bad):
        n, t = bad[0].tolist()
        of = "" if episode is None else f"in episode {int(episode[n])} "
        raise ValueError(
            f"{key!r} must be finite where it counts, got {float(value[n, t])} {of}(row {n}, token "
            f"{t}) and {len(bad) - 1} more: {hint}"
        )


def read_episode(
    rows: TensorDictBase,
    episode_key: NestedKey = ExperienceKeys.episode,
    index_key: NestedKey = ExperienceKeys.episode_index,
    fork_key: NestedKey = ExperienceKeys.fork,
) -> Tensor:
    """Read each row's episode, ``[N]``; copies of an episode become episodes of their own.

    Duplicate rows are refused: their rewards would count twice.
    """
    episode = read_entry(rows, episode_key, ExperienceKeys.episode)
    check_like(episode_key, episode, "batch_size", rows.batch_size)
    copy, fork = rows.get(index_key, None), rows.get(fork_key, None)
    if copy is not None:
        check_like(index_key, copy, episode_key, episode.shape)
        name = torch.unique(torch.stack([episode, copy]), dim=1, return_inverse=True)[1]
    else:
        name = episode
    if fork is not None:
        check_like(fork_key, fork, episode_key, episode.shape)
        _, place, count = torch.unique(
            torch.stack([name, fork]), dim=1, return_inverse=True, return_counts=True
        )
        twice = (count[place] > 1).nonzero()
        if len(twice):
            n = int(twice[0])
            raise ValueError(
                f"rows have fork {int(fork[n])} of episode {int(episode[n])} (row {n}) more than once: "
                "give MergeTurns all episodes in one call, which tells copies of an episode apart, "
                f"or make {index_key!r} differ between the copies."
            )
    return name


def check_temperature(
    key: NestedKey, sampled: Tensor | None, temperature: float, valid: Tensor
) -> None:
    """Refuse rows whose sampling temperature ``[N]`` differs from the one to score them at.

    ``valid`` ``[N]`` bool is true on the rows that count. Rows without the entry pass. NaN means that
    the row's tokens were sampled at different temperatures.
    """
    if sampled is None:
        return
    check_like(key, sampled, "batch_size", valid.shape)
    rounding = max(1e-6, torch.finfo(sampled.dtype).eps) if sampled.is_floating_point() else 0.0
    sampled = sampled.to(valid.device).double()
    # Negated, so that NaN differs, too.
    other = valid & ~((sampled - temperature).abs() <= rounding * abs(temperature))
    if not bool(other.any()):
        return
    row = int(other.nonzero()[0])
    found = float(sampled[row])
    # The entry is float32: its own digits, not those of the nearest float64.
    said = f"row {row} has {key!r} {found:.7g}, but temperature is {temperature}"
    if found != found:
        raise ValueError(
            f"{said}: NaN means that the row's tokens were sampled at different temperatures. "
            "Sample whole episodes at one temperature, or drop such rows."
        )
    if not 0 < found < float("inf"):
        raise ValueError(f"{said}: no policy samples at that temperature; drop such rows.")
    raise ValueError(
        f"{said}. Score rows at the temperature that they were sampled at: give "
        f"passes=Passes(temperature={found:.7g}) wherever these rows are scored, and rows of others to "
        "another call."
    )


def read_valid(rows: TensorDictBase, key: NestedKey, mask: Tensor) -> Tensor:
    """Read which rows are valid, ``[N]`` bool; without the entry all are."""
    valid = rows.get(key, None)
    if valid is None:
        return torch.ones(mask.shape[:1], dtype=torch.bool, device=mask.device)
    check_like(key, valid, "batch_size", mask.shape[:1])
    check_mask(str(key), valid, mask.shape[:1])
    return valid
