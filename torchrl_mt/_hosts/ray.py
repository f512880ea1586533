"""Ray, which pickles every tensor with its whole storage: what is sent must share none.

Ray is never imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import RayReplayBuffer, ReplayBuffer

__all__ = ["check_sent_buffer", "is_remote", "own_storages", "sendable"]


def is_remote(buffer: Any) -> bool:
    """Whether a replay buffer is in a Ray actor: a ``RayReplayBuffer`` or one of its clients."""
    return type(buffer).__module__ == RayReplayBuffer.__module__


def check_sent_buffer(buffer: Any) -> None:
    """Refuse a replay buffer that would be sent to an actor, which would write to a copy of it.

    Raises:
        TypeError: if it is not a client of a ``RayReplayBuffer``, or ``None``.
    """
    if isinstance(buffer, ReplayBuffer):
        raise TypeError(
            "replay_buffer of a collector in an actor must be the client() of a RayReplayBuffer, got a "
            f"{type(buffer).__name__}: "
            + (
                "give replay_buffer.client()."
                if isinstance(buffer, RayReplayBuffer)
                else "the actor would write to a copy of it, which nobody reads."
            )
        )


def own_storages(data: TensorDictBase) -> TensorDictBase:
    """Copy data so that no tensor is a view of a larger one.

    Ragged entries are views of one tensor, so a batch of ``n`` steps would be sent ``n`` times.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> data = TensorDict(a=torch.zeros(1000)[:2])
        >>> own_storages(data)["a"].untyped_storage().nbytes()
        8
    """
    copied: TensorDictBase = data.clone()
    return copied


def sendable(data: TensorDictBase) -> TensorDictBase:
    """In a Ray actor, whose results are sent, the data with :func:`own_storages`; else as it is."""
    return own_storages(data) if _in_actor() else data


def _in_actor() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None
