"""Epochs over iterable data, such as a ``DataLoader``: the same for the same epoch and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchrl_mt.collectors.items.batch_rows import length_of, rows_of_batch

__all__ = ["LoaderPasses", "Passes", "seed_sequence"]

_END = object()


class Passes:
    """Iterable data, with a new iterator for every epoch."""

    kind = "an iterable"

    def __init__(self, data: Any) -> None:
        self.data = data

    def num_items(self) -> int | None:
        """Number of items; ``None`` if unknown."""
        return length_of(self.data)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Iterate over the items of an epoch."""
        _set_epoch(epoch, self.data)
        if isinstance(self.data, Iterable) or hasattr(type(self.data), "__getitem__"):
            return iter(self.data)
        made: Callable[[], Iterable[Any]] = self.data
        return iter(made())

    def generator_states(self) -> list[torch.Tensor]:
        """States of the generators that the data was given for its order."""
        return []

    def set_generators(self, states: list[torch.Tensor]) -> None:
        """Set the states of those generators."""


class LoaderPasses(Passes):
    """A ``DataLoader``, row by row."""

    kind = "a DataLoader"

    def __init__(self, data: DataLoader) -> None:
        super().__init__(data)
        batch_sampler = data.batch_sampler
        parts = [data, data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        self.drawing = [part for part in parts if hasattr(part, "generator")]
        """Parts that may draw random numbers, from their own generator or torch's global one."""

    def num_items(self) -> int | None:
        """The size of the data set."""
        return length_of(self.data.dataset)

    def begin(self, epoch: int, seed: int) -> Iterator[Any]:
        """Iterate over the rows of an epoch's batches."""
        loader = self.data
        _set_epoch(epoch, loader.dataset, loader.sampler, loader.batch_sampler)
        with _own_generator(self.drawing, seed, epoch):
            # Samplers draw the epoch's seed or order when the first batch is asked for.
            batches = iter(loader)
            first = next(batches, _END)
        if first is _END:
            return iter(())
        batches = chain([first], batches)
        if loader.batch_sampler is None:
            return batches
        return chain.from_iterable(rows_of_batch(b, collate_fn=loader.collate_fn) for b in batches)

    def generator_states(self) -> list[torch.Tensor]:
        """States of the generators that the loader was given."""
        return [generator.get_state() for generator in self._generators()]

    def set_generators(self, states: list[torch.Tensor]) -> None:
        """Set the states of those generators."""
        generators = self._generators()
        if len(states) != len(generators):
            raise ValueError(
                f"state_dict must be of a DataLoader with {len(generators)} generators, got "
                f"{len(states)}: make the DataLoader as in the saved run."
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """Distinct generators that the loader was given."""
        drawing: list[Any] = self.drawing
        given = [part.generator for part in drawing if part.generator is not None]
        return list({id(generator): generator for generator in given}.values())


@contextmanager
def _own_generator(parts: list[Any], seed: int, epoch: int) -> Iterator[None]:
    """Give parts without a generator one that follows from the seed and the epoch."""
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
    for each in objects:
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


def seed_sequence(seed: int, epoch: int) -> np.random.SeedSequence:
    """Seed of an epoch's random numbers."""
    return np.random.SeedSequence((seed % 2**64, epoch))
