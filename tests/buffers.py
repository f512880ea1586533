"""Buffers of episodes, made in one line."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torchrl.data import ReplayBuffer

from torchrl_mt.data import EpisodeStorage, EpisodeWriter


def buffer_of(
    storage: int | EpisodeStorage,
    sampler: Any = None,
    *,
    cls: type = ReplayBuffer,
    writer: EpisodeWriter | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """A buffer on a storage, or on a new one of so many steps; ``seed`` is of its generator.

    A sampler may be given as its class; it gets those of the keywords that it takes.
    """
    if isinstance(sampler, type):
        taken = signature(sampler).parameters.keys() & kwargs.keys()
        sampler = sampler(**{name: kwargs.pop(name) for name in taken})
    if seed is not None:
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    return cls(
        storage=EpisodeStorage(storage) if isinstance(storage, int) else storage,
        writer=writer or EpisodeWriter(),
        sampler=sampler,
        **kwargs,
    )
