"""Clips of episodes as a map-style ``Dataset``: each clip has a number, and is read when asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchrl.data import ReplayBuffer

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.data._store.clip_marks import ClipMarks, edges
from torchrl_mt.data._store.steps import Column, Path, Steps, pack, unpack
from torchrl_mt.data._store.strides import check_strides, is_joined, join
from torchrl_mt.data._store.table import Choice, search
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._files.readers import Runs, runs_of
from torchrl_mt.datasets.dataset import EpisodeDataset
from torchrl_mt.datasets.loader_batches import ClipBatch

__all__ = ["ClipDataset"]

_logger = logging.getLogger("torchrl_mt")


class ClipDataset(Dataset):
    """Every clip of ``slice_len`` steps, for a ``DataLoader``.

    A clip is what :class:`~torchrl_mt.data.ClipSampler` samples: consecutive steps of one episode, its
    last step marked as truncated and done, its first as ``is_init`` if the data has that entry. Clip
    numbers count the clips of the first episode, then of the second, and so on. Finding a clip takes
    O(log E) for ``E`` episodes.

    A ``DataLoader`` with ``shuffle=True`` sees each clip once an epoch. Its processes open the files for
    themselves. A batch is read at once, which is much faster than clip by clip, and collated without
    another copy: the loader's own ``collate_fn`` is right. One of your own gets a sequence of
    TensorDicts, for ``torch.stack([*clips])``.

    Args:
        source: an :class:`~torchrl_mt.datasets.EpisodeDataset`, its path, or an ``EpisodeStorage`` or
            ``ReplayBuffer`` on one, of which the dataset holds a copy as it is now.
        slice_len: steps per clip.
        stride: number ``K`` of stored steps that make one step of a clip, as for ``ClipSampler``: a
            clip spans ``slice_len * K`` stored steps, observations are those of every ``K``-th, and
            ``action`` has all ``K`` (``[K * A]`` for ``[A]``).
        episodes: numbers of the episodes whose clips these are, such as those of a training split; by
            default all.
        transform: called with each clip, a TED TensorDict ``[slice_len]``; its result is the item.

    Raises:
        IndexError: if there is no episode of a number.
        ValueError: if a number is not a positive integer, or, with a stride above 1, an action, reward
            or done flag has no fixed shape.
        TypeError: if ``source`` is something else.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_mt.datasets import open_episodes
        >>> path = os.path.join(tempfile.mkdtemp(), "walks.jsonl")
        >>> with open_episodes(path) as out:
        ...     out.write_episodes({"action": torch.zeros(20, 2)} for _ in range(4))
        >>> clips = ClipDataset(path, 4)
        >>> len(clips), clips[0]["action"].shape
        (68, torch.Size([4, 2]))
        >>> loader = torch.utils.data.DataLoader(clips, batch_size=32, shuffle=True)
        >>> next(iter(loader))["action"].shape
        torch.Size([32, 4, 2])
    """

    def __init__(
        self,
        source: EpisodeDataset | EpisodeStorage | ReplayBuffer | str | os.PathLike[str],
        slice_len: int,
        *,
        stride: int = 1,
        episodes: Sequence[int] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.slice_len = check_positive_integer("slice_len", slice_len)
        self.stride = check_positive_integer("stride", stride)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable, got {type(transform).__name__}.")
        self.transform = transform
        if isinstance(source, (str, os.PathLike)):
            source = EpisodeDataset(source)
        if isinstance(source, ReplayBuffer):
            source = source.storage
        self._source: EpisodeDataset | _Snapshot
        if isinstance(source, EpisodeDataset):
            self._source, lengths = source, source.lengths.numpy()
        elif isinstance(source, EpisodeStorage):
            self._source = _Snapshot(source)
            lengths = self._source.lengths
        else:
            raise TypeError(
                f"source must be an EpisodeDataset, a path, or an EpisodeStorage or a ReplayBuffer on "
                f"one, got {type(source).__name__}."
            )
        if self.stride > 1:
            check_strides(self._source.fields)
        units = Choice(self.slice_len * self.stride).units(lengths)
        if episodes is not None:
            chosen, numbers = np.asarray(episodes), np.arange(len(lengths))
            if len(strange := chosen[~np.isin(chosen, numbers)]):
                raise IndexError(
                    f"episodes must be numbers from 0 to {len(lengths) - 1}, got {strange[0]}."
                )
            units[~np.isin(numbers, chosen)] = 0
        if not units.any():
            _logger.warning(
                "there are no clips: a clip spans %d steps (slice_len=%d, stride=%d), and the longest "
                "of the %d episodes has %d.",
                self.slice_len * self.stride,
                self.slice_len,
                self.stride,
                len(lengths),
                lengths.max(initial=0),
            )
        self._before = np.concatenate([np.zeros(1, dtype=np.int64), units.cumsum()])

    def __len__(self) -> int:
        """Return the number of clips."""
        return int(self._before[-1])

    def __getitem__(self, i: int) -> Any:
        """Return a clip: a TED TensorDict ``[slice_len]``, or what the transform makes of it."""
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return clips, read at once; a ``DataLoader`` calls this for each batch."""
        wanted, number = np.asarray(indices), len(self)
        if wanted.size and (wanted.dtype.kind not in "iu" or wanted.ndim != 1):
            raise TypeError(
                f"the number of a clip must be an integer, got {indices!r:.80}: for some of the clips, "
                f"torch.utils.data.Subset(dataset, numbers)."
            )
        for i in wanted[(wanted < -number) | (wanted >= number)].tolist():
            raise IndexError(f"clip {i} is out of range: there are {number} clips.")
        episodes, offsets = search(self._before, wanted.astype(np.int64) % max(number, 1))
        steps = self._read(episodes, offsets)
        told = partial(edges, len(wanted), self.slice_len)
        ClipMarks().mark(told, torch.device("cpu"), steps)
        shape = torch.Size([len(wanted), self.slice_len])
        clips = pack(steps, batch_size=shape)
        return (
            ClipBatch(clips) if self.transform is None else [*map(self.transform, clips.unbind(0))]
        )

    def _read(self, episodes: np.ndarray, offsets: np.ndarray) -> Steps:
        """Read the clips that begin at these steps of these episodes, one after the other."""
        every = np.full(len(episodes), self.slice_len)
        if self.stride == 1:
            return self._source.read(Runs(episodes, offsets, every))
        last = offsets + (self.stride - 1)
        dense = Runs(episodes, offsets, every * self.stride)
        columns: dict[Path, Column] = {}
        for path in self._source.fields:
            if is_joined(path):
                values = self._source.read(dense, [path]).columns[path]
                assert isinstance(values, torch.Tensor)
                columns[path] = join(path, values, self.stride)
            else:
                first = last if path[0] == "next" else offsets
                runs = Runs(episodes, first, every, self.stride)
                columns[path] = self._source.read(runs, [path]).columns[path]
        return Steps(len(episodes) * self.slice_len, columns)

    def __repr__(self) -> str:
        return (
            f"ClipDataset(clips={len(self)}, slice_len={self.slice_len}, stride={self.stride}, "
            f"source={self._source})"
        )


class _Snapshot:
    """A copy of what a storage holds."""

    def __init__(self, storage: EpisodeStorage) -> None:
        with storage.lock:
            self.lengths = storage.lengths.numpy()
            self._steps = unpack(storage[:].cpu()) if len(storage) else Steps(0, {})
        self._first = self.lengths.cumsum() - self.lengths
        self.fields = EpisodeSchema.of(self._steps, share_next=False).fields

    def read(self, runs: Runs, paths: Iterable[Path] | None = None) -> Steps:
        """Read steps, of these entries or of all."""
        rows = runs_of(self._first[runs.episodes] + runs.starts, runs.counts, runs.stride)
        chosen = self._steps.columns if paths is None else paths
        columns = {path: self._steps.columns[path] for path in chosen}
        return Steps(self._steps.length, columns).take(torch.from_numpy(rows))

    def __repr__(self) -> str:
        return f"a copy of a storage, episodes={len(self.lengths)}"
