"""Closed episodes: which of them are stored, in what form, and under which handles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from torchrl_mt.data._store.columns.prompt_column import copy_of_episodes
from torchrl_mt.data._store.steps import Steps, pack, unpack
from torchrl_mt.data._writing.open_steps import Label, OpenSteps
from torchrl_mt.data._writing.segments import Batch
from torchrl_mt.data._writing.ted import EndFlags

__all__ = ["Closed", "Reason", "handles_of_batch", "steps_of", "transformed", "worth_storing"]

Reason = Literal["ended", "break", "budget", "flush"]
"""Why an episode is no longer open."""


@dataclass(frozen=True, eq=False)
class Closed:
    """An episode that is no longer open."""

    slot: int
    """Its slot in the open steps; -1 if it was never there."""
    rows: np.ndarray
    """int64 ``[T]``: its rows in the open steps, or in the batch if it was never there."""
    label: Label
    """Its label among the open episodes; its id if it began in this batch."""
    reason: Reason = "ended"


def worth_storing(
    closed: list[Closed], steps: OpenSteps, flags: EndFlags, *, discard_broken: bool
) -> list[Closed]:
    """Select the episodes to store.

    Episodes that were given up are left out if their steps have no flag to mark, and broken ones with
    ``discard_broken``.
    """
    given_up = [episode for episode in closed if episode.reason != "ended"]
    if not given_up:
        return closed
    lost = []
    if discard_broken:
        lost = [episode for episode in given_up if episode.reason == "break"]
    if not flags.marks(steps.take(given_up[0].rows[:1])):
        lost = given_up
    return [episode for episode in closed if episode not in lost]


def steps_of(closed: list[Closed], opened: OpenSteps, flags: EndFlags) -> Steps:
    """Concatenate the steps of episodes; mark those that have not ended as truncated."""
    rows = [episode.rows for episode in closed]
    steps = opened.take(np.concatenate(rows) if len(rows) > 1 else rows[0])
    if all(episode.reason == "ended" for episode in closed):
        return steps
    lasts = accumulate(map(len, rows))
    cut = [at - 1 for at, e in zip(lasts, closed, strict=True) if e.reason != "ended"]
    return flags.truncate(steps, cut)


def transformed(
    transform: Callable[[Any], Any] | None, episodes: Steps, closed: list[Closed], flags: EndFlags
) -> tuple[Steps, Tensor]:
    """Apply the transform to closed episodes; return the steps to store and the episode lengths."""
    lengths = torch.from_numpy(np.array([len(e.rows) for e in closed], dtype=np.int64))
    if transform is None or not closed:
        return episodes, lengths
    episodes = copy_of_episodes(episodes, lengths)
    if getattr(transform, "takes_many_episodes", False):
        results = unpack(_one_batch(transform(pack(episodes, unread=True))))
        last = flags.ended(results) if results.length else np.zeros(1, dtype=bool)
        ends = torch.from_numpy(np.flatnonzero(last) + 1)
        if len(ends) != len(lengths) or not last[-1]:
            raise ValueError(
                f"transform was given {len(lengths)} whole episodes and must return as many, got "
                f"{len(ends)} ends of episodes in {results.length} steps."
            )
        return results, ends.diff(prepend=ends.new_zeros(1))
    stops = lengths.cumsum(0).tolist()
    parts: list[Steps] = []
    for each, start, stop in zip(closed, [0, *stops], stops, strict=False):
        try:
            parts.append(unpack(_one_batch(transform(pack(episodes[start:stop], unread=True)))))
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"The transform of EpisodeWriter was given episode {each.label}.")
            raise
    return Steps.concat(parts), torch.tensor([part.length for part in parts], device="cpu")


def handles_of_batch(
    batch: Batch,
    shape: torch.Size,
    closed: list[Closed],
    lengths: Tensor,
    stored: Tensor,
    first: int,
) -> Tensor:
    """Return the handle of each step of the batch; -1 if it is unknown or not stored.

    Args:
        batch: the batch.
        shape: batch size, the shape of the result.
        closed: the stored episodes.
        lengths: int64 ``[E]``, their stored lengths.
        stored: int64 ``[K]``, handles of the last ``K`` of their steps, which are still stored.
        first: row of the first step of the batch.
    """
    is_one = batch.places is None and len(closed) == 1 and closed[0].rows[0] == first
    if is_one and len(closed[0].rows) == shape.numel() == len(stored):
        return stored.view(shape)  # The batch is one whole episode.
    if not closed:
        return torch.full(shape, -1, device="cpu")
    index, known, end = np.full(shape.numel(), -1), stored.numpy(), stored.shape[0]
    # The first of the stored episodes may already be evicted.
    for episode, length in zip(reversed(closed), reversed(lengths.tolist()), strict=True):
        begin, stop, end = end - length, end, end - length
        if begin < 0 or length != len(episode.rows):
            continue
        before = int(np.searchsorted(episode.rows, first))
        at = episode.rows[before:] - first
        index[at if batch.places is None else batch.places[at]] = known[begin + before : stop]
    return torch.from_numpy(index).view(shape)


def _one_batch(result: Any) -> Any:
    """Return a transform's result; refuse it if it is not ``[T]`` steps."""
    if is_tensor_collection(result) and result.ndim == 1:
        return result
    raise TypeError(
        f"transform must return an episode, a TensorDict of batch size [T], got "
        f"{getattr(result, 'batch_size', type(result).__name__)}."
    )
