"""What writes a format: encoded episodes, one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from torchrl_mt.data._store.steps import Path, unpack
from torchrl_mt.datasets._encoding.growing_prompts import as_additions, growing, whole_schema
from torchrl_mt.datasets._encoding.schema import EpisodeSchema
from torchrl_mt.datasets._encoding.stored_columns import StoredRows, encode_episode
from torchrl_mt.datasets._encoding.values import to_json_text
from torchrl_mt.datasets.registry import Mode

__all__ = ["EncodedEpisode", "FormatWriter"]


@dataclass(frozen=True)
class EncodedEpisode:
    """An episode as files hold it."""

    schema: EpisodeSchema
    """That of the data set."""
    length: int
    """Steps."""
    own_next: int
    """What :meth:`EpisodeSchema.disagreeing` returned."""
    columns: Mapping[Path, StoredRows]
    """Rows of every entry that is not shared."""
    metadata: str
    """JSON text."""


class FormatWriter(ABC):
    """A data set of one format, open for writing.

    :func:`~torchrl_mt.datasets.open_episodes` has checked the mode, holds the lock, and gives episodes
    that fit the schema. ``mode`` is ``"append"`` also for what does not exist yet.

    Args:
        path: file or folder.
        mode: see :func:`~torchrl_mt.datasets.open_episodes`.
    """

    share_next = True
    """Whether a ``("next", k)`` that agrees with ``k`` is written once."""

    def __init__(self, path: FilePath, mode: Mode) -> None:
        self.path = path
        self.mode = mode
        self.schema: EpisodeSchema | None = None
        """None before the first episode; a subclass sets that of what it appends to."""

    def write_episode(self, episode: Any, metadata: dict[str, Any]) -> None:
        """Write a TED TensorDict ``[T]``."""
        steps = unpack(episode)
        schema = self.schema or growing(EpisodeSchema.of(steps, share_next=self.share_next))
        if whole_schema(schema) is not schema:
            steps = as_additions(steps)
        own, columns = encode_episode(schema, schema.conform(steps))
        self.write(EncodedEpisode(schema, steps.length, own, columns, to_json_text(metadata)))
        self.schema = schema

    @abstractmethod
    def write(self, episode: EncodedEpisode) -> None:
        """Write an episode, all of it or nothing; with the first one, make the data set."""

    @abstractmethod
    def close(self) -> None:
        """Finish the data set; with ``overwrite``, put it in the place of what was there."""

    @abstractmethod
    def abort(self) -> None:
        """Give up an ``overwrite``: what was there remains, and nothing else."""
