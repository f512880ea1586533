"""Opening a data set does no work per episode. How long it takes is not measured here."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter

import pytest
import torch

from torchrl_mt.datasets import EpisodeDataset, open_episodes

from .every_format import ALL, new_path

_watched: list[Counter] = []


def _count(event: str, _: tuple) -> None:
    if _watched and event in ("open", "os.listdir", "os.scandir"):
        _watched[-1][event] += 1


@pytest.fixture(scope="module", autouse=True)
def _audit():
    sys.addaudithook(_count)  # Python has no way to remove it.


def reads() -> tuple[int, int]:
    """System calls of this process that read, and the bytes they have read."""
    with open("/proc/self/io") as file:
        numbers = dict(line.split(": ") for line in file)
    return int(numbers["syscr"]), int(numbers["rchar"])


def opening(path) -> tuple[Counter, int, int]:
    """Files and folders that Python opens to open a data set; read calls; bytes read."""
    _watched.append(Counter())
    before = reads()
    EpisodeDataset(path).close()
    calls, size = (after - earlier for after, earlier in zip(reads(), before, strict=True))
    return _watched.pop(), calls, size


def write(path, format, number):
    with open_episodes(path, format=format) as out:
        for i in range(number):
            T = 1 + i % 3
            image = torch.full((T, 4, 4, 3), i, dtype=torch.uint8)
            out.write_episode({"image": image, "action": torch.arange(T)}, {"number": i})
    return path


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="Linux counts what is read")
@pytest.mark.parametrize("format", ALL)
def test_as_much_is_opened_and_read_for_many_episodes_as_for_few(format, tmp_path):
    few, many = (write(new_path(tmp_path, format, n), format, n) for n in (4, 24))
    EpisodeDataset(few).close()  # Imports what it needs.
    (opened_few, calls_few, size_few), (opened, calls, size) = map(opening, (few, many))
    assert opened == opened_few
    # Threads of a library may read meanwhile.
    assert calls < calls_few + 15
    if format != "jsonl":  # Where its lines begin is known from reading it.
        assert size - size_few < 20 * 64


@pytest.mark.parametrize("format", ["folder", "video"])
def test_folders_of_episodes_are_not_looked_at(format, tmp_path):
    path = write(tmp_path / "set", format, 5)
    for chunk in path.glob("data-*/chunk-*"):
        shutil.rmtree(chunk)
    dataset = EpisodeDataset(path)
    assert dataset.lengths.tolist() == [1, 2, 3, 1, 2]
    assert dataset.num_clips(2) == 4
    assert dataset.metadata(4) == {"number": 4}
