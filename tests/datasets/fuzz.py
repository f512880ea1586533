"""A fuzzer of data sets on disk: damage of some kind, then what readers and writers make of it.

Whatever is done to a data set, each episode is read as it was written, or a ``DatasetError`` says that
it cannot be; writers may refuse it likewise; and nothing outside the data set changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes

from .every_format import new_path
from .numbered import check_numbered, numbered
from .numbered import write as write_numbered

COUNT = 5
REFUSED = (DatasetError, FileNotFoundError, PermissionError)
"""What readers may raise: the second only if the whole data set is gone."""


# ---- damage -----------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def flip(path: Path, rng: random.Random, _: Path) -> None:
    """Change a byte of a file, or some that follow each other (not over the end of a line)."""
    file = rng.choice(_files(path))
    data = bytearray(file.read_bytes())
    if data:
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
    if data and rng.random() < 0.2:
        at, size = rng.randrange(len(data)), rng.randrange(1, 64)
        if path.suffix != ".jsonl" or b"\n" not in data[at : at + size]:
            data[at : at + size] = rng.randbytes(len(data[at : at + size]))
    file.write_bytes(data)


def cut(path: Path, rng: random.Random, _: Path) -> None:
    """Cut a file, or append to it."""
    file = rng.choice(_files(path))
    data = file.read_bytes()
    file.write_bytes(
        data[: rng.randrange(len(data) + 1)]
        if rng.random() < 0.8
        else data + rng.randbytes(rng.randrange(1, 50))
    )


def remove(path: Path, rng: random.Random, _: Path) -> None:
    """Remove a file or folder of the data set."""
    each = rng.choice(sorted(path.rglob("*")) if path.is_dir() else [path])
    shutil.rmtree(each) if each.is_dir() else each.unlink()


def swap(path: Path, rng: random.Random, _: Path) -> None:
    """Put one file in the place of another."""
    files = _files(path)
    data = rng.choice(files).read_bytes()
    rng.choice(files).write_bytes(data)


def link(path: Path, rng: random.Random, canary: Path) -> None:
    """Put a link to the outside in the place of a file or folder of the data set."""
    inside = sorted(path.rglob("*")) if path.is_dir() else []
    if not inside:
        return
    each = rng.choice(inside)
    target = canary / ("folder" if each.is_dir() else "file")
    shutil.rmtree(each) if each.is_dir() else each.unlink()
    each.symlink_to(rng.choice([target, os.path.relpath(target, each.parent)]))


def pipe(path: Path, rng: random.Random, _: Path) -> None:
    """Put a pipe, which blocks who opens it, in the place of a file."""
    if path.is_dir():
        file = rng.choice(_files(path))
        file.unlink()
        os.mkfifo(file)


def header(path: Path, rng: random.Random, canary: Path) -> None:
    """Change what the header says: names of folders, versions, options, schema."""
    file = path / "DATASET"
    if not file.exists():
        flip(path, rng, canary)
        return
    data = json.loads(file.read_bytes())
    names = ["../canary", str(canary), "..", ".", "/", "", "data-x", "../canary/folder", None, 3]
    key, value = rng.choice(
        [
            *[("data", name) for name in names],
            *[("version", each) for each in (0, 1, 2, 3, "2", None, True)],
            *[("schema", each) for each in ({}, {"fields": []}, [], None)],
            *[("options", each) for each in ({}, {"fps": 0}, {"jpeg_quality": 90}, [], 1)],
            *[("format", each) for each in ("folder", "video", "arrow", "x", 1)],
            *[("episodes", each) for each in (0, 1, COUNT + 1, -1, "a")],
            ("crc32", rng.randrange(2**32)),
        ]
    )
    data[key] = value
    file.write_text(json.dumps(data))


DAMAGES: list[Callable[[Path, random.Random, Path], None]] = [
    *([flip] * 6),
    *([cut] * 2),
    remove,
    swap,
    link,
    pipe,
    header,
    header,
]


# ---- what is done with it -----------------------------------------------------------------------------


def read(path: Path, format: str, prefix: bool) -> str:
    """Read everything; return how it ended. ``prefix``: other episodes may be at its end, or none."""
    try:
        dataset = EpisodeDataset(path)
    except REFUSED as error:
        named = str(path) in str(error) or isinstance(error, FileNotFoundError)
        assert named, error  # noqa: PT017
        return "refused"
    wrong = 0
    assert len(dataset) == COUNT or prefix, f"{len(dataset)} episodes"
    for i in range(len(dataset)):
        for get, check in (
            (dataset.episode, lambda got, i=i: check_numbered(got, i, format)),
            (dataset.metadata, lambda got, i=i: _equal(got, {"number": i})),
        ):
            try:
                got = get(i)
            except DatasetError as error:
                assert str(path) in str(error), error  # noqa: PT017
                wrong += 1
            else:
                check(got)
    dataset.close()
    return "some unreadable" if wrong else "as written"


def _equal(got: Any, expected: Any) -> None:
    assert got == expected, (got, expected)


def write(path: Path, format: str, mode: str) -> str:
    """Append or overwrite; return how it ended."""
    try:
        with open_episodes(path, format=format, mode=mode) as out:
            out.write_episode(numbered(COUNT), {"number": COUNT})
    except (ValueError, OSError):
        return f"{mode} refused"
    if mode == "overwrite":
        dataset = EpisodeDataset(path)
        assert len(dataset) == 1
        check_numbered(dataset.episode(0), COUNT, format)
    return f"{mode} done"


def tree(folder: Path) -> str:
    """A hash of all names, links, contents and times in a folder."""
    found = hashlib.sha256()
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *names]):
            file = Path(root, name)
            about = file.lstat()
            found.update(repr((str(file), about.st_mode, about.st_mtime_ns)).encode())
            if file.is_symlink():
                found.update(os.readlink(file).encode())
            elif file.is_file():
                found.update(file.read_bytes())
    return found.hexdigest()


class Fuzzer:
    """Damages copies of a data set of each format.

    Args:
        folder: an empty folder to work in.
        formats: those to try.
    """

    def __init__(self, folder: Path, formats: list[str]) -> None:
        self.folder, self.formats = folder, formats
        self.canary = folder / "canary"
        (self.canary / "folder" / "deep").mkdir(parents=True)
        for name in ("file", "folder/episodes.index", "folder/deep/action.npy"):
            (self.canary / name).write_bytes(name.encode() * 20)
        self.before = tree(self.canary)
        self.counts: Counter[tuple[str, str]] = Counter()
        for format in formats:
            write_numbered(new_path(folder / "whole", format, 0), format, range(COUNT))

    def try_one(self, seed: int) -> None:
        """Damage one data set, read it, and write to it."""
        rng = random.Random(seed)
        format = rng.choice(self.formats)
        place = self.folder / f"set-{seed}"
        place.mkdir()
        source = new_path(self.folder / "whole", format, 0)
        path = place / source.name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, path)
        (place / "beside").write_text("not ours")
        damage = rng.choice(DAMAGES)
        damage(path, rng, self.canary)
        prefix = format == "jsonl" and damage is not flip
        try:
            self.counts[format, read(path, format, prefix)] += 1
            if rng.random() < 0.4:
                self.counts[format, write(path, format, rng.choice(["append", "overwrite"]))] += 1
            assert tree(self.canary) == self.before, "the outside has changed"
            assert (place / "beside").read_text() == "not ours"
            assert {*os.listdir(place)} <= {path.name, "beside"}, os.listdir(place)
        except BaseException as error:
            error.add_note(f"seed {seed}: {damage.__name__} of {format}")
            raise
        shutil.rmtree(place)
