"""Process groups of a trainer, as rank 0, and the processes of one server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_mt._hosts.torch import join_process_group
from torchrl_mt.checks import import_extra

__all__ = ["Group", "described", "free_port", "open_torch_group", "open_vllm_group"]

_POLL = 0.0005
"""Seconds between two looks at a tensor that is being sent."""


class Group:
    """Broadcasts tensors from rank 0.

    Args:
        start: starts to broadcast a tensor that is on the right device; returns what tells whether it
            is sent.
        on_gpu: whether tensors must be on the current GPU.
    """

    def __init__(self, start: Callable[[Tensor], Callable[[], bool]], *, on_gpu: bool) -> None:
        self._start = start
        self._on_gpu = on_gpu

    def send(self, tensors: Iterable[Tensor], received: Future[Any]) -> None:
        """Broadcast tensors to a server that was asked to receive them.

        Args:
            tensors: in the order in which the server receives them.
            received: done when the server has received all, or refuses to: then nobody would receive.

        Raises:
            Exception: that of ``received``. The group is of no use afterwards.
        """
        for tensor in tensors:
            sent = tensor.cuda() if self._on_gpu else tensor.cpu()
            is_sent = self._start(sent)
            while not is_sent():
                if received.done():
                    received.result()
                time.sleep(_POLL)
        received.result()


def described(weights: Mapping[str, Tensor], dtypes: str) -> dict[str, Any]:
    """What a server must know to receive weights; ``dtypes`` is its word for their dtypes."""
    names = [str(value.dtype).removeprefix("torch.") for value in weights.values()]
    shapes = [list(value.shape) for value in weights.values()]
    return {"names": list(weights), dtypes: names, "shapes": shapes}


def free_port(address: str) -> int:
    """Find a free port of this machine."""
    with socket.create_server((address, 0)) as found:
        port: int = found.getsockname()[1]
        return port


def open_torch_group(
    master_address: str, master_port: int, world_size: int, backend: str, group_name: str
) -> Group:
    """Open a group with SGLang's processes, beside the default process group."""
    group = join_process_group(
        f"tcp://{master_address}:{master_port}",
        rank=0,
        world_size=world_size,
        backend=backend,
        group_name=group_name,
    )

    def start(tensor: Tensor) -> Callable[[], bool]:
        work: Any = dist.broadcast(tensor, 0, group=group, async_op=True)
        return lambda: work.is_completed() and bool(work.wait())

    return Group(start, on_gpu=backend == "nccl")


def open_vllm_group(master_address: str, master_port: int, world_size: int) -> Group:
    """Open a group with vLLM's processes, by vLLM's own communicator."""
    utils = import_extra("vllm.distributed.utils", "vllm")
    pynccl = import_extra("vllm.distributed.device_communicators.pynccl", "vllm")
    store = utils.StatelessProcessGroup.create(
        host=master_address, port=master_port, rank=0, world_size=world_size
    )
    group: Any = pynccl.PyNcclCommunicator(store, device=torch.cuda.current_device())

    def start(tensor: Tensor) -> Callable[[], bool]:
        group.broadcast(tensor, src=0)
        event = torch.cuda.Event()
        event.record()
        return lambda: bool(event.query())

    return Group(start, on_gpu=True)
