"""Whole data sets from memory to disk and back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torchrl.data import ReplayBuffer

from torchrl_mt.data import EpisodeStorage
from torchrl_mt.data._store.dataset_episodes import stored_episodes
from torchrl_mt.datasets.dataset import EpisodeDataset
from torchrl_mt.datasets.registry import Mode
from torchrl_mt.datasets.writing import open_episodes, storage_of, write_all

__all__ = ["load_episodes", "save_episodes"]


def save_episodes(
    source: EpisodeStorage | ReplayBuffer | EpisodeDataset | Iterable[Any],
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    mode: Mode = "error",
    **options: Any,
) -> int:
    """Write all episodes of a buffer to a data set on disk, oldest first, with their metadata.

    Args:
        source: an ``EpisodeStorage``, a ``ReplayBuffer`` on one, another data set, or an iterable of
            episodes as :meth:`DatasetWriter.write_episodes` takes them. Episodes that a writer holds
            open are not stored yet, and are not written.
        path: as for :func:`~torchrl_mt.datasets.open_episodes`, like the other arguments and errors.
        format: see there.
        mode: see there.
        **options: see there.

    Returns:
        Number of episodes written.

    Examples:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from torchrl_mt.data import EpisodeStorage
        >>> storage = EpisodeStorage(100)
        >>> index = storage.append(TensorDict({"action": torch.arange(3)}, [3]))
        >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
        >>> save_episodes(storage, path)
        1
        >>> EpisodeDataset(path).episode(0)["action"]
        tensor([0, 1, 2])
    """
    if isinstance(source, (str, os.PathLike)):
        source = EpisodeDataset(source)
    if isinstance(source, ReplayBuffer):
        source = storage_of(source, "source")
    with open_episodes(path, format=format, mode=mode, **options) as out:
        return write_all(out, _with_metadata(source))


def load_episodes(
    path: str | os.PathLike[str] | EpisodeDataset, into: EpisodeStorage | ReplayBuffer
) -> int:
    """Append all episodes of a data set to a buffer, with their metadata.

    They are read some at a time. If the buffer is too small for all, the first ones leave again.

    Args:
        path: the data set.
        into: an ``EpisodeStorage``, or a ``ReplayBuffer`` on one.

    Returns:
        Number of episodes appended.

    Raises:
        ValueError: if an episode does not fit what is stored; those before it are stored.
        DatasetError: if one cannot be read; likewise.
        TypeError: if ``path`` is something else, such as a list of episodes.

    Examples:
        >>> import tempfile
        >>> from torchrl_mt.data import EpisodeStorage
        >>> path = os.path.join(tempfile.mkdtemp(), "demos.jsonl")
        >>> with open_episodes(path) as out:
        ...     out.write_episode({"action": [0, 1]}, metadata={"player": "Ann"})
        >>> storage = EpisodeStorage(100)
        >>> load_episodes(path, storage)
        1
        >>> storage.metadata(0)
        {'player': 'Ann'}
    """
    if not isinstance(path, (str, os.PathLike, EpisodeDataset)):
        raise TypeError(
            f"path must be the path of a data set or an EpisodeDataset, got {type(path).__name__}: "
            f"episode_writer(buffer).write_episodes(episodes) stores a list of episodes."
        )
    dataset = path if isinstance(path, EpisodeDataset) else EpisodeDataset(path)
    return storage_of(into, "into").extend_from(dataset)


def _with_metadata(source: Any) -> Iterable[Any]:
    """Iterate over episodes, with the metadata of those that have some."""
    if isinstance(source, EpisodeDataset):
        return ((source.episode(i), source.metadata(i)) for i in range(len(source)))
    if isinstance(source, EpisodeStorage):
        return stored_episodes(source)
    return source
