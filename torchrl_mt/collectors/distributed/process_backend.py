"""Workers that are processes of this machine. None is left when the collector's process is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_mt.collectors.distributed.backend import Handle, WorkerDied
from torchrl_mt.collectors.distributed.weights import PackedWeights, SharedWeights
from torchrl_mt.collectors.distributed.worker import EpisodeWorker
from torchrl_mt.collectors.event_loop.host import Host
from torchrl_mt.processes import WorkerProcess, preload

__all__ = ["ProcessBackend"]

preload(__name__)


class ProcessBackend:
    """Starts processes, which import the main module anew.

    Args:
        setup: arguments of the workers, pickled one by one.
    """

    def __init__(self, setup: Mapping[str, bytes]) -> None:
        self._setup = dict(setup)

    def start(self, index: int, seed: int) -> Handle:
        """Start a process. It may have processes of its own, such as those of ``env_workers``."""
        args = (EpisodeWorker.of, self._setup, index, seed)
        name = f"torchrl_mt-collector-{index}"
        return WorkerProcess(Host, args, name, WorkerDied, with_main=True)

    def put(self, value: Any) -> Any:
        """Put weights into shared memory."""
        return SharedWeights(value) if isinstance(value, PackedWeights) else value

    def close(self) -> None:
        """Do nothing: the processes have ended."""
