"""Random draws of samplers, and the checks before them.

Numbers are drawn on the generator's device and returned on the CPU, where the episode table is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_mt._hosts.torchrl import buffers_on, writer_of
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["draw_integers", "draw_order", "draw_uniform", "episode_storage", "require_episodes"]


def episode_storage(storage: Any, sampler: Any) -> EpisodeStorage:
    """Return ``storage`` if it is an :class:`EpisodeStorage`; raise ``TypeError`` otherwise."""
    if not isinstance(storage, EpisodeStorage):
        raise TypeError(
            f"{type(sampler).__name__} samples from an EpisodeStorage, got "
            f"{type(storage).__name__}: use ReplayBuffer(storage=EpisodeStorage(max_steps), "
            f"writer=EpisodeWriter(), ...)."
        )
    return storage


def require_episodes(storage: EpisodeStorage, what: str) -> None:
    """Refuse to sample ``what`` from an empty storage (``RuntimeError``); name the open episodes."""
    if storage.num_episodes:
        return
    writers = map(writer_of, buffers_on(storage))
    lengths = [n for writer in writers for n in getattr(writer, "open_lengths", {}).values()]
    if not lengths:
        raise RuntimeError(f"cannot sample {what}: nothing is stored yet.")
    raise RuntimeError(
        f"cannot sample {what}: nothing is stored yet, since none of the {len(lengths)} open episodes "
        f"(with {sum(lengths)} steps so far) has ended. Episodes are stored when they end; "
        f"buffer.writer.flush() stores the open ones as they are, as truncated."
    )


def draw_integers(high: int, num: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``num`` integers, uniform in ``[0, high)``: int64 ``[num]``."""
    return torch.randint(high, (num,), generator=generator, device=_device(generator)).cpu()


def draw_uniform(num: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``num`` numbers, uniform in ``[0, 1)``: float64 ``[num]``."""
    device = _device(generator)
    return torch.rand(num, generator=generator, device=device, dtype=torch.float64).cpu()


def draw_order(num: int, generator: torch.Generator | None) -> Tensor:
    """Draw a permutation of ``num`` things: int64 ``[num]``."""
    return torch.randperm(num, generator=generator, device=_device(generator)).cpu()


def _device(generator: torch.Generator | None) -> torch.device | str:
    return "cpu" if generator is None else generator.device
