"""Clips per second from episodes on disk, through a ``DataLoader``: ours and others'.

This package, stable-worldmodel and TorchRL read the same episodes and the same clips, in turn, so
disturbances affect all. The files are in the page cache. The readers of stable-worldmodel are left out
where it is not installed. They import no more than this installs::

    pip install --no-deps stable-worldmodel==0.1.1 hdf5plugin lancedb loguru deprecation overrides

"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import Part, Row, medians, show
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, Sampler
from torchrl import torchrl_logger
from torchrl.data import LazyMemmapStorage, ReplayBuffer, SliceSampler

from torchrl_mt.datasets import ClipDataset, open_episodes

SLICE_LEN, CLIPS = 16, 64


def _without_environments() -> None:
    """Let stable-worldmodel's readers be imported without its environments."""
    if found := importlib.util.find_spec("stable_worldmodel"):
        package = types.ModuleType("stable_worldmodel")
        package.__path__ = list(found.submodule_search_locations or ())
        sys.modules["stable_worldmodel"] = package


_without_environments()


@dataclass(frozen=True)
class Data:
    """Episodes to write and read."""

    name: str
    number: int
    length: int
    pixels: bool
    batches: int
    """Batches of one measurement."""

    def episodes(self) -> Iterator[dict[str, np.ndarray]]:
        """Columns of each episode."""
        rng = np.random.default_rng(0)
        T = self.length
        for _ in range(self.number):
            if self.pixels:
                seen = {"pixels": rng.integers(0, 256, (T, 64, 64, 3), dtype=np.uint8)}
            else:
                seen = {"observation": rng.standard_normal((T, 17), dtype=np.float32)}
            yield {
                **seen,
                "action": rng.standard_normal((T, 6), dtype=np.float32),
                "reward": rng.standard_normal((T, 1), dtype=np.float32),
                "done": (np.arange(T) == T - 1)[:, None],
            }


def ted(episode: dict[str, np.ndarray]) -> dict[str, Any]:
    """An episode with reward and done flag where TorchRL has them."""
    following = {key: episode[key] for key in ("reward", "done")}
    return {key: value for key, value in episode.items() if key not in following} | {
        "next": following
    }


DATA = {
    "states": Data("states", 1000, 200, pixels=False, batches=50),
    "pixels": Data("pixels", 200, 100, pixels=True, batches=15),
}


# ---- the data sets, written ----------------------------------------------------------------------


def write_ours(data: Data, path: Path) -> Path:
    """Write with this package."""
    with open_episodes(path) as out:
        out.write_episodes(map(ted, data.episodes()))
    return path


def peer_module(name: str) -> Any:
    """Import a format of stable-worldmodel; ``ImportError`` if it is not installed."""
    return importlib.import_module(f"stable_worldmodel.data.formats.{name.lower()}")


def write_peer(data: Data, name: str, path: Path) -> Path:
    """Write with stable-worldmodel."""
    with getattr(peer_module(name), f"{name}Writer")(path) as out:
        out.write_episodes(
            {key: list(values) for key, values in episode.items()} for episode in data.episodes()
        )
    return path


def peer(name: str, path: Path, stride: int) -> Any:
    """The data set of stable-worldmodel."""
    kind = {"peer_hdf5": "HDF5", "peer_lance": "Lance"}[name]
    reader = getattr(peer_module(kind), f"{kind}Dataset")
    source = reader(path=path, num_steps=SLICE_LEN, frameskip=stride)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # The Lance reader sets another.
    return source


def write_torchrl(data: Data, folder: Path) -> ReplayBuffer:
    """Fill a memory-mapped buffer of TorchRL."""
    steps = data.number * data.length
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(steps, scratch_dir=folder),
        sampler=SliceSampler(slice_len=SLICE_LEN, end_key=("next", "done"), cache_values=True),
        batch_size=CLIPS * SLICE_LEN,
    )
    for episode in data.episodes():
        buffer.extend(TensorDict(ted(episode), [data.length]))
    return buffer


class MappedClips(Dataset):
    """The clips of a TorchRL storage, read at once as TorchRL's samplers do."""

    def __init__(self, buffer: ReplayBuffer, length: int, stride: int) -> None:
        self.steps, self.length, self.stride = buffer.storage[:], length, stride
        self.per_episode = length - SLICE_LEN * stride + 1

    def __len__(self) -> int:
        return len(self.steps) // self.length * self.per_episode

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """Read a batch."""
        wanted, steps, stride = torch.tensor(indices), self.steps, self.stride
        first = wanted // self.per_episode * self.length + wanted % self.per_episode
        rows = first[:, None] + torch.arange(SLICE_LEN * stride)
        if stride == 1:
            return steps[rows]
        joined = steps.select("action", "next")[rows].unflatten(1, (SLICE_LEN, stride))
        result = steps.exclude("action", "next")[rows[:, ::stride]]
        result["action"] = joined["action"].flatten(2)
        result["next", "reward"] = joined["next", "reward"].sum(2)
        result["next", "done"] = joined["next", "done"].any(2)
        return result


# ---- measuring -----------------------------------------------------------------------------------


class Shuffled(Sampler):
    """Batches of random clips, the same ones for every data set."""

    def __init__(self, clips: int, batches: int) -> None:
        self.clips, self.batches, self.epoch = clips, batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        for _ in range(self.batches):
            yield torch.randint(self.clips, (CLIPS,), generator=generator).tolist()


def as_read(batch: Any) -> Any:
    """Collate what was read at once."""
    return batch


class Written:
    """The data sets on disk, each written once, and the seconds that took."""

    def __init__(self, data: Data, folder: Path) -> None:
        self.data, self.paths, self.seconds = data, dict[str, Path](), dict[str, float]()
        self.buffer: Any = None
        for name, write in WRITERS.items():
            path, begin = folder / f"{data.name}_{name}", time.perf_counter()
            try:
                self.paths[name] = write(data, path)
            except ImportError as error:
                print(f"{name} is left out: {error}")
                continue
            self.seconds[name] = time.perf_counter() - begin
        begin = time.perf_counter()
        self.buffer = write_torchrl(data, folder / f"{data.name}_memmap")
        self.seconds["TorchRL memmap"] = time.perf_counter() - begin

    def readers(self, stride: int, workers: int) -> dict[str, Callable[[], None]]:
        """Return what is measured, by name."""
        found: dict[str, Callable[[], None]] = {}
        for name, path in self.paths.items():
            source: Any
            if name.startswith("peer"):
                source = peer(name, path, stride)
            else:
                source = ClipDataset(path, SLICE_LEN, stride=stride)
            found[name] = self._loader(name, source, workers)
        mapped = MappedClips(self.buffer, self.data.length, stride)
        found["memmap"] = self._loader("memmap", mapped, workers, collate_fn=as_read)
        if stride == 1 and not workers:
            found["sample"] = sampled(self.buffer, self.data)
        return found

    def _loader(self, name: str, source: Any, workers: int, **options: Any) -> Callable[[], None]:
        """A function that reads the batches of one measurement."""
        if workers:
            # Lance runs threads, which a forked process would lack.
            start = "spawn" if name.endswith("lance") else "fork"
            options |= {"multiprocessing_context": start, "persistent_workers": True}
        batches = Shuffled(len(source), self.data.batches)
        made = DataLoader(source, batch_sampler=batches, num_workers=workers, **options)

        def read() -> None:
            for _ in made:
                pass

        return read


def sampled(buffer: ReplayBuffer, data: Data) -> Callable[[], None]:
    """The same for a buffer."""

    def read() -> None:
        for _ in range(data.batches):
            buffer.sample()

    return read


def reading(args: argparse.Namespace) -> Iterable[Row]:
    """Clips per second, in brackets how many times as fast our reader is."""
    for data in args.data:
        written = args.written[data]
        for stride in args.strides:
            for workers in args.workers:
                readers = written.readers(stride, workers)
                seconds = dict(
                    zip(readers, medians("cpu", args.repeats, *readers.values()), strict=True)
                )
                del readers
                clips = {name: CLIPS * data.batches / each for name, each in seconds.items()}
                yield (
                    f"{data.name}, stride {stride}, num_workers={workers}",
                    *(cell(name, clips) for name in READ),
                )


def cell(name: str, clips: dict[str, float]) -> str:
    """A figure of the table, and ours divided by it."""
    if name not in clips:
        return " "
    ours = clips["lance" if name == "peer_lance" and "lance" in clips else "hdf5"]
    ratio = "" if name in OURS else f" ({ours / clips[name]:.1f}×)"
    return f"{clips[name]:,.0f}{ratio}"


def writing(args: argparse.Namespace) -> Iterable[Row]:
    """Episodes per second and bytes per step."""
    for data in args.data:
        written = args.written[data]
        rates = {name: data.number / each for name, each in written.seconds.items()}
        yield (
            f"{data.name}: episodes written per second",
            *(cell(name, rates) for name in READ[:-1]),
            " ",
        )
        sizes = {
            name: size(path) / data.number / data.length for name, path in written.paths.items()
        }
        yield (
            f"{data.name}: bytes per step",
            *(f"{sizes[name]:,.0f}" if name in sizes else " " for name in READ),
        )


def size(path: Path) -> int:
    """Bytes of a file or folder."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


WRITERS = {
    "hdf5": lambda data, path: write_ours(data, path.with_suffix(".h5")),
    "lance": lambda data, path: write_ours(data, path.with_suffix(".lance")),
    "folder": lambda data, path: write_ours(data, path),
    "peer_hdf5": lambda data, path: write_peer(data, "HDF5", path.with_suffix(".h5")),
    "peer_lance": lambda data, path: write_peer(data, "Lance", path.with_suffix(".lance")),
}
OURS = ("hdf5", "lance", "folder")
READ = (*WRITERS, "memmap", "sample")
HEADER = (
    " ", "hdf5", "lance", "folder", "stable-worldmodel HDF5", "its Lance", "TorchRL memmap",
    "its sample()",
)  # fmt: skip
PARTS = {
    "reading": Part(HEADER, (23, 11, 11, 11, 11, 11, 11, 11), reading),
    "writing": Part(HEADER, (23, 11, 11, 11, 11, 11, 11, 11), writing),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--repeats", type=int, default=7, help="turns; the median counts")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--formats", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--strides", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()
    for name in WRITERS.keys() - set(args.formats):
        del WRITERS[name]

    torchrl_logger.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        args.data = [DATA[name] for name in args.data]
        args.written = {data: Written(data, Path(folder)) for data in args.data}
        show([PARTS[name] for name in args.only], args, args.rst)


if __name__ == "__main__":
    main()
