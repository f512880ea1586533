"""Processes that are the ranks of one gloo group, for tests of several ranks.

A test module calls :func:`play` in its own process and :func:`take_part` under ``__main__``.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.waiting import wait_until

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()), reason="needs gloo"
)


class KilledError(AssertionError):
    """A signal has ended a rank, so no line of Python has."""


def play(module: str, folder: Path, ranks: int = 2) -> list[Any]:
    """Run a module as each rank; return what their :func:`take_part` saved."""
    try:
        return _play(module, folder, ranks)
    except KilledError:
        # One run in about sixty of torch 2.13 with gloo ended with a corrupt heap (SIGABRT).
        (folder / "again").mkdir()
        return _play(module, folder / "again", ranks)


def _play(module: str, folder: Path, ranks: int) -> list[Any]:
    program = [sys.executable, "-m", module]
    workers = [
        subprocess.Popen([*program, str(rank), str(ranks), str(folder)]) for rank in range(ranks)
    ]
    found = [folder / f"{rank}.pt" for rank in range(ranks)]

    def all_done() -> bool:
        codes = [worker.poll() for worker in workers]
        if any(code is not None and code < 0 for code in codes):
            raise KilledError(f"a rank was ended by a signal: {codes}")
        assert codes == [None] * ranks, "a rank failed"
        return all(path.exists() for path in found)

    try:
        wait_until(all_done)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [torch.load(path, weights_only=False) for path in found]


def take_part(work: Callable[[int], Any]) -> None:
    """Join the other ranks, call ``work(rank)`` and save its result for :func:`play`."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks
    )
    torch.save(work(rank), folder / f"{rank}.part")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pt")
    # Whoever leaves first may take from the others what they still read, so nobody leaves by itself.
    threading.Event().wait()
