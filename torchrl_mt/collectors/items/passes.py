"""Passes through iterable data, such as a ``DataLoader``: equal for an equal epoch and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchrl_mt.collectors.items.batch_rows import rows_of_batch

__all__ = ["LoaderPasses", "Passes", "length_of", "seed_sequence"]

_END = object()


class Passes:
    """Iterable data: one new iterator an epoch."""

    kind = "an iterable"

    def __init__(self, data: Any) -> None:
        self.data = data

    def length(self) -> int | None:
        """How many steps an epoch has, if that is known."""
        return length_of(self.data)

    def num_items(self) -> int | None:
        """How many items there are, if that is known."""
        return length_of(self.data)

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


class LoaderPasses(Passes):
    """A ``DataLoader``, row by row."""

    kind = "a DataLoader"

    def __init__(self, data: DataLoader) -> None:
        super().__init__(data)
        batch_sampler = data.batch_sampler
        parts = [data, data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        self.drawing = [part for part in parts if hasattr(part, "generator")]
        """What may draw random numbers, from a generator of its own or from torch's."""

    def num_items(self) -> int | None:
        """The size of the data set."""
        return length_of(self.data.dataset)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """The rows of an epoch's batches."""
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
        return chain.from_iterable(rows_of_batch(b, collate_fn=loader.collate_fn) for b in batches)

    def generator_states(self) -> list[torch.Tensor]:
        """The states of those that the loader was given."""
        return [generator.get_state() for generator in self._generators()]

    def set_generators(self, states: list[torch.Tensor]) -> None:
        """Put those into these states."""
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
    generator.manual_seed(int(seed_sequence(seed, epoch).generate_state(1, np.uint64)[0]))
    for part in bare:
        part.generator = generator
    try:
        yield
    finally:
        for part in bare:
            part.generator = None


def _set_epoch(epoch: int, *objects: Any) -> None:
    """Tell those who shuffle by epoch which one begins."""
    for each in objects:
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


def seed_sequence(seed: int, epoch: int) -> np.random.SeedSequence:
    """What an epoch's random numbers follow from."""
    return np.random.SeedSequence((seed % 2**64, epoch))


def length_of(data: Any) -> int | None:
    """The length, if there is one."""
    if not hasattr(type(data), "__len__"):
        return None
    try:
        return len(data)
    except TypeError:  # such as of a DataLoader over data without a length
        return None
