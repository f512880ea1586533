"""A writer that stores whole episodes, whatever pieces they arrive in.

A step is stored once its episode has ended; until then it is kept aside. A call that is refused
changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from tensordict import is_tensor_collection, lazy_stack
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import (
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from torchrl_mt._hosts.torchrl import buffers_on, writer_of
from torchrl_mt.checks import check_choice, check_positive_integer
from torchrl_mt.data._store.deferred_interrupts import interrupts_deferred
from torchrl_mt.data._store.handles import HANDLES
from torchrl_mt.data._store.schema import Schema
from torchrl_mt.data._store.steps import Path, Steps, name_of, pack, path_of
from torchrl_mt.data._writing.closed_episodes import (
    Closed,
    Reason,
    handles_of_batch,
    steps_of,
    transformed,
    worth_storing,
)
from torchrl_mt.data._writing.continuity import Continuity, compared
from torchrl_mt.data._writing.matching import Matcher, Matches
from torchrl_mt.data._writing.open_steps import Label, OpenSteps
from torchrl_mt.data._writing.segments import Batch, Form, flatten, read_ids, segment
from torchrl_mt.data._writing.ted import FLAGS, EndFlags, names_of
from torchrl_mt.data.checkpoint import SavesState
from torchrl_mt.data.samplers.compatible import check_samplers
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["EpisodeWriter"]

_logger = logging.getLogger("torchrl_mt")

_OF_SAMPLES: frozenset[Path] = frozenset(
    [("index",), ("index_generation",), ("priority_weight",), ("_weight",)]
    + [("next", flag) for flag in FLAGS]
)
"""Entries that buffers and samplers add to a sample."""

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


_NOTHING_COUNTED = {"breaks": 0, "truncated": 0, "dropped": 0}
_NO_FORM: tuple[Any, ...] = (None, None, ((), ()))
_WHAT_BECOMES = {
    "truncate": ", and that one is stored as truncated",
    "discard": ", and that one is dropped",
    "apart": ", and that one stays open for its own steps",
}


class EpisodeWriter(SavesState, Writer):
    """Gathers steps into episodes and stores each episode once it has ended.

    It takes what collectors send: ``[N]`` or ``[B, T]`` TED data with whole or partial episodes, of
    several environments in turn. Steps are told apart by the episode id under ``traj_key``, or, if
    there is none, by the done flags, each row of a ``[B, T]`` batch being one environment and a
    ``[N]`` batch a single one. An episode ends with the first step of which a flag under ``end_key``
    is true. The padding of split trajectories (where ``("collector", "mask")`` is false) is left out.

    Two episodes are never stored as one: steps join an open episode only if they go on from it. Their
    first one has no true ``"is_init"``, and its entries equal the ``"next"`` entries of the episode's
    last step, bit for bit. Which entries hold to that is learned (see
    :mod:`torchrl_mt.data._writing.continuity`); Python objects, tensors of varying shape and done flags
    are not compared. Where nothing can be compared, ids and rows alone tell. Steps of one id that
    follow each other in a row of a batch are taken at their word, ``"is_init"`` apart. Steps that go
    on from no open episode of their id begin another:

    - Episodes told apart by ids are kept apart, each open until its own steps come again, as two
      collectors may both count from 0. At most 32 of one id are open: beyond that, the one that has
      waited longest for a step is given up.
    - Of those told apart by done flags, a row has one: it is given up when another is to be open, as
      the environment was reset.

    An id that stops coming without a done flag leaves its episode open until :meth:`flush`, or until the
    open steps are more than ``max_open_steps``: so do the episodes that TorchRL's
    ``Collector(reset_at_each_iter=True)`` breaks off after each batch.

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
        end_key: the flag that ends an episode, or several; by default ``("next", "done")``,
            ``("next", "terminated")`` and ``("next", "truncated")``, those that there are.
        done_on_any: of a flag per agent (``[T, A, 1]``), whether one true flag ends the episode, or all
            of them together.
        on_break: what becomes of an episode that is given up: ``"truncate"`` stores it, its last step
            marked truncated, ``"discard"`` drops it, and ``"raise"`` refuses a batch with steps that do
            not go on from the open episode of their id or row.
        max_open_steps: the budget of all open episodes together, in steps; by default the storage's
            ``max_steps``. Beyond it, those that have waited longest for a step are stored as truncated,
            or dropped if they cannot be stored, until the rest fits or one is left. An open episode
            never has more than the storage's ``max_steps``, unless a ``transform`` may yet make it
            shorter: what came before is stored as truncated, and it goes on as another.
        track_generations: whether samples get an ``"index_generation"``, for TorchRL's
            ``ReplayBuffer.update_if_present``, which replaces values of the steps that are stored
            still. Handles tell those by themselves: it is 0 for a stored step and -1 for any other.

    Raises:
        ValueError: if ``on_break`` or ``max_open_steps`` is none of these.

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
        >>> len(rb), rb.writer.open_lengths
        (0, {0: 2})
        >>> rb.storage.places(rb.extend(steps(True)))
        tensor([0, 1, 2])
    """

    def __init__(
        self,
        *,
        traj_key: NestedKey | None = None,
        transform: Callable[[Any], Any] | None = None,
        end_key: NestedKey | Sequence[NestedKey] | None = None,
        done_on_any: bool = True,
        on_break: Literal["truncate", "raise", "discard"] = "truncate",
        max_open_steps: int | None = None,
        track_generations: bool = False,
    ) -> None:
        super().__init__()
        self._track_generations = track_generations
        check_choice("on_break", on_break, ("truncate", "raise", "discard"))
        if max_open_steps is not None:
            check_positive_integer("max_open_steps", max_open_steps)
        self.traj_key = None if traj_key is None else unravel_key(traj_key)
        self.transform = transform
        self.on_break = on_break
        self.max_open_steps = max_open_steps
        self._end_flags = EndFlags(_paths(end_key), done_on_any)
        self._forget()

    @property
    def tracks_generations(self) -> bool:
        """Whether samples come with what ``ReplayBuffer.update_if_present`` asks for."""
        return self._track_generations

    def generations_of(self, index: int | Tensor) -> Tensor:
        """0 for the handle of a stored step, -1 for anything else.

        Args:
            index: integers of any shape.

        Returns:
            int64 of the same shape.
        """
        index = torch.as_tensor(index)
        return torch.where((index >= HANDLES) & self._storage.contains(index), 0, -1)

    def _forget(self) -> None:
        """Drop the open episodes and what was learned and counted."""
        self._open = OpenSteps()
        self._told_by: _ToldBy | None = None
        self._write_count = 0
        self._continuity = Continuity()
        self._counts = dict(_NOTHING_COUNTED)
        self._said: set[str] = set()
        self._last_form = self._fits = _NO_FORM

    @property
    def open_episodes(self) -> dict[Label, Any]:
        """The unfinished episodes, by their id: copies of the steps so far, as TensorDicts.

        An episode that began while another of its id was open is called ``(id, 2)``, and so on; an
        episode told apart by done flags is called by its row.
        """
        with self._held():
            opened = self._open
            return {opened.labels[slot]: pack(opened.episode(slot)) for slot in opened.by_age()}

    @property
    def open_lengths(self) -> dict[Label, int]:
        """How many steps came so far of each of the :attr:`open_episodes`."""
        with self._held():
            opened = self._open
            return {opened.labels[slot]: int(opened.length[slot]) for slot in opened.by_age()}

    def stats(self) -> dict[str, int]:
        """What the writer holds, and what became of what it was given.

        Returns:
            ``"open_episodes"`` and ``"open_steps"``, what waits now; ``"breaks"``, how often steps did
            not go on from the open episode of their id or row; ``"truncated"`` and ``"dropped"``, the
            episodes that were given up, after breaks or for a budget, and stored as truncated or not
            stored. They count from the beginning, or since ``rb.empty()``.
        """
        with self._held():
            opened = self._open
            return {
                "open_episodes": len(opened.slots),
                "open_steps": opened.num_steps,
                **self._counts,
            }

    def register_storage(self, storage: Storage) -> None:
        """Take the storage to write to; called by the replay buffer."""
        if not isinstance(storage, EpisodeStorage):
            raise TypeError(
                f"EpisodeWriter writes to an EpisodeStorage, got {type(storage).__name__}: use "
                f"ReplayBuffer(storage=EpisodeStorage(max_steps), writer=EpisodeWriter(), ...)."
            )
        super().register_storage(storage)

    def extend(self, data: Any) -> Tensor:
        """Take a batch of steps, and store the episodes that end in it.

        Entries that a buffer adds to a sample are left out if the stored steps have none, so that a
        sample can be written back: its clips are episodes then.

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
                that do not fit those of the open episodes, an episode is refused by the storage, or,
                with ``on_break="raise"``, steps do not go on from the open episode of their id.
            KeyError: if ``traj_key`` is not in ``data``.
        """
        _check_data(data)
        if not data.ndim:
            raise ValueError("data must have a batch size of [N] or [B, T], got []: use add().")
        storage: EpisodeStorage = self._storage
        with storage.lock:
            check_samplers(storage)
            return self._write(data)

    def add(self, data: Any) -> int | Tensor | None:
        """Take one step, or one step of each of ``B`` environments.

        Args:
            data: TED TensorDict of batch size ``[]`` or ``[B]``.

        Returns:
            as :meth:`extend`; of a single step its own index, or None if it is not stored yet.
        """
        _check_data(data)
        if data.ndim:
            index = self.extend(lazy_stack([data], data.ndim))
            return index.squeeze(-1) if index.shape == (*data.batch_size, 1) else index
        index = self.extend(lazy_stack([data]))
        last = int(index[-1]) if index.numel() else -1
        return None if last < 0 else last

    def flush(self) -> Tensor:
        """Store the open episodes as they are, as truncated.

        Returns:
            int64 ``[K]``: the handles of their steps.

        Raises:
            ValueError: if their steps have no flag to mark, such as ``("next", "truncated")`` or
                ``("next", "done")``, or one is refused by the storage: none is stored then, and
                :meth:`discard` gets rid of that one.
        """
        with self._storage.lock:
            opened = self._open
            if not opened.slots:
                return _nothing()
            closed = [
                Closed(slot, opened.rows(slot), opened.labels[slot], "flush")
                for slot in opened.by_age()
            ]
            episodes, lengths = transformed(
                self.transform, steps_of(closed, opened, self._end_flags), closed, self._end_flags
            )
            with interrupts_deferred():
                stored, _, _ = self._stored(episodes, lengths, closed)
                self._open = OpenSteps()
                self._write_count += int(lengths.sum())
            return stored

    def discard(self, episode: Label) -> None:
        """Drop an open episode: what came of it is never stored.

        Args:
            episode: what it is called in :attr:`open_episodes`.

        Raises:
            KeyError: if no such episode is open.
        """
        with self._held():
            if episode not in self._open.slots:
                known = [*self.open_lengths]
                raise KeyError(f"no episode {episode!r} is open; the open ones are {known}.")
            self._open.discard(self._open.slots[episode])

    def state_dict(self) -> dict[str, Any]:
        """Copies of the open episodes, of what was learned and of the counts."""
        with self._held():
            opened = self._open
            return {
                "open": [
                    (int(opened.ids[slot]), opened.labels[slot], opened.episode(slot))
                    for slot in opened.by_age()
                ],
                "told_by": self._told_by,
                "write_count": self._write_count,
                "continuity": self._continuity.records(),
                "counts": dict(self._counts),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        with self._held():
            self._restore(state_dict)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Do what :meth:`load_state_dict` says; the caller holds the lock."""
        opened = OpenSteps()
        for key, label, steps in state_dict["open"]:
            opened.restore(key, label, steps)
        self._open, self._continuity = opened, Continuity(state_dict["continuity"])
        self._told_by = state_dict["told_by"]
        self._write_count = state_dict["write_count"]
        self._counts = dict(state_dict["counts"])

    def _empty(self, empty_write_count: bool = True) -> None:
        """Drop the open episodes."""
        with self._held():
            count = 0 if empty_write_count else self._write_count
            self._forget()
            self._write_count = count

    def __getstate__(self) -> dict[str, Any]:
        with self._held():
            state = super().__getstate__()
            for name in ("_open", "_continuity", "_last_form", "_fits"):
                del state[name]
            return {**state, "_saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._last_form = self._fits = _NO_FORM
        self._restore(saved)  # without the lock: the storage may have none as yet

    def _held(self) -> AbstractContextManager[Any]:
        """The lock of the storage, once there is one."""
        return nullcontext() if self._storage is None else self._storage.lock

    def _write(self, data: Any) -> Tensor:
        """Do what :meth:`extend` says; the caller holds the lock."""
        shape = data.batch_size
        steps, form = flatten(data)
        if form is None and self.transform is None:
            steps.check_values()
        added, paths = self._known(steps, form)
        told_by = self._told(steps, shape)
        ids = None if told_by.key is None else read_ids(steps, told_by.key)
        learn = not self._continuity.knows(paths)
        batch, continuity = self._segmented(steps, ids, shape, learn, added, paths)
        if added:
            form = None
        keys, opened = batch.segments.keys, self._open
        self._check_lengths(batch)
        apart = bool(opened.slots) and told_by != self._told_by
        if batch.ended.all() and (apart or opened.newest.keys().isdisjoint(keys)):
            # None of it concerns the open episodes.
            whole = [Closed(-1, batch.positions(i), key) for i, key in enumerate(keys)]
            whole.sort(key=lambda episode: int(episode.rows[-1]))
            return self._settle(batch, shape, whole, continuity)
        if apart:
            raise ValueError(
                f"episodes are open that were told apart by {self._told_by}, this batch "
                f"would be by {told_by}: send one kind of batch, or flush() first."
            )
        first = opened.put(batch.steps, self._schema_with(batch, form))
        by_rows = told_by.key is None
        found = self._matched(batch, first, by_rows, paths, continuity)
        if found.breaks and not learn:
            # Perhaps the environment no longer holds to what was learned.
            batch, continuity = self._segmented(steps, ids, shape, True, added, paths)
            found = self._matched(batch, first, by_rows, paths, continuity)
        if found.breaks and self.on_break == "raise":
            i, reason = found.breaks[0]
            raise ValueError(
                f"the steps of episode {keys[i]} do not go on from the open one: {reason}. "
                f"flush() first, discard() one of {[*opened.slots]}, or give on_break='truncate'."
            )
        closed = self._closed(batch, found, first)
        return self._settle(batch, shape, closed, continuity, found, told_by)

    def _segmented(
        self,
        steps: Steps,
        ids: np.ndarray | None,
        shape: torch.Size,
        learn: bool,
        added: tuple[Path, ...],
        paths: tuple[Path, ...],
    ) -> tuple[Batch, Continuity]:
        """The segments of a batch, without what a buffer added to a sample; what is known then."""
        continuity = Continuity(self._continuity.records())
        batch = segment(steps, ids, shape, self._end_flags, paths, continuity, learn=learn)
        if added:
            rest = {k: v for k, v in batch.steps.columns.items() if k not in added}
            batch = replace(batch, steps=replace(batch.steps, columns=rest))
        return batch, continuity

    def _matched(
        self,
        batch: Batch,
        first: int,
        by_rows: bool,
        paths: tuple[Path, ...],
        continuity: Continuity,
    ) -> Matches:
        """The episodes to which the segments of a batch belong."""
        return Matcher(
            self._open,
            batch,
            first,
            by_rows=by_rows,
            paths=paths,
            continuity=continuity,
            max_length=self._max_length,
        ).match(self.max_open_steps or self._storage.max_size)

    def _known(self, steps: Steps, form: Form | None) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """The entries that a buffer added to a sample, and those to compare."""
        schema = self._storage.schema if self.transform is None else None
        known_form, known_schema, known = self._last_form
        if form is None or known_form != form or known_schema is not schema:
            added: tuple[Path, ...] = ()
            if schema is not None:
                added = tuple((_OF_SAMPLES & steps.columns.keys()) - schema.entries.keys())
            known = (added, compared(steps, self._end_flags.keys))
            self._last_form = (form, schema, known)
        return known

    def _told(self, steps: Steps, shape: torch.Size) -> _ToldBy:
        """How steps are told apart."""
        if self.traj_key is None:
            for key in _ID_KEYS:
                if key in steps.columns:
                    return _ToldBy(key)
            return _ToldBy(None, shape[:-1].numel())
        key = path_of(self.traj_key)
        if key not in steps.columns:
            raise KeyError(f"traj_key {self.traj_key!r} is not in the data: {names_of(steps)}.")
        return _ToldBy(key)

    @property
    def _max_length(self) -> int | None:
        """Steps that an open episode may have: a transform may yet make it shorter."""
        return self._storage.max_size if self.transform is None else None

    def _check_lengths(self, batch: Batch) -> None:
        """Refuse an episode that is longer than the storage."""
        budget = self._max_length
        if budget is None or batch.steps.length <= budget or batch.segments.sizes.max() <= budget:
            return
        sizes = batch.segments.sizes
        i = int(sizes.argmax())
        raise ValueError(
            f"episode {batch.segments.keys[i]} is refused: an episode of {sizes[i]} steps does not fit "
            f"in max_steps={budget}: give EpisodeStorage a larger budget."
        )

    def _schema_with(self, batch: Batch, form: Form | None) -> Schema:
        """What the open steps look like with those of a batch.

        Raises:
            ValueError: if they do not fit the stored ones, or those of the open episodes.
        """
        stored = self._storage.schema if self.transform is None else None
        fits = (form, stored, self._open.schema)
        if form is not None and self._fits == fits and self._open.schema is not None:
            return self._open.schema
        length = torch.tensor([batch.steps.length], device="cpu")
        schema = Schema.of(batch.steps, length, share_next=False)
        if stored is not None:
            stored.merge(schema)
        if self._open.slots and self._open.schema is not None:
            known = [key for key in batch.segments.keys if key in self._open.newest]
            of = f"the open episode {known[0]}" if known else "the open episodes"
            try:
                schema = self._open.schema.merge(schema)
            except ValueError as error:
                raise ValueError(f"the steps of {of} must be as its first ones: {error}") from error
        elif schema == self._open.schema:
            schema = self._open.schema
        self._fits = (form, stored, schema)
        return schema

    def _closed(self, batch: Batch, found: Matches, first: int) -> list[Closed]:
        """The episodes that are no longer open after a batch, by their last steps."""
        opened, slots, keys = self._open, found.slots, batch.segments.keys
        opened.assign(batch.segments, batch.order, slots)
        ended = np.flatnonzero(batch.ended).tolist()
        whys: dict[int, Reason] = {int(slots[i]): "ended" for i in ended}
        for slot in found.broken:
            whys[slot] = "break"
        for slot in found.over_budget:
            whys[slot] = "budget"
        if not whys:
            return []
        closed = []
        rows_of = opened.rows_of([*whys], first + batch.steps.length)
        for (slot, why), rows in zip(whys.items(), rows_of, strict=True):
            known = slot in opened.labels
            name = opened.labels[slot] if known else keys[found.fresh[slot]]
            closed.append(Closed(slot, rows, name, why))
        closed.sort(key=lambda episode: int(episode.rows[-1]))
        return closed

    def _settle(
        self,
        batch: Batch,
        shape: torch.Size,
        closed: list[Closed],
        continuity: Continuity,
        found: Matches | None = None,
        told_by: _ToldBy | None = None,
    ) -> Tensor:
        """Store the episodes that ended, and accept the batch.

        Args:
            batch: the batch.
            shape: its batch size.
            closed: the episodes that are no longer open.
            continuity: what was learned.
            found: where its segments go; None if they are whole and not among the open steps.
            told_by: how its episodes are told apart, if they are.

        Returns:
            the index to give out.
        """
        first, kept, episodes = 0 if found is None else self._open.tail, closed, batch.steps
        if found is None:
            if batch.order is not None:
                order = np.concatenate([episode.rows for episode in closed])
                episodes = episodes.take(torch.from_numpy(order))
        elif closed:
            kept = worth_storing(
                closed, self._open, self._end_flags, discard_broken=self.on_break == "discard"
            )
            episodes = steps_of(kept, self._open, self._end_flags) if kept else batch.steps
        if kept:
            episodes, lengths = transformed(self.transform, episodes, kept, self._end_flags)
        with interrupts_deferred():
            if kept:
                stored, kept, lengths = self._stored(episodes, lengths, kept)
                self._write_count += sum(lengths.tolist())
            else:
                stored = lengths = _nothing()
            if found is not None:
                left = {episode.slot: episode.rows for episode in closed}
                self._open.accept(batch.segments, batch.order, found.slots, found.fresh, left)
                self._count(batch, found, closed, len(kept))
                self._told_by = told_by
            self._continuity = continuity
        if self._sets_indices():
            return handles_of_batch(batch, shape, kept, lengths, stored, first)
        return stored

    def _stored(
        self, episodes: Steps, lengths: Tensor, closed: list[Closed]
    ) -> tuple[Tensor, list[Closed], Tensor]:
        """Store whole episodes, all or none; but those that are given up may be dropped.

        Returns:
            the indices of the stored steps; the episodes, and the lengths, that were stored.
        """
        storage: EpisodeStorage = self._storage
        try:
            return storage.append_all(episodes, lengths), closed, lengths
        except ValueError as error:
            stops = lengths.cumsum(0).tolist()
            parts = [episodes[a:b] for a, b in zip([0, *stops], stops, strict=False)]
            refused = []
            for i, (part, episode) in enumerate(zip(parts, closed, strict=True)):
                try:
                    storage.check(part)
                except ValueError as reason:
                    if episode.why in ("break", "budget"):
                        refused.append(i)
                        continue
                    drop = f" To drop it: writer.discard({episode.name!r})."
                    drop = drop if episode.name in self._open.slots else ""
                    raise ValueError(
                        f"episode {episode.name} is refused: {reason}{drop}"
                    ) from error
            if not refused:
                raise
        left = [i for i in range(len(closed)) if i not in refused]
        if not left:
            return _nothing(), [], _nothing()
        rest = Steps.concat([parts[i] for i in left])
        return self._stored(rest, lengths[left], [closed[i] for i in left])

    def _count(self, batch: Batch, found: Matches, closed: list[Closed], stored: int) -> None:
        """Count the episodes that were given up, and warn of them once."""
        given_up = [episode for episode in closed if episode.why != "ended"]
        if not given_up and not found.breaks:
            return
        dropped = len(closed) - stored
        self._counts["breaks"] += len(found.breaks)
        self._counts["dropped"] += dropped
        self._counts["truncated"] += len(given_up) - dropped
        if found.breaks and "break" not in self._said:
            self._said.add("break")
            i, reason = found.breaks[0]
            _logger.warning(
                "steps of episode %s do not go on from the open one: %s. They begin another episode%s. "
                "This is said once for each writer; writer.stats() counts.",
                batch.segments.keys[i],
                reason,
                _WHAT_BECOMES[self.on_break if found.broken else "apart"],
            )
        if found.over_budget and "budget" not in self._said:
            self._said.add("budget")
            _logger.warning(
                "the open episodes were to have more than max_open_steps=%s steps, or one of them more "
                "than the storage's max_steps=%s: %s was ended as truncated, or dropped where it cannot "
                "be stored. An episode stays open until a done flag comes: those that a collector with "
                "reset_at_each_iter=True breaks off stay open for good, unless set_truncated=True, too. "
                "This is said once for each writer; writer.stats() counts.",
                self.max_open_steps or self._storage.max_size,
                self._storage.max_size,
                next(episode.name for episode in closed if episode.why == "budget"),
            )

    def _sets_indices(self) -> bool:
        """Whether the buffer that this writer belongs to sets indices in the data."""
        return any(
            isinstance(buffer, TensorDictReplayBuffer) and writer_of(buffer) is self
            for buffer in buffers_on(self._storage)
        )


def _check_data(data: Any) -> None:
    """Refuse data that is no TensorDict."""
    if not is_tensor_collection(data):
        hint = ""
        if isinstance(data, (list, tuple)):
            hint = ": join steps with torch.stack, or tensordict.lazy_stack if their shapes vary"
        raise TypeError(f"data must be a TensorDict, got {type(data).__name__}{hint}.")


def _nothing() -> Tensor:
    """The indices of no steps, or the lengths of no episodes."""
    return torch.zeros(0, dtype=torch.int64, device="cpu")


def _paths(keys: NestedKey | Sequence[NestedKey] | None) -> tuple[Path, ...]:
    """One key or several as paths; a tuple of strings is one key."""
    if keys is None:
        return ()
    if isinstance(keys, str) or (
        isinstance(keys, tuple) and all(isinstance(name, str) for name in keys)
    ):
        return (path_of(keys),)
    return tuple(path_of(key) for key in keys)
