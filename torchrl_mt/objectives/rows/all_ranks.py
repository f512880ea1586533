"""The rows of all ranks as one batch, on every rank, without images and Python objects.

Statistics of this batch are those of one process that has all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, distributed

from torchrl_mt.objectives.rows.batch import RowBatch, read_batch
from torchrl_mt.objectives.rows.keys import as_path
from torchrl_mt.ranks import call_on_all
from torchrl_mt.vision.rows import PIXELS

_PADDING = ("turns", "versions")
"""Names of the keys whose entries are -1 on padding; others are 0."""


@dataclass(frozen=True)
class AllRanks:
    """A batch of the rows of all ranks, and where those of this rank are in it."""

    process_group: distributed.ProcessGroup
    mine: RowBatch
    """``[N, S]``: the rows of this rank."""
    batch: RowBatch
    """``[M, W]``: the rows in order of rank, as wide as the widest."""
    widths: tuple[int, ...]
    """Tokens in a row of each rank, padding included."""
    counts: tuple[int, ...]
    """Number of rows of each rank."""
    rank: int

    @staticmethod
    def of(read: Callable[[], RowBatch], process_group: distributed.ProcessGroup) -> AllRanks:
        """Gather the rows of all ranks, any of which may have none.

        Args:
            read: Reads and checks the rows of this rank.
            process_group: The ranks.

        Raises:
            Exception: What ``read`` raises.
            RuntimeError: If it fails on another rank.
            ValueError: If ranks have rows with different entries, an episode has rows on several ranks,
                or the rows together are refused by
                :func:`~torchrl_mt.objectives.rows.batch.read_batch`.
        """
        batches: list[RowBatch] = []

        def given() -> tuple[torch.Size, dict[NestedKey, Tensor]]:
            batches.append(read())
            entries = batches[0].rows.items(True, True)
            return batches[0].mask.shape, {
                key: value.cpu()
                for key, value in entries
                if isinstance(value, Tensor) and as_path(key)[0] != PIXELS[0]
            }

        all_given = call_on_all(given, process_group)
        (mine,) = batches
        keys = mine.keys
        counts = tuple(shape[0] for shape, _ in all_given)
        widths = tuple(shape[1] for shape, _ in all_given)
        padded = {getattr(keys, name) for name in _PADDING}
        joined = TensorDict({}, [sum(counts)])
        for key in _common_keys([entries for _, entries in all_given]):
            parts = [entries[key] for _, entries in all_given]
            joined.set(key, _joined(key, parts, widths, -1 if key in padded else 0))
        joined = joined.to(mine.device)
        rank = distributed.get_rank(process_group)
        batch = read_batch(joined, keys)
        _check_whole_episodes(batch, counts)
        return AllRanks(process_group, mine, batch, widths, counts, rank)

    def gather(self, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Gather entries by name: ``[N, S]`` of each rank's rows to ``[M, W]`` of all.

        Args:
            make: Computes those of this rank; if it fails on one, all ranks raise.
        """
        there = self.batch.mask.device
        every = call_on_all(
            lambda: {name: value.cpu() for name, value in make().items()}, self.process_group
        )
        return {
            name: _joined(name, [entries[name] for entries in every], self.widths, 0).to(there)
            for name in _common_keys(every)
        }

    def is_own(self, number: Tensor) -> Tensor:
        """Tell which of some rows ``[K]``, numbered as in ``batch``, are of this rank: ``[K]`` bool."""
        return (number >= self._first) & (number < self._first + self.counts[self.rank])

    def own_rows(self, number: Tensor) -> TensorDictBase:
        """Take this rank's own rows among those of some numbers ``[K]``, with images and objects."""
        return self.mine.rows[number[self.is_own(number)] - self._first]

    def own(self, value: Any, number: Tensor | None = None) -> Any:
        """Return this rank's part ``[N, S, ...]`` of values ``[K, W, ...]`` of these rows, or of all."""
        mine = slice(self._first, self._first + self.counts[self.rank])
        value = value[mine if number is None else self.is_own(number)]
        per_token = value.ndim > 1 and value.shape[1] == max(self.widths)
        return value[:, : self.widths[self.rank]].clone() if per_token else value

    @property
    def _first(self) -> int:
        """Number of this rank's first row."""
        return sum(self.counts[: self.rank])


def _check_whole_episodes(batch: RowBatch, counts: tuple[int, ...]) -> None:
    """Refuse an episode whose rows are on several ranks, each of which would reward it."""
    episode = batch.episodes.of_row
    rank = (
        torch.arange(len(counts), device="cpu")
        .repeat_interleave(torch.tensor(counts, device="cpu"))
        .to(episode.device)
    )
    low = torch.full_like(batch.episodes.last_token, len(counts))
    low = low.scatter_reduce(0, episode, rank, "amin")[episode]
    torn = (rank != low).nonzero()
    if len(torn):
        n = int(torn[0])
        raise ValueError(
            f"rows must be whole episodes on each rank, but episode {int(batch.episode_id[n])} has rows "
            f"on ranks {int(low[n])} and {int(rank[n])}: divide rows with "
            "split_rows(rows, num_parts, keep='episode'); copies must differ in 'episode_index'."
        )


def _common_keys(every: list[dict[Any, Tensor]]) -> list[Any]:
    """List the keys that all ranks have; refuse others."""
    first = every[0]
    for rank, entries in enumerate(every):
        other = sorted(map(str, entries.keys() ^ first.keys()))
        if other:
            raise ValueError(
                f"rows must have the same entries on all ranks, but only one of ranks 0 and {rank} has "
                f"{', '.join(other)}; give a rank without rows an empty part of others: rows[:0]."
            )
    return list(first)


def _joined(key: NestedKey, tensors: list[Tensor], widths: tuple[int, ...], fill: int) -> Tensor:
    """Put ranks' entries one after the other; those of tokens are filled up to the largest width."""
    width = max(widths)
    per_token = all(x.ndim > 1 and x.shape[1] == w for x, w in zip(tensors, widths, strict=True))
    if per_token:
        tensors = [
            torch.cat([x, x.new_full((len(x), width - x.shape[1], *x.shape[2:]), fill)], dim=1)
            for x in tensors
        ]
    try:
        return torch.cat(tensors)
    except RuntimeError as error:
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(
            f"the entry {key!r} of rows must have the same shape on all ranks, but for rows and tokens, "
            f"got {shapes}: {error}"
        ) from None
