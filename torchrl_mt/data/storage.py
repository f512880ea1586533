"""A storage of whole episodes within budgets of steps, tokens and episodes.

Episodes are stored whole and evicted whole, the oldest first. A refused write changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from multiprocessing.context import get_spawning_popen
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.data import LazyStackStorage
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt._hosts.ray import send_results_compactly
from torchrl_mt._hosts.torchrl import ConstructorSignature, buffers_on
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data._store.clip_marks import ClipMarks
from torchrl_mt.data._store.columns.rows import RowPlan
from torchrl_mt.data._store.dataset_episodes import (
    append_dataset,
    check_episode,
    check_metadata,
    check_one_episode,
    read_each,
)
from torchrl_mt.data._store.files.store_files import StoreFiles
from torchrl_mt.data._store.handles import (
    HANDLES,
    Resolved,
    kind_of,
    numbers_of,
    resolve_index,
)
from torchrl_mt.data._store.patches import PatchedEntry, check_patch, write_patch
from torchrl_mt.data._store.plain import trusting
from torchrl_mt.data._store.schema import PROMPT, Entry, Schema
from torchrl_mt.data._store.selection import Clips, Selection, plan_clips, plan_rows
from torchrl_mt.data._store.steps import Column, Path, Steps, name_of, pack, path_of, unpack
from torchrl_mt.data._store.store import Admission, Budgets, EpisodeStore
from torchrl_mt.data._store.table import Choice, EpisodeTable
from torchrl_mt.data.checkpoint import FileCheckpointer, read_storage, save_as_one

__all__ = ["EpisodeStorage"]

_logger = logging.getLogger("torchrl_mt")

_NOTIFY_AT_ONCE = 1 << 20
"""Most handles in one call to the buffers when all stored steps are replaced."""
_MOST_SELECTIONS = 8
"""Most samples that are drawn and not read at once: one for each buffer on the storage."""


class EpisodeStorage(LazyStackStorage):
    """A storage of whole episodes, at most ``max_steps`` steps of them.

    Use it with :class:`~torchrl_mt.data.EpisodeWriter`. ``len(storage)`` counts steps, and index ``i``
    is the ``i``-th oldest step. The writer and the samplers give out handles as ``"index"``: integers
    from ``HANDLES`` on that stay with a step; see :meth:`get`.

    When a new episode does not fit, just enough of the oldest episodes are evicted. The first episode
    fixes the keys, shapes per step and dtypes. Entries are read as they were written; :doc:`/replay`
    says how each is stored. A ``ReplayBuffer`` on this storage is saved and loaded whole or not at all
    (:doc:`/checkpoints`).

    Args:
        max_steps: the budget, in steps.
        device: device of the stored tensors.
        scratch_dir: folder for memory-mapped files that hold the tensors; ``None`` keeps them in the
            device's memory. The files have no name and end with the storage. Keep data with ``dumps``.
        max_tokens: a second budget, in tokens: the stored elements of the entries under ``"tokens"`` (of
            a prompt only what it adds), or, without such entries, of the largest entry whose shape
            varies from step to step.
        max_episodes: a third budget, in episodes; ``max_steps`` must be large enough for them.
        share_next: whether a ``("next", k)`` that equals ``k`` one step later may share its rows, so
            that an episode takes ``T + 1`` rows instead of ``2 T``.

    Raises:
        ValueError: if a budget is not a positive integer, or ``scratch_dir`` is used with another device
            than the CPU.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_mt.data import EpisodeStorage, EpisodeWriter
        >>> rb = ReplayBuffer(storage=EpisodeStorage(100), writer=EpisodeWriter(), batch_size=4)
        >>> done = torch.tensor([False, False, True, False, True]).unsqueeze(-1)
        >>> two_episodes = TensorDict({"action": torch.arange(5), "next": {"done": done}}, [5])
        >>> index = rb.extend(two_episodes)
        >>> rb.storage.lengths
        tensor([3, 2])
        >>> rb[index[3:]]["action"], rb[-1]["action"]
        (tensor([3, 4]), tensor(4))
    """

    __signature__ = ConstructorSignature()
    _default_checkpointer = FileCheckpointer

    def __new__(cls, *args: Any, **kwargs: Any) -> EpisodeStorage:
        """Refuse ``max_size``, TorchRL's name of the budget."""
        if "max_size" in kwargs:
            raise TypeError("EpisodeStorage has no argument max_size: give max_steps, the budget.")
        return super().__new__(cls)

    @torch.inference_mode(False)
    def __init__(
        self,
        max_steps: int,
        *,
        device: torch.device | str | int = "cpu",
        scratch_dir: str | FilePath | None = None,
        max_tokens: int | None = None,
        max_episodes: int | None = None,
        share_next: bool = True,
    ) -> None:
        budgets = {"max_tokens": max_tokens, "max_episodes": max_episodes}
        self.max_tokens, self.max_episodes = (
            None if budget is None else check_positive_integer(name, budget)
            for name, budget in budgets.items()
        )
        super().__init__(max_size=check_positive_integer("max_steps", max_steps))
        self.device = torch.empty(0, device=device).device
        self.lock = threading.RLock()
        self.scratch_dir = scratch_dir
        self._store = self._new_store(share_next)
        self._revision = 0
        self._has_warned = False
        self._selections: deque[Selection] = deque(maxlen=_MOST_SELECTIONS)
        self._drawing: tuple[torch.Generator | None] | None = None
        """Generator of the sampler that is calling a selector, if one is."""

    def _new_store(self, share_next: bool) -> EpisodeStore:
        """An empty store with this storage's budgets."""
        budgets = Budgets(self.max_size, self.max_tokens, self.max_episodes)
        return EpisodeStore(budgets, self.device, share_next, self.scratch_dir)

    # ---- contents -------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self.lock:
            return self.table.num_steps

    @property
    def _is_full(self) -> bool:
        """False: ordered by age, the stored steps never wrap around."""
        return False

    @property
    def _last_cursor(self) -> tuple[int, int]:
        """A value that changes with every write, for HERReplayBuffer."""
        with self.lock:
            return self._revision, self.table.end

    @property
    def table(self) -> EpisodeTable:
        """Lengths and rows of the stored episodes; hold ``lock`` while using it."""
        return self._store.table

    @property
    def schema(self) -> Schema | None:
        """Schema of the stored steps; None before the first write."""
        return self._store.schema

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes."""
        return self.table.num_episodes

    @property
    def lengths(self) -> Tensor:
        """int64 ``[num_episodes]``: steps of each episode, oldest first."""
        with self.lock:
            return self.table.lengths.clone()

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens, as ``max_tokens`` counts them."""
        with self.lock:
            return self.table.num_tokens

    @property
    def revision(self) -> int:
        """A number that grows whenever the stored steps change."""
        return self._revision

    def places(self, index: Any) -> Tensor:
        """Return the current positions of steps by age: 0 is the oldest stored step.

        Args:
            index: handles of any shape, or another index that :meth:`get` takes.

        Returns:
            int64 on the CPU, of the same shape.

        Raises:
            IndexError: if a step is not stored (any more).
        """
        with self.lock:
            found = self._resolve(index)
        return found.places.reshape(() if found.shape is None else found.shape)

    @property
    def generator(self) -> torch.Generator | None:
        """The sampling buffer's generator, for the draws of a selector; None is PyTorch's global one."""
        return self._rng if self._drawing is None else self._drawing[0]

    @contextmanager
    def drawing_with(self, generator: torch.Generator | None) -> Iterator[None]:
        """Make a sampler's generator the :attr:`generator`; several buffers may share a storage."""
        with self.lock:
            before, self._drawing = self._drawing, (generator,)
            try:
                yield
            finally:
                self._drawing = before

    def num_clips(self, span: int) -> int:
        """Count the stored clips: runs of ``span`` consecutive steps of one episode.

        Raises:
            ValueError: if ``span`` is not a positive integer.
        """
        check_positive_integer("span", span)
        with self.lock:
            return self.table.total(Choice(span))

    def entry(self, key: NestedKey) -> Entry | None:
        """Return the schema of the entry ``key``; None if it is not stored."""
        return None if self.schema is None else self.schema.entries.get(path_of(key))

    @property
    def shared_keys(self) -> list[NestedKey]:
        """The ``("next", k)`` entries that share the rows of ``k``."""
        return [unravel_key(path) for path, entry in self._entries() if entry.shared]

    @property
    def ragged_keys(self) -> list[NestedKey]:
        """The entries whose shape varies from step to step."""
        return [unravel_key(path) for path, entry in self._entries() if entry.kind == "ragged"]

    @property
    def growing_keys(self) -> list[NestedKey]:
        """The entries of which each step stores only what it adds to an earlier one."""
        return [PROMPT] if self.schema is not None and self.schema.growing else []

    def _entries(self) -> Iterable[tuple[Path, Entry]]:
        return () if self.schema is None else self.schema.entries.items()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors; Python objects are not counted."""
        return self._store.nbytes

    # ---- reading --------------------------------------------------------------------------------

    def episode(self, i: int) -> Any:
        """Return the ``i``-th oldest episode as a TED TensorDict of batch size ``[T]``.

        Raises:
            IndexError: if there is no such episode. A negative ``i`` counts from the newest.
        """
        with self.lock:
            i = self._position(i)
            length = int(self.table.lengths[i])
            steps = self._store.read(RowPlan(self.table.starts[i : i + 1].clone(), length))
            return pack(steps, self.device, unread=True)

    def metadata(self, i: int) -> dict[Any, Any]:
        """Return the metadata of the ``i``-th oldest episode: a copy of the dict, ``{}`` if it has none.

        Raises:
            IndexError: as :meth:`episode`.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> storage = EpisodeStorage(100)
            >>> episode = TensorDict({"action": torch.arange(3)}, [3])
            >>> _ = storage.append(episode, {"source": "demonstration"}), storage.append(episode)
            >>> storage.metadata(0), storage.metadata(-1)
            ({'source': 'demonstration'}, {})
        """
        with self.lock:
            return self.table.metadata_of(self._position(i))

    def _position(self, i: int) -> int:
        """Return the position of the ``i``-th oldest episode; negative ``i`` count from the newest."""
        episodes = self.num_episodes
        if not -episodes <= i < episodes:
            raise IndexError(f"episode {i} is out of range: {episodes} episodes are stored.")
        return i % episodes

    def episodes(self) -> Iterator[Any]:
        """Iterate over the stored episodes, oldest first; skip those that are evicted meanwhile."""
        return read_each(self, self.episode)

    def rows_of(self, index: Any) -> Tensor:
        """Return the ring rows of steps: int64 ``[N]`` on the CPU; hold ``lock`` while using them."""
        return self._rows(self._resolve(index).places)

    def _resolve(self, index: Any) -> Resolved:
        return resolve_index(index, self.table.first, self.table.num_steps)

    def _rows(self, places: Tensor) -> Tensor:
        """Return the ring rows of steps by their positions by age."""
        _, rows = self.table.places(*self.table.find(places.numpy()))
        return torch.from_numpy(rows)

    def get(self, index: Any) -> Any:
        """Read the steps at ``index``: an int, a slice, a mask or integers of any shape.

        Integers from ``HANDLES`` (``2 ** 52``) on are handles, which samples and writes give out. A
        write's is ``HANDLES`` plus the number of steps ever stored before it, and no other step ever
        has it. A clip's also tells where in the clip the step is: read again, alone or in a copy, it has
        the sample's marks and stride. :meth:`places` tells which step it is. Smaller integers count the
        stored steps by age: 0 is the oldest, -1 the newest.

        Raises:
            IndexError: if a step is not stored (any more).
        """
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        send_results_compactly()
        with self.lock:
            selection = self._selected(index)
            shape: torch.Size | None
            if selection is None:
                found = self._resolve(index)
                marks, shape = self._store.marks_of(kind_of(found.given)), found.shape
                plan = plan_rows(self._rows(found.places), 1 if marks is None else marks.stride)
                selection = Selection(found.given, plan, marks)
            else:
                shape = index.shape
            steps = self._store.read(selection.plan, selection.read)
            if selection.marks is not None:
                selection.marks.mark(selection.told, self.device, steps)
            data = pack(steps, self.device, batch_size=shape, unread=True)
        return data[0] if shape is None else data

    def _selected(self, index: Any) -> Selection | None:
        """Take the selection that a sampler made with this index, if it was not read before."""
        for selection in reversed(self._selections):
            if selection.has(index):
                self._selections.remove(selection)
                return selection
        return None

    def contains(self, item: Any) -> Any:
        """Whether ``item`` is the index or handle of a stored step; elementwise for a tensor."""
        if not isinstance(item, Tensor):
            return bool(self.contains(torch.tensor(int(item), device="cpu")))
        with self.lock:
            first, stored = self.table.first, self.table.num_steps
        places = torch.where(item >= HANDLES, numbers_of(item) - first, item)
        return (places < stored) & (places >= torch.where(item >= HANDLES, 0, -stored))

    # ---- selecting ------------------------------------------------------------------------------

    def select(
        self, clips: Clips, *, marks: ClipMarks | None = None, rectangular: bool = False
    ) -> Tensor:
        """Return the index of runs of consecutive steps.

        Whoever reads this index, a copy or a part of it, gets the same steps with the same marks. The
        first read of the whole needs no search, and succeeds even if the steps are evicted meanwhile.

        Args:
            clips: the runs.
            marks: how they are read and marked; None marks nothing.
            rectangular: whether the index is ``[n, span]``, a run per row, instead of ``[N]``.

        Returns:
            int64 on the storage's device: handles of the first of each ``marks.stride`` steps, one run
            after the other.

        Raises:
            RuntimeError: if there were too many different ``marks``.
        """
        with self.lock:
            numbers, rows = self.table.places(clips.episodes, clips.offsets)
            stride = 1 if marks is None else marks.stride
            kind = self._store.kind_for(marks)
            handles, plan = plan_clips(clips, numbers, rows, stride=stride, kind=kind)
            index = torch.from_numpy(handles)
            if rectangular:
                index = index.view(len(numbers), -1)
            span = clips.spans if isinstance(clips.spans, int) else 0
            selection = Selection(index, plan, marks, span)
            self._selections.append(selection)
            return selection.give(self.device)

    def values(self, key: NestedKey, index: Any) -> Column:
        """Read the entry ``key`` of the steps at ``index``, as stored.

        Raises:
            KeyError: if it is not stored.
            IndexError: if a step is not stored (any more).
        """
        with self.lock:
            return self._column(key, RowPlan(self.rows_of(index)))

    def first_values(self, key: NestedKey) -> Column:
        """Read the entry ``key`` at the first step of each episode, oldest first.

        Raises:
            KeyError: if it is not stored.
        """
        with self.lock:
            return self._column(key, RowPlan(self.table.starts.clone()))

    def _column(self, key: NestedKey, plan: RowPlan) -> Column:
        column = self._store.columns.get(path_of(key))
        if column is None:
            known = [unravel_key(path) for path in self._store.columns]
            raise KeyError(f"{key!r} is not stored; the entries are {known}.")
        return column.read(plan)

    # ---- writing --------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Refuse to write single steps (``TypeError``): episodes are stored whole."""
        raise TypeError(
            "EpisodeStorage takes whole episodes and never changes stored steps: use it with "
            "ReplayBuffer(writer=EpisodeWriter(), ...), and rb.extend(...) to write."
        )

    def append(self, episode: Any, metadata: dict[Any, Any] | None = None) -> Tensor:
        """Store one whole episode.

        Args:
            episode: TED TensorDict of batch size ``[T]``.
            metadata: facts about the episode, such as where it is from. A copy of the dict is kept,
                with the same values, and leaves with the episode; see :meth:`metadata`.

        Returns:
            int64 ``[T]``: the handles of its steps.

        Raises:
            ValueError: if it is empty, has another batch size, goes on after an end, exceeds a budget or
                does not fit the schema.
            TypeError: if it is no TensorDict, or its metadata is no dict.
        """
        check_metadata(metadata)
        check_episode(episode)
        steps = unpack(episode)
        check_one_episode(steps)
        given = (metadata,) if metadata else ()
        return self.append_all(steps, torch.tensor([steps.length], device="cpu"), given)

    def extend_from(self, dataset: Any, *, keys: Sequence[NestedKey] | None = None) -> int:
        """Append all episodes of a dataset with their metadata, oldest first.

        Episodes are read and stored some at a time (1024 steps, or one longer episode), so memory stays
        bounded, and others may write and sample meanwhile. A buffer's writer and its ``transform`` take
        no part.

        Args:
            dataset: anything with ``len(dataset)`` and ``dataset.episode(i)``, a TED TensorDict
                ``[T]``, and maybe ``dataset.metadata(i)``, a dict: a
                ``torchrl_mt.datasets.EpisodeDataset``, another ``EpisodeStorage``, or a ``ReplayBuffer``
                on one, of which the episodes that are stored now are read.
            keys: entries to store; a key of a nested TensorDict, such as ``"next"``, names all in it.
                None stores all.

        Returns:
            Number of episodes that were appended. If the budgets are too small for them, only the newest
            are still stored, and a warning says so.

        Raises:
            ValueError: if an episode is empty, exceeds a budget or does not fit the schema. The error
                says which; the episodes before it stay. The same holds if one cannot be read.
            KeyError: if an episode lacks one of the ``keys``.
            TypeError: if ``dataset`` has no episodes.

        Examples:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> demonstrations, storage = EpisodeStorage(100), EpisodeStorage(1000)
            >>> for n in (3, 4):
            ...     episode = TensorDict({"action": torch.arange(n)}, [n])
            ...     _ = demonstrations.append(episode, {"by": "expert"})
            >>> storage.extend_from(demonstrations)
            2
            >>> storage.lengths, storage.metadata(1)
            (tensor([3, 4]), {'by': 'expert'})
        """
        return append_dataset(self, dataset, keys)

    def append_all(
        self, steps: Steps, lengths: Tensor, metadata: Sequence[Mapping[Any, Any]] = ()
    ) -> Tensor:
        """Store whole episodes, oldest first: all of them, or none if one is refused.

        Args:
            steps: the episodes, one after the other.
            lengths: int64 ``[E]``, steps of each.
            metadata: metadata of each, or nothing.

        Returns:
            int64 ``[N]``: the handles of those of their steps that are still stored.

        Raises:
            ValueError: if one is empty, exceeds a budget or does not fit the schema.
        """
        with self.lock, _not_inference():
            if not lengths.shape[0]:
                return torch.zeros(0, dtype=torch.int64, device="cpu")
            # Check everything that can fail before changing anything.
            steps = steps.on(self.device)
            admitted = self._store.admit(steps, lengths)
            self._read_selections()
            first, before = self.table.next, self.schema
            self._store.append(admitted, metadata)
            if before is not self.schema:
                self._warn_of_disagreement(before, admitted)
            evicted = self.table.oldest > first  # Some of these very episodes.
            index = self._notify_change(len(self) if evicted else steps.length)
            if evicted and not self._has_warned:
                self._has_warned = True
                self._warn_of_too_much(admitted)
            return index

    def check(self, episode: Steps) -> None:
        """Check that one whole episode can be stored; nothing is changed.

        Raises:
            ValueError: if it is empty, exceeds a budget or does not fit the schema.
        """
        with self.lock, _not_inference():
            length = torch.tensor([episode.length], device="cpu")
            self._store.admit(episode.on(self.device), length)

    def _warn_of_disagreement(self, before: Schema | None, written: Admission) -> None:
        """Warn of each ``("next", k)`` that shares the rows of ``k`` no more."""
        for path, entry in before.entries.items() if before is not None else ():
            if not entry.shared or written.schema.entries[path].shared:
                continue
            _logger.warning(
                "%s of an episode is not %s of the step after, or varies in shape: all episodes have "
                "rows of their own for it from now on, which takes more memory",
                name_of(path),
                name_of(path[1:]),
            )

    def _warn_of_too_much(self, written: Admission) -> None:
        """Warn of a write that alone exceeds a budget."""
        count = written.lengths.shape[0]
        took = {
            "max_steps": written.steps.length,
            "max_tokens": int(written.tokens.sum()),
            "max_episodes": count,
        }
        _logger.warning(
            "only the last %d of the %d episodes of one write are kept, the others have left again "
            "for them and were never sampled: raise %s, so that such a write fits, or write less at "
            "a time and sample in between. This is said once for each storage.",
            self.num_episodes,
            count,
            " and ".join(
                f"{budget} from {getattr(self._store.budgets, budget)} to {took[budget]}"
                for budget, lost in self._store.not_kept(written.lengths, written.tokens).items()
                if lost
            ),
        )

    def _notify_change(self, new: int) -> Tensor:
        """Notify the buffers that the ``new`` last steps were written; return their handles."""
        self._revision += 1
        self._bump_mutation_revision()
        end = HANDLES + self.table.end
        return self._notify(end - new, end)

    def _replace(self, store: EpisodeStore) -> None:
        """Replace all stored steps by those of another store, and notify the buffers."""
        self._read_selections()
        self._store = store
        self._revision += 1
        self._bump_mutation_revision()
        end = HANDLES + self.table.end
        # All handles at once would take much memory.
        for first in range(end - len(self), end, _NOTIFY_AT_ONCE) or [end]:
            self._notify(first, min(first + _NOTIFY_AT_ONCE, end))

    def _notify(self, first: int, end: int) -> Tensor:
        """Mark the handles from ``first`` to before ``end`` as updated in every buffer."""
        index = torch.from_numpy(np.arange(first, end))  # Faster for few than torch.arange.
        for buffer in buffers_on(self):
            buffer.mark_update(index)
        return index

    @torch.inference_mode(False)
    def _empty(self) -> None:
        """Evict every episode; keep allocations and schema."""
        with self.lock:
            self._read_selections()
            self._store.evict(self.num_episodes)
            self._notify_change(0)

    # ---- changing stored steps: ReplayBuffer.update_if_present ----------------------------------

    supports_conditional_update = True

    def _conditional_patch_leaf(self, key: NestedKey) -> PatchedEntry:
        with self.lock:
            return PatchedEntry(self, key)

    def _validate_conditional_patch(
        self, index: Tensor, patch: Mapping[NestedKey, Any]
    ) -> dict[NestedKey, Tensor]:
        with self.lock:
            return check_patch(self, index, patch)

    @torch.inference_mode(False)
    def _apply_conditional_patch(self, index: Tensor, patch: Mapping[NestedKey, Tensor]) -> None:
        with self.lock:
            self._read_selections()
            write_patch(self, index, patch)
            self._notify_change(0)

    def _read_selections(self) -> None:
        """Read pending selections before their rows change."""
        for selection in self._selections:
            selection.read.update(self._store.read(selection.plan, selection.read).columns)

    # ---- saving ---------------------------------------------------------------------------------

    @classmethod
    def load_memmap(
        cls,
        path: str | FilePath,
        *,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        max_episodes: int | None = None,
        scratch_dir: str | FilePath | None = None,
        verify: bool = False,
        trust: bool = False,
    ) -> EpisodeStorage:
        """Open a checkpoint as a storage whose files are memory-mapped.

        Steps are read from the files when they are sampled; Python objects are read at once. The files
        never change. The first write that needs room copies everything to new memory, or to files in
        ``scratch_dir``.

        Args:
            path: a folder that a buffer's or a storage's ``dumps`` wrote. It may be replaced or
                deleted once this returns (not on Windows).
            max_steps: the budget, in steps; None takes that of the saved storage. A smaller one keeps
                the newest whole episodes.
            max_tokens: likewise, in tokens.
            max_episodes: likewise, in episodes.
            scratch_dir: folder for steps that are written later; None keeps them in memory.
            verify: whether to read all files once and compare their hashes. Without it, only sizes
                and the hashes of small files are compared.
            trust: whether to read any Python object among what is stored, which may run code. Plain
                data and images need no trust.

        Raises:
            FileNotFoundError: if there is no such folder, or a file is missing.
            ValueError: if it is no such checkpoint, a file is damaged, or not even the newest episode
                fits.

        Examples:
            >>> import tempfile, torch
            >>> from tensordict import TensorDict
            >>> from torchrl_mt.data import EpisodeStorage
            >>> storage = EpisodeStorage(100)
            >>> index = storage.append(TensorDict({"action": torch.arange(3)}, [3]))
            >>> folder = tempfile.mkdtemp()
            >>> storage.dumps(folder)
            >>> EpisodeStorage.load_memmap(folder)[1:]["action"]
            tensor([1, 2])
        """
        given = {"max_steps": max_steps, "max_tokens": max_tokens, "max_episodes": max_episodes}

        def load(folder: FilePath) -> EpisodeStorage:
            files = StoreFiles(folder)
            budgets = files.state["budgets"] | {k: v for k, v in given.items() if v is not None}
            storage = cls(**budgets, scratch_dir=scratch_dir, share_next=files.state["share_next"])
            storage._restore(lambda store: files.load(store, mapped=True, verify=verify))
            return storage

        with trusting(trust):
            return read_storage(path, load, verify=verify)

    def loads(self, path: str | FilePath, *, trust: bool = False) -> None:
        """Load what ``dumps`` saved in the folder ``path``; if that fails, change nothing.

        Args:
            path: the folder.
            trust: see :meth:`load_memmap`.
        """
        with trusting(trust):
            super().loads(path)

    def attach(self, buffer: Any) -> None:
        """Attach ``buffer``: notify it of changes, and save and load it whole or not at all."""
        super().attach(buffer)
        save_as_one(buffer, self)

    def state_dict(self) -> dict[str, Any]:
        """Return everything stored, as copies."""
        with self.lock:
            return self._store.state_dict()

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace everything stored by a saved state; if that fails, change nothing.

        Entries that shared rows share them here if ``share_next`` is True. If the budgets are exceeded,
        the newest whole episodes are kept, and a warning says so.

        Raises:
            ValueError: if not even the newest episode fits.
        """
        self._restore(lambda store: store.load_state_dict(state_dict))

    @torch.inference_mode(False)
    def _restore(self, load: Callable[[EpisodeStore], int]) -> None:
        """Replace everything stored by what ``load`` loads; if that fails, change nothing.

        ``load`` gets an empty store and returns how many of the oldest episodes were left out.
        """
        with self.lock:
            store = self._new_store(self._store.share_next)
            left_out = load(store)
            # Earlier handles must never mean other steps.
            store.table.number_from(self.table.end)
            self._replace(store)
        if left_out:
            _logger.warning(
                "the newest %d of %d saved episodes are loaded: the others do not fit in "
                "max_steps=%s, max_tokens=%s, max_episodes=%s",
                self.num_episodes,
                self.num_episodes + left_out,
                *store.budgets,
            )

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Restore what is stored now if the body loads other steps and then fails."""
        with self.lock:
            store = self._store
            try:
                yield
            except BaseException:
                if self._store is not store:
                    self._replace(store)
                raise

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "an EpisodeStorage is not shared between processes: write to it in the process that "
                "samples from it, or let one process serve it to all: "
                "ReplayBuffer(..., service_backend='ray'), or TorchRL's RayReplayBuffer. Processes "
                "that only sample from a copy unpack it themselves: give them pickle.dumps(buffer), or "
                "the folder of a checkpoint that was written by buffer.dumps(folder)."
            )
        with self.lock:
            state = copy(Storage.__getstate__(self))
            del state["lock"], state["_selections"], state["_drawing"]
            state["_store"] = (self._store.share_next, self._store.state_dict())
            return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        share_next, stored = state.pop("_store")
        super().__setstate__(state)
        self.lock = threading.RLock()
        self._selections = deque(maxlen=_MOST_SELECTIONS)
        self._drawing = None
        self._store = self._new_store(share_next)
        self._store.load_state_dict(stored)

    def __repr__(self) -> str:
        return (
            f"EpisodeStorage(max_steps={self.max_size}, steps={len(self)}, "
            f"episodes={self.num_episodes}, device={self.device})"
        )


def _not_inference() -> AbstractContextManager[Any]:
    """Return a context that leaves inference mode, so that tensors made in it can change later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
