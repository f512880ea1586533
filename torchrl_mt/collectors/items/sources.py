"""Data sources: items at positions, the same in every process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils.data import DataLoader, IterableDataset

from torchrl_mt.collectors.items.batch_rows import length_of
from torchrl_mt.collectors.items.curriculum import Curriculum
from torchrl_mt.collectors.items.passes import LoaderPasses, Passes, seed_sequence

__all__ = ["Source", "make_source"]

_EMPTY = "data must hold at least one item, got none."
_END = object()


def make_source(data: Any, shuffle: bool, cycle: bool | None, seed: int) -> Source:
    """Make the source of some data, at its beginning.

    The arguments and errors are those of :class:`~torchrl_mt.collectors.items.items.Items`.
    """
    if data is None:
        if shuffle or cycle is False:
            raise ValueError(
                f"without data there is nothing to shuffle and no end, got shuffle={shuffle} and "
                f"cycle={cycle}: give data, or leave both out."
            )
        return _Seeds(seed)
    if isinstance(data, Curriculum):
        if shuffle or cycle is not None:
            raise ValueError(
                f"a {type(data).__name__} chooses its items itself, got shuffle={shuffle} and "
                f"cycle={cycle}: leave both out."
            )
        return _Chosen(data)
    if isinstance(data, (str, bytes)) or (
        isinstance(data, Mapping) and not is_tensor_collection(data)
    ):
        raise TypeError(
            f"data must give one item after the other, got a {type(data).__name__}: pass a list of "
            "items (or one split of a DatasetDict)."
        )
    if isinstance(data, (set, frozenset)):
        data = sorted(data, key=repr)
    is_stream = isinstance(data, (DataLoader, IterableDataset))
    if not is_stream and hasattr(type(data), "__getitem__") and length_of(data) is not None:
        return _Indexed(data, shuffle, cycle is not False, seed)
    if shuffle:
        raise ValueError(
            "shuffle=True needs data with a length and items by index, got a "
            f"{type(data).__name__}: "
            + (
                "shuffle in it, DataLoader(..., shuffle=True)."
                if isinstance(data, DataLoader)
                else "pass list(data), or data that is in random order."
            )
        )
    once = isinstance(data, Iterator)
    if once and cycle:
        raise ValueError(
            f"cycle=True needs data that can be iterated again, got a {type(data).__name__}, "
            "which cannot: pass list(data), or a function that returns a new iterator."
        )
    passes: Passes
    if isinstance(data, DataLoader):
        passes = LoaderPasses(data)
    elif isinstance(data, Iterable) or hasattr(type(data), "__getitem__") or callable(data):
        passes = Passes(data)
    else:
        raise TypeError(
            "data must be a list, a Dataset, a DataLoader, an iterable or a function that returns an "
            f"iterator, got a {type(data).__name__}."
        )
    return _Ordered(passes, cycle=not once and cycle is not False, once=once, seed=seed)


class Source:
    """Base of data sources, as :class:`~torchrl_mt.collectors.items.items.Items` reads them."""

    by_index = False
    """Whether any item can be read again."""
    at_once = False
    """Whether reading an item takes next to no time."""
    wants_reports = False
    """Whether the data is told how episodes went."""
    fingerprint: dict[str, Any]
    """Kind and size of the data, to recognize other data."""

    def read(self, position: int) -> Any:
        """Read the next item, at ``position``; raise ``StopIteration`` at the end."""
        raise NotImplementedError

    def at(self, position: int) -> Any:
        """Read any item; only if ``by_index``."""
        raise NotImplementedError

    def state(self, position: int) -> dict[str, Any]:
        """The state in which ``position`` is read next."""
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. A call that raises changes nothing."""
        raise NotImplementedError

    def report(self, item: Any, episodes: list[Any]) -> None:
        """Queue a report on an item, if the data ``wants_reports``."""

    def hand_over(self) -> None:
        """Pass queued reports to the data."""

    def saved(self, values: list[Any]) -> list[Any]:
        """Convert items to what a state holds of them."""
        return values

    def restored(self, saved: list[Any]) -> list[Any]:
        """Convert :meth:`saved` values back to items, which are being played again."""
        return saved

    def close(self) -> None:
        """Stop reading ahead."""


class _Seeds(Source):
    """Items without data: a new seed each."""

    by_index = at_once = True

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.fingerprint = {"kind": "seeds"}

    def read(self, position: int) -> dict[str, int]:
        return {"seed": self.seed * 1_000_003 + position}

    at = read

    def state(self, position: int) -> dict[str, Any]:
        return {"seed": self.seed}

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


class _Indexed(_Seeds):
    """Data with a length and an index."""

    def __init__(self, data: Any, shuffle: bool, cycle: bool, seed: int) -> None:
        super().__init__(seed)
        self.data = data
        self.at_once = isinstance(data, (list, tuple, range))
        self.size = len(data)
        if not self.size:
            raise ValueError(_EMPTY)
        self.shuffle = shuffle
        self.cycle = cycle
        self.fingerprint = {"kind": "by index", "length": self.size, "shuffle": shuffle}
        # Two, since items of the last epoch may be read again.
        self._order = lru_cache(2)(self._permutation)

    def read(self, position: int) -> Any:
        if position >= self.size and not self.cycle:
            raise StopIteration
        return self.at(position)

    def at(self, position: int) -> Any:
        epoch, place = divmod(position, self.size)
        index = int(self._order(self.seed, epoch)[place]) if self.shuffle else place
        try:
            return self.data[index]
        except Exception as error:
            raise RuntimeError(f"data[{index}] raised {type(error).__name__}: {error}.") from error

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        """Order of an epoch: int64 ``[size]``."""
        return np.random.default_rng(seed_sequence(seed, epoch)).permutation(self.size)


class _Chosen(Source):
    """Items that a :class:`~torchrl_mt.collectors.Curriculum` chooses."""

    wants_reports = True

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self.fingerprint = {"kind": "a curriculum"}
        self._reports: deque[tuple[Any, list[Any]]] = deque()
        self._failure: RuntimeError | None = None

    def read(self, position: int) -> Any:
        self.hand_over()
        if self._failure is not None:
            raise self._failure
        try:
            return self.curriculum.next()
        except StopIteration:
            raise
        except Exception as error:
            raise RuntimeError(
                f"next() of the data raised {type(error).__name__}: {error}."
            ) from error

    def report(self, item: Any, episodes: list[Any]) -> None:
        self._reports.append((item, episodes))

    def hand_over(self) -> None:
        # The next read raises the curriculum's error.
        while self._reports and self._failure is None:
            item, episodes = self._reports.popleft()
            try:
                self.curriculum.report(item, episodes)
            except Exception as error:
                self._failure = RuntimeError(
                    f"report() of the data raised {type(error).__name__}: {error}."
                )
                self._failure.__cause__ = error

    def state(self, position: int) -> dict[str, Any]:
        state_dict = getattr(self.curriculum, "state_dict", None)
        return {"curriculum": state_dict() if state_dict is not None else None}

    def load(self, state: dict[str, Any]) -> None:
        if state["curriculum"] is not None:
            self.curriculum.load_state_dict(state["curriculum"])  # type: ignore[attr-defined]
        self._reports.clear()
        self._failure = None

    def saved(self, items: list[Any]) -> list[Any]:
        # Keys of the items, if the curriculum has keys.
        key_of = getattr(self.curriculum, "key_of", None)
        return items if key_of is None else [*map(key_of, items)]

    def restored(self, saved: list[Any]) -> list[Any]:
        item_of = getattr(self.curriculum, "item_of", None)
        return saved if item_of is None else [*map(item_of, saved)]

    def close(self) -> None:
        self.hand_over()


class _Ordered(Source):
    """Data that is read in order, once or epoch by epoch."""

    def __init__(self, passes: Passes, *, cycle: bool, once: bool, seed: int) -> None:
        self.passes = passes
        self.cycle = cycle
        self.once = once
        self.seed = seed
        self.epoch = self.place = 0
        self.items: Iterator[Any] | None = None
        self.generators: list[torch.Tensor] = []
        """States of the data's generators before the epoch."""
        self.failure: RuntimeError | None = None
        size = length_of(passes.data)
        self.fingerprint = (
            {"kind": "an iterator"} if once else {"kind": passes.kind, "length": passes.num_items()}
        )
        if size is None:
            # Read the first item to find out whether there is one.
            items = self._begin(0)
            first = next(items, _END)
            self.items, size = chain([first], items), int(first is not _END)
        if not size:
            raise ValueError(_EMPTY)

    def read(self, position: int) -> Any:
        if self.failure is not None:
            raise self.failure
        if self.epoch and not self.cycle:
            raise StopIteration
        try:
            value = next(self.items or self._begin(self.epoch), _END)
            if value is _END and self.cycle:
                value = next(self._begin(self.epoch + 1), _END)
                if value is _END:
                    raise ValueError(
                        f"data gave no item in epoch {self.epoch + 1}: pass data that can be iterated "
                        "again, or cycle=False."
                    )
                self.epoch, self.place = self.epoch + 1, 0
        except BaseException as error:
            # An iterator that raised must not be read on, which would skip items.
            self.failure = RuntimeError(
                f"item {self.place} of epoch {self.epoch} of the data, or one that is read with it, "
                f"raised {type(error).__name__}: {error}."
            )
            if isinstance(error, Exception):
                raise self.failure from error
            raise
        if value is _END:
            raise StopIteration
        self.place += 1
        return value

    def close(self) -> None:
        if self.items is not None:
            self.items = iter(())

    def _begin(self, epoch: int) -> Iterator[Any]:
        self.generators = self.passes.generator_states()
        self.items = self.passes.begin(epoch, self.seed)
        return self.items

    def state(self, position: int) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "place": self.place,
            "seed": self.seed,
            "generators": self.generators if self.items else self.passes.generator_states(),
        }

    def load(self, state: dict[str, Any]) -> None:
        place = state["place"]
        if self.once:
            self._skip(self.items, self.place, place)
        else:
            before = self.passes.generator_states()
            try:
                self.passes.set_generators(state["generators"])
                items = self.passes.begin(state["epoch"], state["seed"])
                self._skip(items, 0, place)
            except BaseException:
                self.passes.set_generators(before)
                raise
            self.items, self.generators = items, state["generators"]
        self.epoch, self.place, self.seed = state["epoch"], place, state["seed"]
        self.failure = None

    def _skip(self, items: Any, taken: int, place: int) -> None:
        """Read and drop items up to a place in the epoch."""
        if place < taken:
            raise ValueError(
                f"state_dict must not be of an earlier position than the iterator's, got {place} where "
                f"{taken} items were taken: give a new iterator."
            )
        read = taken + sum(1 for _ in islice(items, place - taken))
        if read < place:
            raise ValueError(
                f"state_dict is at item {place} of an epoch, but the data ends after {read}: give the "
                "data of the saved run."
            )
