"""A writer that stores whole episodes, in whatever pieces they arrive.

It keeps the steps of an episode aside until the episode ends. A refused call changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
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
from torchrl_mt.checks import as_tensor, check_choice, check_positive_integer
from torchrl_mt.data._store.deferred_interrupts import interrupts_deferred
from torchrl_mt.data._store.handles import HANDLES
from torchrl_mt.data._store.plain import plain_steps, steps_from
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
from torchrl_mt.data._writing.continuity import Pairs, bits_at, comparable, counting, learned
from torchrl_mt.data._writing.matching import Matches, match, renumbered
from torchrl_mt.data._writing.open_steps import Label, OpenSteps
from torchrl_mt.data._writing.segments import Batch, Form, flatten, segment
from torchrl_mt.data._writing.ted import FLAGS, EndFlags, copied_to_cpu, names_of
from torchrl_mt.data.checkpoint import SavesState
from torchrl_mt.data.samplers.compatible import check_samplers
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["EpisodeWriter"]

_logger = logging.getLogger("torchrl_mt")

_SAMPLE_ENTRIES: frozenset[Path] = frozenset(
    [("index",), ("index_generation",), ("priority_weight",), ("_weight",)]
    + [("next", flag) for flag in FLAGS]
)
"""Entries that buffers and samplers add to a sample."""

_ID_KEYS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))


@dataclass(frozen=True)
class _IdSource:
    """What identifies the episodes of a batch: an id entry, or rows and done flags."""

    key: Path | None
    """Entry with the episode ids; None for rows and done flags."""
    rows: int = 0
    """Rows of the batch, if ``key`` is None."""

    def __str__(self) -> str:
        if self.key is not None:
            return f"the ids under {name_of(self.key)}"
        return f"the done flags of {self.rows} rows"


_PAIRS = 16
"""Pairs of steps of a batch to learn from."""
_ENOUGH = 256
"""Pairs of an entry after which only one batch in eight is looked at."""

_ZERO_COUNTS = {"breaks": 0, "truncated": 0, "dropped": 0}
_EMPTY_CACHE: tuple[Any, ...] = (None, None, ((), ()))
_BREAK_OUTCOMES = {
    "truncate": ", and that one is stored as truncated",
    "discard": ", and that one is dropped",
    "apart": ", and that one stays open for its own steps",
}


class EpisodeWriter(SavesState, Writer):
    """Gathers steps into episodes and stores each episode when it ends.

    It takes what collectors send: ``[N]`` or ``[B, T]`` TED data with whole or partial episodes of
    several environments. Steps belong to the episode whose id they have under ``traj_key``. Data
    without ids is split by done flags: each row of ``[B, T]`` is one environment, and ``[N]`` is one
    row. :doc:`/writing` says which steps continue an open episode, and what happens to the others.

    Args:
        traj_key: entry with the episode ids; by default ``("collector", "traj_ids")`` or
            ``"episode"``, if the data has one.
        transform: called with a copy of each whole episode (a TensorDict of batch size ``[T]``), which
            it may change; its result is stored (:ref:`transforms-of-episodes`).
        end_key: one flag that ends an episode, or several; by default those of ``("next", "done")``,
            ``("next", "terminated")`` and ``("next", "truncated")`` that the data has.
        done_on_any: for one flag per agent (``[T, A, 1]``): True ends the episode when any flag is
            true, False when all are.
        on_break: what to do with an episode that is given up: ``"truncate"`` stores it with its last
            step marked truncated, ``"discard"`` drops it, and ``"raise"`` refuses a batch with steps
            that do not continue the open episode of their id or row.
        max_open_steps: steps that all open episodes may have together; by default the storage's
            ``max_steps``. Beyond it, those that waited longest for a step are stored as truncated.
        track_generations: whether samples get an ``"index_generation"``, which TorchRL's
            ``ReplayBuffer.update_if_present`` needs to replace values of stored steps.

    Raises:
        ValueError: if ``on_break`` is another name, or ``max_open_steps`` is not a positive integer.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> rb = ReplayBuffer(storage=EpisodeStorage(10), writer=EpisodeWriter())
        >>> def steps(*done):
        ...     return TensorDict({"next": {"done": torch.tensor(done)}}, [len(done)])
        >>> _ = rb.extend(steps(False, False))
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
        """Whether samples have the ``"index_generation"`` for ``ReplayBuffer.update_if_present``."""
        return self._track_generations

    def generations_of(self, index: int | Tensor) -> Tensor:
        """Return 0 for the handle of a stored step and -1 for anything else.

        Args:
            index: integers of any shape.

        Returns:
            int64 of the same shape.
        """
        index = as_tensor("index", index)
        return torch.where((index >= HANDLES) & self._storage.contains(index), 0, -1)

    def _forget(self) -> None:
        """Reset the open episodes, what was learned of entries, and counts."""
        self._open = OpenSteps()
        self._id_source: _IdSource | None = None
        self._write_count = 0
        self._pairs: Pairs = {}
        self._counts = dict(_ZERO_COUNTS)
        self._warned: set[str] = set()
        self._entries_cache = self._schema_cache = _EMPTY_CACHE

    @property
    def open_episodes(self) -> dict[Label, Any]:
        """Copies of the unfinished episodes as TensorDicts, by label.

        The label is the episode's id, or its row if the data has no ids. An episode that began while
        another with its id was open has the label ``(id, 2)``, and so on.
        """
        with self._locked():
            opened = self._open
            return {opened.labels[slot]: pack(opened.episode(slot)) for slot in opened.by_age()}

    @property
    def open_lengths(self) -> dict[Label, int]:
        """Number of steps so far of each of the :attr:`open_episodes`, by label."""
        with self._locked():
            opened = self._open
            return {opened.labels[slot]: int(opened.length[slot]) for slot in opened.by_age()}

    def stats(self) -> dict[str, int]:
        """Count open, broken, truncated and dropped episodes.

        Returns:
            ``"open_episodes"`` and ``"open_steps"``: how many are open now. Since the beginning or the
            last ``rb.empty()``: ``"breaks"``, how often steps did not continue the open episode of
            their id or row; ``"truncated"`` and ``"dropped"``, how many episodes were given up after a
            break or for a budget, and stored as truncated or not stored.
        """
        with self._locked():
            opened = self._open
            return {
                "open_episodes": len(opened.slots),
                "open_steps": opened.num_steps,
                **self._counts,
            }

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to; the replay buffer calls this."""
        if not isinstance(storage, EpisodeStorage):
            raise TypeError(
                f"EpisodeWriter writes to an EpisodeStorage, got {type(storage).__name__}: use "
                f"ReplayBuffer(storage=EpisodeStorage(max_steps), writer=EpisodeWriter(), ...)."
            )
        super().register_storage(storage)

    def extend(self, data: Any) -> Tensor:
        """Add a batch of steps and store the episodes that end in it.

        A sample can be written back: its clips become episodes. Entries that a buffer adds to a sample
        are left out if the stored steps have none.

        Args:
            data: TED TensorDict or tensorclass, ``[N]`` or ``[B, T]``.

        Returns:
            int64 ``[K]``: the handles of the steps stored by this call, oldest first (see
            :meth:`EpisodeStorage.get`). For a ``TensorDictReplayBuffer``, which sets the indices in
            ``data``, they have the batch size of ``data``, with -1 for a step that is not stored (yet)
            or whose episode the transform made longer or shorter.

        Raises:
            TypeError: if ``data`` is no TensorDict.
            ValueError: if ``data`` is empty, has no done flag, has one id in two rows or does not fit
                the open episodes; if the storage refuses an episode; or, with ``on_break="raise"``, if
                steps do not continue the open episode of their id or row.
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
        """Add one step, or one step of each of ``B`` environments.

        Args:
            data: TED TensorDict of batch size ``[]`` or ``[B]``.

        Returns:
            As :meth:`extend`; for a single step its handle, or None if it is not stored yet.
        """
        _check_data(data)
        if data.ndim:
            index = self.extend(lazy_stack([data], data.ndim))
            return index.squeeze(-1) if index.shape == (*data.batch_size, 1) else index
        index = self.extend(lazy_stack([data]))
        last = int(index[-1]) if index.numel() else -1
        return None if last < 0 else last

    def flush(self) -> Tensor:
        """Store all open episodes as truncated.

        Returns:
            int64 ``[K]``: the handles of their steps.

        Raises:
            ValueError: if the steps have no flag to mark, such as ``("next", "truncated")`` or
                ``("next", "done")``, or if the storage refuses an episode. None is stored then;
                :meth:`discard` drops a refused one.
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
                stored, _, _ = self._store_episodes(episodes, lengths, closed)
                self._open = OpenSteps()
                self._write_count += int(lengths.sum())
            return stored

    def discard(self, episode: Label) -> None:
        """Drop an open episode without storing it.

        Args:
            episode: its label in :attr:`open_episodes`.

        Raises:
            KeyError: if no such episode is open.
        """
        with self._locked():
            if episode not in self._open.slots:
                known = [*self.open_lengths]
                raise KeyError(f"no episode {episode!r} is open; the open ones are {known}.")
            self._open.discard(self._open.slots[episode])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the open episodes, what was learned of entries, and counts."""
        with self._locked():
            opened = self._open
            return {
                "open": [
                    (int(opened.ids[slot]), opened.labels[slot], plain_steps(opened.episode(slot)))
                    for slot in opened.by_age()
                ],
                "id_source": None if self._id_source is None else asdict(self._id_source),
                "write_count": self._write_count,
                "continuity": dict(self._pairs),
                "counts": dict(self._counts),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        with self._locked():
            self._restore(state_dict)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; the caller holds the lock."""
        opened = OpenSteps()
        for key, label, steps in state_dict["open"]:
            opened.restore(key, label, steps_from(steps))
        self._open, self._pairs = opened, dict(state_dict["continuity"])
        source = state_dict["id_source"]
        self._id_source = None if source is None else _IdSource(**source)
        self._write_count = state_dict["write_count"]
        self._counts = dict(state_dict["counts"])

    def _empty(self, empty_write_count: bool = True) -> None:
        """Drop the open episodes."""
        with self._locked():
            count = 0 if empty_write_count else self._write_count
            self._forget()
            self._write_count = count

    def __getstate__(self) -> dict[str, Any]:
        with self._locked():
            state = super().__getstate__()
            for name in ("_open", "_pairs", "_entries_cache", "_schema_cache"):
                del state[name]
            return {**state, "_saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._entries_cache = self._schema_cache = _EMPTY_CACHE
        self._restore(saved)  # without the lock: the storage may have none as yet

    def _locked(self) -> AbstractContextManager[Any]:
        """Return the storage's lock; no lock before there is a storage."""
        return nullcontext() if self._storage is None else self._storage.lock

    def _write(self, data: Any) -> Tensor:
        """Write a batch for :meth:`extend`; the caller holds the lock."""
        shape = data.batch_size
        steps, form = flatten(data)
        if form is None and self.transform is None:
            steps.check_values()
        added, paths = self._added_and_compared(steps, form)
        id_source = self._find_id_source(steps, shape)
        batch = segment(steps, id_source.key, shape, self._end_flags)
        if added:
            form = None
            rest = {k: v for k, v in batch.steps.columns.items() if k not in added}
            batch = replace(batch, steps=replace(batch.steps, columns=rest))
        # All of the first batch: steps of several environments may follow each other in it.
        most = _PAIRS if self._pairs or id_source.key is not None else steps.length
        pairs = self._learned_in_rows(batch, paths, most)
        counted, proven = counting(pairs, paths)
        if proven and id_source.key is None:
            self._warn_of_joined(pairs, counted)
        seen_to = counted if proven else ()
        keys, opened = batch.segments.keys, self._open
        self._check_lengths(batch)
        apart = bool(opened.slots) and id_source != self._id_source
        if batch.ended.all() and (apart or opened.by_id.keys().isdisjoint(keys)):
            # All episodes are whole, and no open one is concerned.
            self._check_open_fit(batch)
            bounds = zip(batch.segments.starts, batch.segments.stops, keys, strict=True)
            whole = [Closed(-1, np.arange(start, stop), key) for start, stop, key in bounds]
            return self._commit(batch, shape, whole, pairs, seen_to, id_source)
        if apart:
            raise ValueError(
                f"episodes are open that were told apart by {self._id_source}, this batch "
                f"would be by {id_source}: send one kind of batch, or flush() first."
            )
        first = opened.put(batch.steps, self._schema_with(batch, form))
        found = match(
            opened,
            batch,
            counted,
            proven=proven,
            by_rows=id_source.key is None,
            max_length=self._max_length,
            max_steps=self.max_open_steps or self._storage.max_size,
        )
        if found.breaks and self.on_break == "raise":
            i, reason = found.breaks[0]
            raise ValueError(
                f"the steps of episode {keys[i]} do not go on from the open one: {reason}. "
                f"flush() first, discard() one of {[*opened.slots]}, or give on_break='truncate'."
            )
        pairs = self._learned_from_links(found, pairs, paths)
        closed = self._closed(batch, found, first)
        return self._commit(batch, shape, closed, pairs, seen_to, id_source, found)

    def _learned_in_rows(self, batch: Batch, paths: tuple[Path, ...], most: int) -> Pairs:
        """Learn from consecutive steps of a batch which entries follow TED."""
        pairs = self._pairs
        if self._open.batches % 8:
            paths = tuple(path for path in paths if sum(pairs.get(path, (0, 0))) < _ENOUGH)
        earlier, columns = batch.pairs(most), batch.steps.columns
        later = earlier + 1
        compared = {key: columns[key] for path in paths for key in (path, ("next", *path))}
        if any(isinstance(column, Tensor) and not column.is_cpu for column in compared.values()):
            both = torch.from_numpy(np.concatenate([earlier, later]))
            steps = replace(batch.steps, columns=compared).take(both)
            columns = copied_to_cpu(steps, compared).columns
            earlier, later = np.split(np.arange(len(both)), 2)
        return learned(
            pairs,
            paths,
            lambda path: bits_at(columns[path], later),
            lambda path: bits_at(columns[path], earlier),
            len(later),
        )

    def _warn_of_joined(self, pairs: Pairs, paths: tuple[Path, ...]) -> None:
        """Warn of entries that follow TED, but not within an episode of the batch."""
        for path in paths:
            if pairs[path][1] > self._pairs.get(path, (0, 0))[1] and "joined" not in self._warned:
                self._warned.add("joined")
                _logger.warning(
                    "within an episode of a batch, %s is not always %s of the step before. Steps of "
                    "several environments in one row count as one episode: write a [B, T] batch, a row "
                    "for each environment, or give ids (traj_key). This is said once for each writer.",
                    name_of(path),
                    name_of(("next", *path)),
                )

    def _learned_from_links(self, found: Matches, pairs: Pairs, paths: tuple[Path, ...]) -> Pairs:
        """Learn from steps that continue open episodes about entries that rows told nothing of."""
        links = np.array(found.links[:_PAIRS], dtype=np.int64).reshape(-1, 2)
        return learned(
            pairs,
            [path for path in paths if pairs.get(path, (0, 0)) == (0, 0)],
            lambda path: self._open.bits_at(path, links[:, 0]),
            lambda path: self._open.bits_at(path, links[:, 1]),
            len(links),
        )

    def _added_and_compared(
        self, steps: Steps, form: Form | None
    ) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Find the entries that a buffer added to a sample, and the entries to compare."""
        schema = self._storage.schema if self.transform is None else None
        known_form, known_schema, known = self._entries_cache
        if form is None or known_form != form or known_schema is not schema:
            added: tuple[Path, ...] = ()
            if schema is not None:
                added = tuple((_SAMPLE_ENTRIES & steps.columns.keys()) - schema.entries.keys())
            known = (added, comparable(steps, self._end_flags.keys))
            self._entries_cache = (form, schema, known)
        return known

    def _find_id_source(self, steps: Steps, shape: torch.Size) -> _IdSource:
        """Find what identifies the episodes of a batch."""
        if self.traj_key is None:
            for key in _ID_KEYS:
                if key in steps.columns:
                    return _IdSource(key)
            return _IdSource(None, shape[:-1].numel())
        key = path_of(self.traj_key)
        if key not in steps.columns:
            raise KeyError(f"traj_key {self.traj_key!r} is not in the data: {names_of(steps)}.")
        return _IdSource(key)

    @property
    def _max_length(self) -> int | None:
        """Most steps of an open episode; None with a transform, which may still shorten it."""
        return self._storage.max_size if self.transform is None else None

    def _check_lengths(self, batch: Batch) -> None:
        """Refuse an episode that exceeds the storage's ``max_steps``."""
        budget = self._max_length
        if budget is None or batch.steps.length <= budget or batch.segments.sizes.max() <= budget:
            return
        sizes = batch.segments.sizes
        i = int(sizes.argmax())
        raise ValueError(
            f"episode {batch.segments.keys[i]} is refused: an episode of {sizes[i]} steps does not fit "
            f"in max_steps={budget}: give EpisodeStorage a larger budget."
        )

    def _check_open_fit(self, batch: Batch) -> None:
        """Refuse a first batch whose schema the open episodes, which are stored later, would not fit."""
        opened = self._open
        if not (opened.slots and opened.schema) or self.transform or self._storage.schema:
            return
        length = torch.tensor([batch.steps.length], device="cpu")
        try:
            Schema.of(batch.steps, length, share_next=False).merge(opened.schema)
        except ValueError as error:
            raise ValueError(
                f"the open episode {next(iter(opened.slots))!r} would not fit beside the steps of this "
                f"batch: {error} Send one kind of steps, or drop it: writer.discard(key)."
            ) from error

    def _schema_with(self, batch: Batch, form: Form | None) -> Schema:
        """Merge the schema of a batch into that of the open steps.

        Raises:
            ValueError: if the batch does not fit the stored or the open steps.
        """
        stored = self._storage.schema if self.transform is None else None
        fits = (form, stored, self._open.schema)
        if form is not None and self._schema_cache == fits and self._open.schema is not None:
            return self._open.schema
        length = torch.tensor([batch.steps.length], device="cpu")
        schema = Schema.of(batch.steps, length, share_next=False)
        if stored is not None:
            stored.merge(schema)
        if self._open.slots and self._open.schema is not None:
            known = [key for key in batch.segments.keys if key in self._open.by_id]
            of = f"the open episode {known[0]}" if known else "the open episodes"
            try:
                schema = self._open.schema.merge(schema)
            except ValueError as error:
                raise ValueError(f"the steps of {of} must be as its first ones: {error}") from error
        elif schema == self._open.schema:
            schema = self._open.schema
        self._schema_cache = (form, stored, schema)
        return schema

    def _closed(self, batch: Batch, found: Matches, first: int) -> list[Closed]:
        """List the episodes that a batch closes, ordered by their last steps."""
        opened, slots, keys = self._open, found.slots, batch.segments.keys
        opened.assign(batch.segments, slots)
        ended = np.flatnonzero(batch.ended).tolist()
        reasons: dict[int, Reason] = {int(slots[i]): "ended" for i in ended}
        for slot in found.broken:
            reasons[slot] = "break"
        for slot in found.over_budget:
            reasons[slot] = "budget"
        if not reasons:
            return []
        closed = []
        rows_of = opened.rows_of([*reasons], first + batch.steps.length)
        for (slot, reason), rows in zip(reasons.items(), rows_of, strict=True):
            known = slot in opened.labels
            label = opened.labels[slot] if known else keys[found.fresh[slot]]
            closed.append(Closed(slot, rows, label, reason))
        closed.sort(key=lambda episode: int(episode.rows[-1]))
        return closed

    def _commit(
        self,
        batch: Batch,
        shape: torch.Size,
        closed: list[Closed],
        pairs: Pairs,
        paths: tuple[Path, ...],
        id_source: _IdSource,
        found: Matches | None = None,
    ) -> Tensor:
        """Store the closed episodes and accept the batch; return the index to give out.

        ``found`` is None if all segments are whole episodes and none is among the open steps.
        """
        first, kept, episodes = 0 if found is None else self._open.tail, closed, batch.steps
        anew = None
        if id_source.key is not None and id_source == self._id_source:
            anew = renumbered(self._open, batch, found, paths)
        if found is not None and closed:
            kept = worth_storing(
                closed, self._open, self._end_flags, discard_broken=self.on_break == "discard"
            )
            episodes = steps_of(kept, self._open, self._end_flags) if kept else batch.steps
        if kept:
            episodes, lengths = transformed(self.transform, episodes, kept, self._end_flags)
        with interrupts_deferred():
            if kept:
                stored, kept, lengths = self._store_episodes(episodes, lengths, kept)
                self._write_count += sum(lengths.tolist())
            else:
                stored = lengths = _nothing()
            if found is not None:
                left = {episode.slot: episode.rows for episode in closed}
                self._open.accept(batch.segments, found.slots, found.fresh, left)
                self._count_given_up(batch, found, closed, len(kept))
                self._id_source = id_source
            self._pairs = pairs
            if anew is not None and "renumbered" not in self._warned:
                self._warned.add("renumbered")
                _logger.warning(
                    "%s: it lacks its beginning. Ids must stay the same: MultiSyncCollector numbers "
                    "them anew in each batch with split_trajs=True. Give it split_trajs=False, or give "
                    "EpisodeWriter(traj_key=...) a key of ids that stay. This is said once for each "
                    "writer.",
                    anew,
                )
        if self._sets_indices():
            return handles_of_batch(batch, shape, kept, lengths, stored, first)
        return stored

    def _store_episodes(
        self, episodes: Steps, lengths: Tensor, closed: list[Closed]
    ) -> tuple[Tensor, list[Closed], Tensor]:
        """Store all episodes or none, except that refused ones that were given up are dropped.

        Returns:
            The handles of the stored steps; the stored episodes and their lengths.
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
                except ValueError as refusal:
                    if episode.reason in ("break", "budget"):
                        refused.append(i)
                        continue
                    drop = f" To drop it: writer.discard({episode.label!r})."
                    drop = drop if episode.label in self._open.slots else ""
                    raise ValueError(
                        f"episode {episode.label} is refused: {refusal}{drop}"
                    ) from error
            if not refused:
                raise
        left = [i for i in range(len(closed)) if i not in refused]
        if not left:
            return _nothing(), [], _nothing()
        rest = Steps.concat([parts[i] for i in left])
        return self._store_episodes(rest, lengths[left], [closed[i] for i in left])

    def _count_given_up(
        self, batch: Batch, found: Matches, closed: list[Closed], stored: int
    ) -> None:
        """Count the episodes that were given up; warn the first time."""
        given_up = [episode for episode in closed if episode.reason != "ended"]
        if not given_up and not found.breaks:
            return
        dropped = len(closed) - stored
        self._counts["breaks"] += len(found.breaks)
        self._counts["dropped"] += dropped
        self._counts["truncated"] += len(given_up) - dropped
        if found.breaks and "break" not in self._warned:
            self._warned.add("break")
            i, reason = found.breaks[0]
            _logger.warning(
                "steps of episode %s do not go on from the open one: %s. They begin another episode%s. "
                "This is said once for each writer; writer.stats() counts.",
                batch.segments.keys[i],
                reason,
                _BREAK_OUTCOMES[self.on_break if found.broken else "apart"],
            )
        if found.over_budget and "budget" not in self._warned:
            self._warned.add("budget")
            _logger.warning(
                "the open episodes were to have more than max_open_steps=%s steps, or one of them more "
                "than the storage's max_steps=%s: episode %s was ended as truncated, or dropped where "
                "it cannot be stored. An episode stays open until a done flag comes: those that a "
                "collector with reset_at_each_iter=True breaks off stay open for good, unless "
                "set_truncated=True, too. This is said once for each writer; writer.stats() counts.",
                self.max_open_steps or self._storage.max_size,
                self._storage.max_size,
                next(episode.label for episode in closed if episode.reason == "budget"),
            )

    def _sets_indices(self) -> bool:
        """Whether this writer's buffer sets indices in the data."""
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
    """Return an empty int64 tensor."""
    return torch.zeros(0, dtype=torch.int64, device="cpu")


def _paths(keys: NestedKey | Sequence[NestedKey] | None) -> tuple[Path, ...]:
    """Convert one key or several to paths; a tuple of strings is one key."""
    if keys is None:
        return ()
    if isinstance(keys, str) or (
        isinstance(keys, tuple) and all(isinstance(name, str) for name in keys)
    ):
        return (path_of(keys),)
    return tuple(path_of(key) for key in keys)
