"""Episodes of a dataset, which a storage appends oldest first, reading a bounded number of steps ahead.

A dataset is whatever has ``len()`` and ``episode(i)``. If an episode is refused, those before it stay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.data._store.steps import Steps, select, unpack

__all__ = [
    "append_dataset",
    "check_episode",
    "check_metadata",
    "check_one_episode",
    "read_each",
    "stored_episodes",
]

_logger = logging.getLogger("torchrl_mt")

_STEPS_AT_A_TIME = 1024
"""Most steps that are read before they are stored, unless an episode has more."""

_Episode = tuple[Steps, dict[Any, Any]]
"""The steps and the metadata of an episode."""


def check_episode(episode: Any) -> None:
    """Refuse an episode whose batch size is not ``[T]`` (``ValueError``)."""
    if is_tensor_collection(episode) and episode.ndim != 1:
        raise ValueError(
            f"episode must have a batch size of [T], got {list(episode.batch_size)}: append the "
            f"rows one by one, or write batches through ReplayBuffer(writer=EpisodeWriter(), ...)."
        )


def check_one_episode(steps: Steps) -> None:
    """Refuse steps that go on after an end, as those of several episodes do (``ValueError``)."""
    for name in ("done", "terminated", "truncated"):
        flag = steps.columns.get(("next", name))
        if not isinstance(flag, Tensor) or flag.numel() != steps.length:
            continue  # One flag per agent may be true earlier.
        ends = flag.reshape(-1).bool()[:-1].nonzero()
        if len(ends):
            raise ValueError(
                f"episode must be one episode, but ('next', {name!r}) is true at step "
                f"{int(ends[0])} of {steps.length}. To split steps of several episodes: "
                f"buffer.extend(steps) on a ReplayBuffer(storage=EpisodeStorage(n), "
                f"writer=EpisodeWriter()); save_episodes(buffer, path) writes them to a file."
            )


def check_metadata(metadata: Any) -> None:
    """Refuse metadata that is no dict and not None (``TypeError``)."""
    if not (metadata is None or isinstance(metadata, dict)):
        raise TypeError(
            f"metadata must be a dict or None, got {type(metadata).__name__}: put the value in a "
            f'dict, such as {{"source": value}}.'
        )


def append_dataset(storage: Any, dataset: Any, keys: Sequence[NestedKey] | None) -> int:
    """Append all episodes of a dataset to a storage, and return their number.

    See :meth:`EpisodeStorage.extend_from`.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of keys, got the string {keys!r}: give [{keys!r}].")
    if isinstance(dataset, ReplayBuffer):
        dataset = dataset.storage
    if dataset is storage:
        raise ValueError("dataset must be another one, got the storage that it is to extend.")
    first, appended, most = storage.table.next, 0, min(_STEPS_AT_A_TIME, storage.max_size)
    read: list[_Episode] = []
    room = most
    try:
        for steps, metadata in _read(dataset, keys):
            room -= steps.length
            if read and room < 0:
                batch, read, room = read, [], most - steps.length
                appended = _append(storage, batch, appended)
            read.append((steps, metadata))
    finally:  # Those before an unreadable one are stored, too.
        appended = _append(storage, read, appended)
    left = storage.table.oldest - first
    if left > 0:
        _logger.warning(
            "only the newest %d of the %d episodes of the dataset are kept: raise max_steps=%s, "
            "max_tokens=%s or max_episodes=%s to keep all.",
            appended - left,
            appended,
            storage.max_size,
            storage.max_tokens,
            storage.max_episodes,
        )
    return appended


def _append(storage: Any, episodes: list[_Episode], before: int) -> int:
    """Append episodes of a dataset; return how many they are with those ``before`` them."""
    if not episodes:
        return before
    parts = [steps for steps, _ in episodes]
    lengths = torch.tensor([steps.length for steps in parts], device="cpu")
    try:
        storage.append_all(Steps.concat(parts), lengths, [metadata for _, metadata in episodes])
    except ValueError as error:
        if len(episodes) == 1:
            raise ValueError(
                f"episode {before} of the dataset is refused: {error} The {before} episodes before it "
                f"were appended."
            ) from error
        for each in episodes:
            before = _append(storage, [each], before)
        return before
    return before + len(episodes)


def _read(dataset: Any, keys: Sequence[NestedKey] | None) -> Iterator[_Episode]:
    """Read the episodes of a dataset, each when it is asked for.

    Raises:
        TypeError: if it has no ``episode(i)``, or an episode is no TensorDict.
        ValueError: if an episode has another batch size than ``[T]``, or goes on after an end.
        KeyError: if an episode lacks one of the ``keys``.
    """
    if not callable(getattr(dataset, "episode", None)):
        raise TypeError(
            f"dataset must have len(dataset) and dataset.episode(i), as an EpisodeDataset(path) or an "
            f"EpisodeStorage has, got {type(dataset).__name__}. Write steps without episodes, such as "
            f"TorchRL's offline datasets, through a buffer with an EpisodeWriter: "
            f"buffer.extend(dataset[:]), or part by part."
        )
    found = stored_episodes(dataset) if isinstance(dataset, Storage) else _numbered(dataset)
    for i, (episode, metadata) in enumerate(found):
        try:
            check_episode(episode)
            check_metadata(metadata)
            steps = unpack(episode)
            check_one_episode(steps)
            if keys is not None:
                steps = replace(steps, columns=select(steps.columns, keys, "keys"), root_class=None)
        except (TypeError, ValueError, KeyError) as error:
            raise type(error)(f"episode {i} of the dataset: {error.args[0]}") from error
        yield steps, metadata or {}


def _numbered(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """Read the episodes of a dataset that does not change."""
    metadata = getattr(dataset, "metadata", None)
    for i in range(len(dataset)):
        yield dataset.episode(i), metadata(i) if callable(metadata) else None


def stored_episodes(storage: Any) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Read the episodes that a storage holds now, with their metadata; skip those evicted meanwhile."""
    stop = storage.table.next
    return read_each(storage, lambda i: (storage.episode(i), storage.metadata(i)), stop)


def read_each(storage: Any, read: Callable[[int], Any], stop: float = math.inf) -> Iterator[Any]:
    """Read the stored episodes, oldest first, up to an ordinal; skip those evicted meanwhile."""
    ordinal = storage.table.oldest
    while True:
        with storage.lock:
            ordinal = max(ordinal, storage.table.oldest)
            if ordinal >= min(stop, storage.table.next):
                return
            found = read(ordinal - storage.table.oldest)
        yield found
        ordinal += 1
