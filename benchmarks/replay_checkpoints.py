"""Cost of saving a large buffer: memory, disk and time, beside TorchRL's memory-mapped storage.

Both hold the same steps in files of a scratch folder. Each contender has its own process. Memory is the
additional anonymous memory, which excludes mapped files. Our time includes flushing to disk; TorchRL
does not flush.

    OMP_NUM_THREADS=1 python benchmarks/replay_checkpoints.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torchrl import torchrl_logger
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from torchrl_mt.data import EpisodeStorage, EpisodeWriter

CHUNK = 500
"""Number of episodes written at a time."""


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and the additional anonymous memory in bytes."""
    before, most, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    begin = time.perf_counter()
    try:
        work()
        seconds = time.perf_counter() - begin
    finally:
        done.set()
        watching.join()
    return seconds, max(most - before, 0)


def on_disk(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def buffer(name: str, steps: int, scratch: Path) -> TensorDictReplayBuffer:
    """An empty buffer that holds tensors in files."""
    if name == "torchrl_mt":
        storage = EpisodeStorage(steps, scratch_dir=scratch)
        return TensorDictReplayBuffer(storage=storage, writer=EpisodeWriter())
    return TensorDictReplayBuffer(storage=LazyMemmapStorage(steps, scratch_dir=scratch))


def contend(name: str, steps: int, folder: Path) -> None:
    """Save and load, and print the cost."""
    from replay import chunks, episodes

    torch.manual_seed(0)
    rb = buffer(name, steps, folder / "scratch")
    for lengths in chunks(steps, 50, 400, CHUNK * 225):
        rb.extend(
            episodes(lengths)[: steps - len(rb)] if name != "torchrl_mt" else episodes(lengths)
        )
    saved = folder / "saved"
    saving = measured(lambda: rb.dumps(saved))
    expected = rb[len(rb) - 1]["observation"]
    other = buffer(name, steps, folder / "other")
    if name != "torchrl_mt":
        other.extend(episodes(torch.tensor([9])))  # It must know its keys.
    loading = measured(lambda: other.loads(saved))
    assert torch.equal(other[len(other) - 1]["observation"], expected)
    result = {"saving": saving, "loading": loading, "disk": on_disk(saved), "steps": len(rb)}
    if name == "torchrl_mt":
        result["stored"] = rb.storage.nbytes
        result["mapping"] = measured(lambda: EpisodeStorage.load_memmap(saved)[-1])
    else:
        values = rb.storage._storage.values(True, True)
        result["stored"] = sum(value.numel() * value.element_size() for value in values)
    print(json.dumps(result))


def checkpoints(steps: int) -> None:
    """Run each contender in its own process and print the table."""
    header = ("stored", "on disk", "save", "memory", "load", "memory", "map", "memory")
    print(f"saving {steps:,} steps; megabytes and seconds")
    print(f"{'':<12}" + "".join(f"{name:>10}" for name in header))
    for name in ("torchrl_mt", "TorchRL"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--steps", str(steps), "--contender", name, folder]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result = json.loads(out.splitlines()[-1])
        cells = [result["stored"] / 1e6, result["disk"] / 1e6]
        for seconds, memory in (
            result.get(key) for key in ("saving", "loading", "mapping") if key in result
        ):
            cells += [seconds, memory / 1e6]
        print(f"{name:<12}" + "".join(f"{cell:>10,.1f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=7_500_000, help="750 MB where rows are shared")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torchrl_logger.setLevel("WARNING")
    if args.contender is None:
        checkpoints(args.steps)
    else:
        contend(args.contender, args.steps, args.folder)


if __name__ == "__main__":
    main()
