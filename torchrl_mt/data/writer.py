"""A writer that stores whole episodes, whatever pieces they arrive in.

A step is stored once its episode has ended; until then it is kept aside. A call that is refused
changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from tensordict import is_tensor_collection, lazy_stack
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import (
    HERReplayBuffer,
    PrioritizedSampler,
    PromptGroupSampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import StreamingSliceSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_mt.data.checkpoint import load_state, save_state
from torchrl_mt.data.clip_sampler import ClipSampler
from torchrl_mt.data.episode_sampler import EpisodeSampler
from torchrl_mt.data.grouping import Segment, group_steps
from torchrl_mt.data.growing import copy_of_episodes
from torchrl_mt.data.indexing import HANDLES
from torchrl_mt.data.open_episode import OpenEpisode
from torchrl_mt.data.schema import Schema
from torchrl_mt.data.steps import (
    Path,
    Steps,
    has_lazy_stack,
    name_of,
    pack,
    unpack,
)
from torchrl_mt.data.storage import EpisodeStorage
from torchrl_mt.data.ted import ended, names_of, not_padding, stacked, truncated

__all__ = ["EpisodeWriter"]

_ID_KEYS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))


@dataclass(frozen=True)
class _ToldBy:
    """How the steps of a batch are told apart."""

    key: Path | None
    """Where the episode ids are; None if the done flags tell."""
    rows: int = 0
    """Rows of the batch, if the done flags tell."""

    def __str__(self) -> str:
        if self.key is not None:
            return f"the ids under {name_of(self.key)}"
        return f"the done flags of {self.rows} rows"


class EpisodeWriter(Writer):
    """Gathers steps into episodes and stores each episode once it has ended.

    It takes what collectors send: ``[N]`` or ``[B, T]`` TED data with whole or partial episodes, of
    several environments in turn. Steps are told apart by the episode id under ``traj_key``, or, if
    there is none, by the done flags, each row of a ``[B, T]`` batch being one environment and a
    ``[N]`` batch a single one. An episode ends with the first step whose ``("next", "done")``,
    ``("next", "terminated")`` or ``("next", "truncated")`` is true. The padding of split
    trajectories (where ``("collector", "mask")`` is false) is left out.

    An id that stops coming without a done flag leaves its episode open until :meth:`flush`: so do
    the episodes that TorchRL's ``Collector(reset_at_each_iter=True)`` breaks off after each batch.

    Args:
        traj_key: where the episode ids are; by default ``("collector", "traj_ids")`` or
            ``"episode"`` if the data has one.
        transform: called once with a copy of each whole episode (a TensorDict of batch size
            ``[T]``), which it may change; what it returns is stored. Prompts that extend each other are
            views of one tensor there: put others in their place rather than change their tokens in
            place. One with a true attribute
            ``takes_many_episodes``, such as :class:`~torchrl_mt.transforms.DiscountedReturn`, is
            called once for all episodes that end in a batch, one after the other in one
            TensorDict, which is faster.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_mt.data import EpisodeStorage, EpisodeWriter
        >>> rb = ReplayBuffer(storage=EpisodeStorage(10), writer=EpisodeWriter())
        >>> def steps(*done):
        ...     return TensorDict({"next": {"done": torch.tensor(done)}}, [len(done)])
        >>> rb.extend(steps(False, False))
        tensor([], dtype=torch.int64)
        >>> len(rb), len(rb.writer.open_episodes)
        (0, 1)
        >>> rb.storage.places(rb.extend(steps(True)))
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        *,
        traj_key: NestedKey | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self.traj_key = None if traj_key is None else unravel_key(traj_key)
        self.transform = transform
        self._open: dict[int, OpenEpisode] = {}
        self._told_by: _ToldBy | None = None
        self._write_count = 0

    @property
    def open_lengths(self) -> dict[int, int]:
        """How many steps came so far of each unfinished episode, by its id."""
        with self._held():
            return {key: episode.length for key, episode in self._open.items()}

    def register_storage(self, storage: Storage) -> None:
        """Called by the replay buffer."""
        if not isinstance(storage, EpisodeStorage):
            raise TypeError(
                f"EpisodeWriter writes to an EpisodeStorage, got {type(storage).__name__}: use "
                f"ReplayBuffer(storage=EpisodeStorage(max_steps), writer=EpisodeWriter(), ...)"
            )
        super().register_storage(storage)

    @property
    def open_episodes(self) -> dict[int, Any]:
        """The unfinished episodes by their id: copies of the steps so far, as TensorDicts."""
        with self._held():
            return {key: pack(episode.steps.clone()) for key, episode in self._open.items()}

    def extend(self, data: Any) -> Tensor:
        """Take a batch of steps, and store the episodes that end in it.

        Args:
            data: TED TensorDict or tensorclass, ``[N]`` or ``[B, T]``.

        Returns:
            int64 ``[K]``: the handles of the steps stored by this call, oldest first (see
            :meth:`EpisodeStorage.get`). A
            ``TensorDictReplayBuffer`` sets the indices in ``data``: for it they have the batch
            size of ``data``, with -1 for a step that is not stored (yet), and for one whose episode
            the transform made longer or shorter: which of its steps is which is not known.

        Raises:
            TypeError: if ``data`` is no TensorDict.
            ValueError: if ``data`` is empty, has no done flag, has one id in two rows, has steps
                that do not fit their episode's first ones, or an episode is refused by the storage:
                one that is still open, too, once it has more than ``max_steps`` steps, unless a
                ``transform`` may yet make it shorter. :meth:`discard` gets rid of such a one.
            KeyError: if ``traj_key`` is not in ``data``.
        """
        _check_data(data)
        if not data.ndim:
            raise ValueError("data must have a batch size of [N] or [B, T], got []: use add()")
        storage: EpisodeStorage = self._storage
        with storage.lock:
            _check_samplers(storage)
            shape = data.batch_size
            steps = _flatten(data)
            told_by, ids = self._ids(steps, shape)
            order, segments = group_steps(
                ids, ended(steps).view_as(ids), not_padding(steps, ids.shape)
            )
            if order is not None:
                steps = steps.take(order)
            episodes, came, still_open = self._assemble(steps, segments)
            ids_ended = [segment.key for segment in segments if segment.ended]
            episodes, lengths = self._transformed(episodes, came, ids_ended)
            stored = self._stored(episodes, lengths, ids_ended)
            self._open, self._told_by = still_open, told_by
            self._write_count += episodes.length
            if self._sets_indices():
                stored = _aligned(
                    segments,
                    came,
                    lengths,
                    order,
                    shape,
                    len(storage),
                    HANDLES + storage.table.first,
                )
            return stored

    def add(self, data: Any) -> int | Tensor | None:
        """Take one step, or one step of each of ``B`` environments.

        Args:
            data: TED TensorDict of batch size ``[]`` or ``[B]``.

        Returns:
            as :meth:`extend`; of a single step its own index, or None if it is not stored yet.
        """
        _check_data(data)
        if data.ndim:
            with self._storage.lock:
                index = self.extend(lazy_stack([data], data.ndim))
                if index.shape != (*data.batch_size, 1):
                    return index
                return index.squeeze(-1)
        index = self.extend(lazy_stack([data]))
        last = int(index[-1]) if index.numel() else -1
        return None if last < 0 else last

    def flush(self) -> Tensor:
        """Store the open episodes as they are, as truncated.

        Returns:
            int64 ``[K]``: the handles of their steps.

        Raises:
            ValueError: if their steps have neither ``("next", "truncated")`` nor
                ``("next", "done")``, or one is refused by the storage: none is stored then, and
                :meth:`discard` gets rid of that one.
        """
        with self._storage.lock:
            if not self._open:
                return torch.zeros(0, dtype=torch.int64, device="cpu")
            ids = list(self._open)
            cut = [truncated(episode.steps) for episode in self._open.values()]
            lengths = torch.tensor([episode.length for episode in cut], device="cpu")
            episodes, lengths = self._transformed(Steps.concat(cut), lengths, ids)
            stored = self._stored(episodes, lengths, ids)
            self._open = {}
            self._write_count += int(lengths.sum())
            return stored

    def discard(self, episode: int) -> None:
        """Drop an open episode: what came of it is never stored.

        Args:
            episode: its id, one of :attr:`open_episodes`; of episodes told apart by done flags, the
                row of the batch.

        Raises:
            KeyError: if no such episode is open.
        """
        with self._held():
            if episode not in self._open:
                raise KeyError(f"no episode {episode!r} is open; the open ones are {[*self._open]}")
            del self._open[episode]

    def state_dict(self) -> dict[str, Any]:
        """The open episodes and the write count, as copies."""
        with self._held():
            return {
                "open": {key: (e.schema, e.steps.clone()) for key, e in self._open.items()},
                "told_by": self._told_by,
                "write_count": self._write_count,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        still_open = {
            key: OpenEpisode(schema, (steps.clone(),))
            for key, (schema, steps) in state_dict["open"].items()
        }
        with self._held():
            self._open = still_open
            self._told_by = state_dict["told_by"]
            self._write_count = state_dict["write_count"]

    def dumps(self, path: str | FilePath) -> None:
        """Save the state in the folder ``path``."""
        save_state(self.state_dict(), path)

    def loads(self, path: str | FilePath) -> None:
        """Load the state from the folder ``path``."""
        self.load_state_dict(load_state(path))

    def _empty(self, empty_write_count: bool = True) -> None:
        """Drop the open episodes."""
        with self._held():
            self._open, self._told_by = {}, None
            if empty_write_count:
                self._write_count = 0

    def _held(self) -> AbstractContextManager[Any]:
        """The lock of the storage, once there is one."""
        return nullcontext() if self._storage is None else self._storage.lock

    def _ids(self, steps: Steps, shape: torch.Size) -> tuple[_ToldBy, Tensor]:
        """How steps are told apart, and the id of each: int64 ``[B, T]``."""
        rows = shape[:-1].numel()
        key = self._id_key(steps)
        told_by = _ToldBy(key) if key is not None else _ToldBy(None, rows)
        if self._open and told_by != self._told_by:
            raise ValueError(
                f"episodes are open that were told apart by {self._told_by}, this batch "
                f"would be by {told_by}: send one kind of batch, or flush() first"
            )
        if key is None:
            return told_by, torch.arange(rows, device="cpu")[:, None].expand(rows, shape[-1])
        ids = stacked(steps.columns[key])
        if (
            ids is None
            or ids.is_floating_point()
            or ids.is_complex()
            or ids.numel() != steps.length
        ):
            got = "objects" if ids is None else f"{tuple(ids.shape)} {ids.dtype}"
            raise ValueError(f"{name_of(key)} must hold one integer id per step, got {got}")
        return told_by, ids.reshape(rows, -1).long().cpu()

    def _id_key(self, steps: Steps) -> Path | None:
        """Where the ids are; None if the done flags are to tell."""
        if self.traj_key is None:
            return next((key for key in _ID_KEYS if key in steps.columns), None)
        key = (self.traj_key,) if isinstance(self.traj_key, str) else self.traj_key
        if key not in steps.columns:
            raise KeyError(f"traj_key {self.traj_key!r} is not in the data: {names_of(steps)}")
        return key

    def _assemble(
        self, steps: Steps, segments: list[Segment]
    ) -> tuple[Steps, Tensor, dict[int, OpenEpisode]]:
        """The episodes that end, one after the other; the length of each; what stays open."""
        still_open = dict(self._open)
        pieces: list[Steps] = []
        lengths: list[int] = []
        first = last = 0  # steps of the batch that follow the pieces so far
        fits = self._fitting(steps, segments)

        for segment in segments:
            begun = still_open.pop(segment.key, None)
            if not segment.ended:
                schema = fits(segment.key, begun)
                part = steps[segment.start : segment.stop].clone()
                begun = (begun or OpenEpisode(schema, ())).join(schema, part)
                self._check_open(segment.key, begun.length)
                still_open[segment.key] = begun
                continue
            if begun or segment.start != last:
                if last > first:
                    pieces.append(steps[first:last])
                first = segment.start
            last = segment.stop
            lengths.append((begun.length if begun else 0) + last - segment.start)
            pieces += begun.parts if begun else ()
        if last > first or not pieces:
            pieces.append(steps[first:last])
        return (
            Steps.concat(pieces),
            torch.tensor(lengths, dtype=torch.int64, device="cpu"),
            still_open,
        )

    def _sets_indices(self) -> bool:
        """Whether the buffer that this writer belongs to sets indices in the data."""
        return any(
            isinstance(buffer, TensorDictReplayBuffer) and getattr(buffer, "_writer", None) is self
            for buffer in self._storage._attached_entities
        )

    def _check_open(self, key: int, length: int) -> None:
        """Refuse an open episode that can never be stored, before it can make others wait."""
        budget = self._storage.max_size
        if length > budget and self.transform is None:
            drop = f", or drop what came of it: writer.discard({key})" if key in self._open else ""
            raise ValueError(
                f"the open episode {key} would have {length} steps with this batch, more than "
                f"max_steps={budget}: give EpisodeStorage a larger budget, end the episode "
                f"earlier{drop}"
            )

    def _stored(self, episodes: Steps, lengths: Tensor, ids: list[int]) -> Tensor:
        """Store whole episodes, all or none; the error tells which one is refused."""
        storage: EpisodeStorage = self._storage
        try:
            return storage.append_all(episodes, lengths)
        except ValueError as error:
            stops = lengths.cumsum(0).tolist()
            for key, start, stop in zip(ids, [0, *stops], stops, strict=False):
                try:
                    storage.check(episodes[start:stop])
                except ValueError as reason:
                    drop = f", or drop it: writer.discard({key})" if key in self._open else ""
                    raise ValueError(f"episode {key} is refused: {reason}{drop}") from error
            raise

    def _fitting(
        self, steps: Steps, segments: list[Segment]
    ) -> Callable[[int, OpenEpisode | None], Schema]:
        """What gives an open episode's schema with steps of this batch, or refuses them."""
        if all(segment.ended for segment in segments):
            came = None
        else:
            length = torch.tensor([steps.length], device="cpu")
            came = Schema.of(steps, length, share_next=False)
            if self.transform is None and self._storage.schema is not None:
                self._storage.schema.merge(came)
        # Episodes that began together share one schema: each is merged once.
        merged: dict[int, Schema] = {}

        def schema(key: int, episode: OpenEpisode | None) -> Schema:
            assert came is not None
            if episode is None:
                return came
            known = episode.schema
            if id(known) not in merged:
                try:
                    both = known.merge(came)
                except ValueError as error:
                    raise ValueError(
                        f"the steps of the open episode {key} must be as its first ones: {error}"
                    ) from error
                merged[id(known)] = came if both == came else both
            return merged[id(known)]

        return schema

    def _transformed(
        self, episodes: Steps, lengths: Tensor, ids: list[int]
    ) -> tuple[Steps, Tensor]:
        """The episodes as they are to be stored, and their lengths."""
        if self.transform is None or not len(lengths):
            return episodes, lengths
        episodes = copy_of_episodes(episodes, lengths)
        if getattr(self.transform, "takes_many_episodes", False):
            results = unpack(_one_batch(self.transform(pack(episodes, unread=True))))
            last = ended(results) if results.length else torch.zeros(1, dtype=torch.bool)
            ends = last.nonzero().squeeze(1) + 1
            if len(ends) != len(lengths) or not last[-1]:
                raise ValueError(
                    f"transform was given {len(lengths)} whole episodes and must return as many, got "
                    f"{len(ends)} ends of episodes in {results.length} steps"
                )
            return results, ends.diff(prepend=ends.new_zeros(1))
        stops = lengths.cumsum(0).tolist()
        parts: list[Steps] = []
        for key, start, stop in zip(ids, [0, *stops], stops, strict=False):
            try:
                parts.append(
                    unpack(_one_batch(self.transform(pack(episodes[start:stop], unread=True))))
                )
            except Exception as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"The transform of EpisodeWriter was given episode {key}.")
                raise
        return Steps.concat(parts), torch.tensor([part.length for part in parts], device="cpu")


def _check_data(data: Any) -> None:
    """Refuse what is no TensorDict."""
    if not is_tensor_collection(data):
        hint = ""
        if isinstance(data, (list, tuple)):
            hint = ": join steps with torch.stack, or tensordict.lazy_stack if their shapes vary"
        raise TypeError(f"data must be a TensorDict, got {type(data).__name__}{hint}")


def _one_batch(result: Any) -> Any:
    """What a transform returned, if it can be stored."""
    if is_tensor_collection(result) and result.ndim == 1:
        return result
    raise TypeError(
        f"transform must return an episode, a TensorDict of batch size [T], got "
        f"{getattr(result, 'batch_size', type(result).__name__)}"
    )


def _check_samplers(storage: EpisodeStorage) -> None:
    """Refuse samplers that tie something to a storage index: it is a step's age, and shifts."""
    for buffer in storage._attached_entities:
        sampler = getattr(buffer, "_sampler", None)
        if isinstance(buffer, HERReplayBuffer) and isinstance(
            sampler, (ClipSampler, EpisodeSampler)
        ):
            raise TypeError(
                f"HERReplayBuffer gives new goals to single steps: use TorchRL's RandomSampler or "
                f"SamplerWithoutReplacement, got {type(sampler).__name__}"
            )
        if isinstance(sampler, ClipSampler):
            continue
        if isinstance(sampler, (PrioritizedSampler, StreamingSliceSampler)):
            raise TypeError(
                f"{type(sampler).__name__} remembers steps by storage index, and the index of a step "
                "in an EpisodeStorage changes when older episodes leave: use ClipSampler, "
                "PrioritizedClipSampler or EpisodeSampler"
            )
        by_recency = isinstance(sampler, PromptGroupSampler) and sampler.strategy == "recency"
        if by_recency and isinstance(buffer, TensorDictReplayBuffer):
            raise TypeError(
                'PromptGroupSampler(strategy="recency") cannot tell steps that are not stored yet, '
                "which a TensorDictReplayBuffer gives the index -1: use a ReplayBuffer"
            )


def _flatten(data: Any) -> Steps:
    """The steps of a batch, row after row."""
    if not data.batch_size.numel():
        raise ValueError(
            f"data must hold at least one step, got batch size {list(data.batch_size)}"
        )
    if data.ndim == 1:
        return unpack(data)
    if has_lazy_stack(data):
        return Steps.concat([_flatten(row) for row in data.unbind(0)])
    for key, value in data.items(True, True):
        if isinstance(value, Tensor) and value.is_nested:
            raise ValueError(
                f"{key!r} is a nested tensor, which does not go in a [B, T] batch: give a lazy stack "
                f"of steps (tensordict.lazy_stack), or [N] steps"
            )
    return unpack(data.reshape(-1))


def _aligned(
    segments: list[Segment],
    came: Tensor,
    lengths: Tensor,
    order: Tensor | None,
    shape: torch.Size,
    stored: int,
    first: int,
) -> Tensor:
    """The handle of each step of the batch, -1 if it is not known or not stored.

    Args:
        segments: the segments of the batch.
        came: int64 ``[E]``, steps of each episode that ended in it.
        lengths: int64 ``[E]``, steps of each as it was stored.
        order: the order of the batch's steps in the segments.
        shape: batch size of the batch.
        stored: number of stored steps.
        first: handle of the oldest one.
    """
    if (
        len(segments) == 1
        and order is None
        and came.tolist() == lengths.tolist() == [shape.numel()]
    ):
        end = first + stored
        return torch.arange(end - shape.numel(), end, device="cpu").view(shape)
    index = torch.full((shape.numel(),), -1, dtype=torch.int64, device="cpu")
    whole = [s for s in segments if s.ended]
    end = stored
    each = zip(whole, came.tolist(), lengths.tolist(), strict=True)
    for segment, before, length in reversed(list(each)):
        steps = segment.stop - segment.start
        if end >= length == before:
            places = torch.arange(segment.start, segment.stop, device="cpu")
            index[places if order is None else order[places]] = torch.arange(
                first + end - steps, first + end, device="cpu"
            )
        end -= length
    return index.view(shape)
