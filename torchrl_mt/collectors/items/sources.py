"""Where items come from: seeds without an end, data that is read by index, data that is read in order.

Whatever is read at a position is the same whenever it is read, and in whichever process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils.data import DataLoader, IterableDataset

from torchrl_mt.collectors.items.curriculum import Curriculum
from torchrl_mt.collectors.items.unbatch import unbatch

__all__ = ["Source", "Steered", "make_source"]

_EMPTY = "data must hold at least one item, got none."
_END = object()


class Source(Protocol):
    """Data as :class:`~torchrl_mt.collectors.items.items.Items` reads it."""

    by_index: bool
    """Whether an item can be read again."""
    at_once: bool
    """Whether items are at hand, so that reading one holds nobody up."""
    fingerprint: dict[str, Any]
    """What the data looks like, to tell other data by."""

    def read(self, position: int) -> Any:
        """The item at the position, which follows the last one read; ``StopIteration`` at the end."""
        ...

    def at(self, position: int) -> Any:
        """Any item, if ``by_index``."""
        ...

    def state(self, position: int) -> dict[str, Any]:
        """How to go on with the item at the position, which is the next to be read."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on there; a refused call leaves everything as it was."""
        ...

    def close(self) -> None:
        """Let go of whatever reads ahead."""
        ...


def make_source(data: Any, *, shuffle: bool, cycle: bool | None, seed: int) -> Source:
    """Find out what kind of data this is.

    Args:
        data: see :class:`~torchrl_mt.collectors.items.items.Items`.
        shuffle: read in random order.
        cycle: begin again at the end; by default, unless ``data`` is an iterator.
        seed: what a random order follows from.

    Returns:
        The data, ready to be read from its beginning.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}.")
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
        return Steered(data)
    if isinstance(data, (str, bytes)) or (
        isinstance(data, Mapping) and not is_tensor_collection(data)
    ):
        raise TypeError(
            f"data must give one item after the other, got a {type(data).__name__}: pass a list of "
            "items (or one split of a DatasetDict)."
        )
    if isinstance(data, (set, frozenset)):
        data = sorted(data, key=repr)
    if not isinstance(data, (DataLoader, IterableDataset)) and _has_indices(data):
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
            f"cycle=True needs data that can be gone through again, got a {type(data).__name__}, "
            "which cannot: pass list(data), or a function that returns a new iterator."
        )
    passes: _Passes
    if isinstance(data, DataLoader):
        passes = _LoaderPasses(data)
    elif isinstance(data, Iterable) or hasattr(type(data), "__getitem__") or callable(data):
        passes = _Passes(data)
    else:
        raise TypeError(
            "data must be a list, a Dataset, a DataLoader, an iterable or a function that returns an "
            f"iterator, got a {type(data).__name__}."
        )
    return _Ordered(passes, cycle=not once and cycle is not False, once=once, seed=seed)


class _Seeds:
    """Items for want of data: a new seed each."""

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

    def close(self) -> None:
        pass


class Steered:
    """Items that a :class:`~torchrl_mt.collectors.Curriculum` chooses."""

    by_index = at_once = False

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self.fingerprint = {"kind": "a curriculum"}
        self._reports: deque[tuple[Any, list[Any]]] = deque()
        self._failure: RuntimeError | None = None

    def read(self, position: int) -> Any:
        """The item that the curriculum chooses, once it knows what became of others."""
        self.hand_over()
        if self._failure is not None:
            raise self._failure
        try:
            return self.curriculum.next()
        except StopIteration:
            raise
        except Exception as error:
            raise RuntimeError(
                f"next() of the data raised {type(error).__name__}: {error}"
            ) from error

    def at(self, position: int) -> Any:
        """Not there: every item is chosen anew."""
        raise NotImplementedError("a curriculum has no items by index")

    def report(self, item: Any, episodes: list[Any]) -> None:
        """Keep what became of an item for :meth:`hand_over`; nobody waits for the curriculum."""
        self._reports.append((item, episodes))

    def hand_over(self) -> None:
        """Report what became of items; what the curriculum raises is raised by the next read."""
        while self._reports and self._failure is None:
            item, episodes = self._reports.popleft()
            try:
                self.curriculum.report(item, episodes)
            except Exception as error:
                self._failure = RuntimeError(
                    f"report() of the data raised {type(error).__name__}: {error}"
                )
                self._failure.__cause__ = error

    def state(self, position: int) -> dict[str, Any]:
        """How the curriculum goes on."""
        state_dict = getattr(self.curriculum, "state_dict", None)
        return {"curriculum": state_dict() if state_dict is not None else None}

    def load(self, state: dict[str, Any]) -> None:
        """Have the curriculum go on there."""
        if state["curriculum"] is not None:
            self.curriculum.load_state_dict(state["curriculum"])  # type: ignore[attr-defined]
        self._reports.clear()
        self._failure = None

    def saved(self, items: list[Any]) -> list[Any]:
        """What to save of items that are being played: themselves, or what they are known by."""
        key_of = getattr(self.curriculum, "key_of", None)
        return items if key_of is None else [*map(key_of, items)]

    def restored(self, saved: list[Any]) -> list[Any]:
        """The items that :meth:`saved` gave; they are being played again."""
        item_of = getattr(self.curriculum, "item_of", None)
        return saved if item_of is None else [*map(item_of, saved)]

    def close(self) -> None:
        """Tell the curriculum what it was not told yet."""
        self.hand_over()


class _Indexed:
    """Data with a length and items by index."""

    by_index = True

    def __init__(self, data: Any, shuffle: bool, cycle: bool, seed: int) -> None:
        self.data = data
        self.at_once = isinstance(data, (list, tuple, range))
        self.size = len(data)
        if not self.size:
            raise ValueError(_EMPTY)
        self.shuffle = shuffle
        self.cycle = cycle
        self.seed = seed
        self.fingerprint = {"kind": "by index", "length": self.size, "shuffle": shuffle}
        # Two: what is read again may lie in the epoch before.
        self.order = lru_cache(2)(_permutation)

    def read(self, position: int) -> Any:
        if position >= self.size and not self.cycle:
            raise StopIteration
        return self.at(position)

    def at(self, position: int) -> Any:
        epoch, place = divmod(position, self.size)
        index = int(self.order(self.size, self.seed, epoch)[place]) if self.shuffle else place
        try:
            return self.data[index]
        except Exception as error:
            raise RuntimeError(f"data[{index}] raised {type(error).__name__}: {error}") from error

    def state(self, position: int) -> dict[str, Any]:
        epoch, place = divmod(position, self.size)
        return {"epoch": epoch, "place": place, "seed": self.seed}

    def load(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]

    def close(self) -> None:
        pass


class _Ordered:
    """Data that is read from the beginning to the end, once or epoch by epoch."""

    by_index = at_once = False

    def __init__(self, passes: _Passes, *, cycle: bool, once: bool, seed: int) -> None:
        self.passes = passes
        self.cycle = cycle
        self.once = once
        self.seed = seed
        self.epoch = self.place = 0
        self.items: Iterator[Any] | None = None
        self.generators: list[torch.Tensor] = []
        """Their states before the epoch began."""
        self.failure: RuntimeError | None = None
        size = passes.length()
        self.fingerprint = (
            {"kind": "an iterator"} if once else {"kind": passes.kind, "length": passes.num_items()}
        )
        if size is None:
            # Nothing but reading tells whether there is an item.
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
                        f"data gave no item in epoch {self.epoch + 1}: pass data that can be gone "
                        "through again, or cycle=False."
                    )
                self.epoch, self.place = self.epoch + 1, 0
        except BaseException as error:
            # An iterator that raised goes on elsewhere or ends, which would skip items.
            self.failure = RuntimeError(
                f"item {self.place} of epoch {self.epoch} of the data, or one that is read with it, "
                f"raised {type(error).__name__}: {error}"
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
        """Go on with an epoch's items."""
        self.generators = self.passes.generator_states()
        self.items = self.passes.begin(epoch, self.seed)
        return self.items

    def at(self, position: int) -> Any:
        raise NotImplementedError("data that is read in order has no items by index")

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
        """Read on up to the place in the epoch."""
        if place < taken:
            raise ValueError(
                f"state_dict must not lie behind data that is an iterator, got {place} items where "
                f"{taken} were taken: give a new iterator."
            )
        read = taken + sum(1 for _ in islice(items, place - taken))
        if read < place:
            raise ValueError(
                f"state_dict lies at item {place} of an epoch, but the data ends after {read}: give the "
                "data of the saved run."
            )


class _Passes:
    """Iterable data: one new iterator an epoch."""

    kind = "an iterable"

    def __init__(self, data: Any) -> None:
        self.data = data

    def length(self) -> int | None:
        """How many steps an epoch has, if that is known."""
        return _length(self.data)

    def num_items(self) -> int | None:
        """How many items there are, if that is known."""
        return _length(self.data)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """An iterator over an epoch's items."""
        _set_epoch(epoch, self.data)
        if isinstance(self.data, Iterable) or hasattr(type(self.data), "__getitem__"):
            return iter(self.data)
        made: Callable[[], Iterable[Any]] = self.data
        return iter(made())

    def generator_states(self) -> list[torch.Tensor]:
        """The states of the generators that the data itself draws its order from."""
        return []

    def set_generators(self, states: list[torch.Tensor]) -> None:
        """Put those generators into these states."""


class _LoaderPasses(_Passes):
    """A ``DataLoader``, row by row."""

    kind = "a DataLoader"

    def __init__(self, data: DataLoader) -> None:
        super().__init__(data)
        batch_sampler = data.batch_sampler
        parts = [data, data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        self.drawing = [part for part in parts if hasattr(part, "generator")]
        """What may draw random numbers, from a generator of its own or from torch's."""

    def num_items(self) -> int | None:
        return _length(self.data.dataset)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        loader = self.data
        _set_epoch(epoch, loader.dataset, loader.sampler, loader.batch_sampler)
        with _own_generator(self.drawing, seed, epoch):
            # Samplers draw the epoch's seed or its order when they are asked for the first time.
            batches = iter(loader)
            first = next(batches, _END)
        if first is _END:
            return iter(())
        batches = chain([first], batches)
        if loader.batch_sampler is None:
            return batches
        return chain.from_iterable(unbatch(b, collate_fn=loader.collate_fn) for b in batches)

    def generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def set_generators(self, states: list[torch.Tensor]) -> None:
        generators = self._generators()
        if len(states) != len(generators):
            raise ValueError(
                f"state_dict must be of a DataLoader with {len(generators)} generators, got "
                f"{len(states)}: make the DataLoader as in the saved run."
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """The generators that the loader's maker gave it."""
        drawing: list[Any] = self.drawing
        given = [part.generator for part in drawing if part.generator is not None]
        return list({id(generator): generator for generator in given}.values())


@contextmanager
def _own_generator(parts: list[Any], seed: int, epoch: int) -> Iterator[None]:
    """Have those who would draw from torch's global generator draw from one of the epoch's own."""
    bare = [part for part in parts if part.generator is None]
    generator = torch.Generator()
    generator.manual_seed(int(_seed_sequence(seed, epoch).generate_state(1, np.uint64)[0]))
    for part in bare:
        part.generator = generator
    try:
        yield
    finally:
        for part in bare:
            part.generator = None


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: int64 ``[size]``."""
    return np.random.default_rng(_seed_sequence(seed, epoch)).permutation(size)


def _seed_sequence(seed: int, epoch: int) -> np.random.SeedSequence:
    """What an epoch's random numbers follow from."""
    return np.random.SeedSequence((seed % 2**64, epoch))


def _set_epoch(epoch: int, *objects: Any) -> None:
    """Tell those who shuffle by epoch which one begins."""
    for each in objects:
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


def _has_indices(data: Any) -> bool:
    """Whether data has a length and, as far as can be told, items by index."""
    return hasattr(type(data), "__getitem__") and _length(data) is not None


def _length(data: Any) -> int | None:
    """The length, if there is one."""
    if not hasattr(type(data), "__len__"):
        return None
    try:
        return len(data)
    except TypeError:  # such as of a DataLoader over data without a length
        return None
