"""What is sent over Ray: each byte of its tensors once.

Ray pickles every tensor with its whole storage, so prompts that are views of one tensor would be sent
as many times as there are turns. Ray is never imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.data import RayReplayBuffer, ReplayBuffer
from torchrl.data.replay_buffers.ray_buffer import _RayReplayBufferClient

from torchrl_mt.compact_pickle import dumps, loads

__all__ = ["Sent", "check_sent_buffer", "for_buffer", "send_results_compactly"]


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


def for_buffer(data: TensorDictBase, buffer: Any) -> Any:
    """Data as the ``extend`` of a replay buffer should be given it."""
    client = buffer._client if isinstance(buffer, RayReplayBuffer) else buffer
    # TorchRL's other transport, "distributed", sends tensors one by one.
    return Sent(data) if isinstance(client, _RayReplayBufferClient) else data


class Sent:
    """Data that a Ray actor receives as it is, from a pickle with each byte of its tensors once."""

    def __init__(self, data: TensorDictBase) -> None:
        self._data = data

    def to(self, device: Any) -> Sent:
        """Move the data, as TorchRL does for an actor without a GPU."""
        return Sent(self._data.to(device))

    def __reduce__(self) -> Any:
        return loads, _dumps(self._data)


def send_results_compactly() -> None:
    """In a Ray actor, have TensorDicts sent with each byte of their tensors once; else do nothing."""
    global _sends_compactly
    if _sends_compactly or not _in_actor():
        return
    register = sys.modules["ray"].util.register_serializer
    for kind in (TensorDict, LazyStackedTensorDict):
        register(kind, serializer=_dumps, deserializer=_loads)
    _sends_compactly = True


_sends_compactly = False


def _dumps(data: TensorDictBase) -> Any:
    if data.is_memmap() or data.is_shared():
        data = data.clone(recurse=False)  # What arrives is neither.
    return dumps(data, sys.modules["ray"].cloudpickle.Pickler)


def _loads(dumped: Any) -> Any:
    return loads(*dumped)


def _in_actor() -> bool:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None
