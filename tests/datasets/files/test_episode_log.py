"""Formats with large files and a log: what is in both, at every moment.

The moments are lines of private modules: a kill may come between any two of them.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from importlib import import_module

import pytest

from tests.datasets.every_format import new_path
from tests.datasets.numbered import check, check_numbered, numbered, write
from tests.tiers import few_or_many
from torchrl_mt.bridges.lance import format as lance
from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes
from torchrl_mt.datasets._encoding import arrow_columns
from torchrl_mt.datasets._files import episode_folder, episode_log, write_lock
from torchrl_mt.datasets.formats import arrow

pytestmark = pytest.mark.parametrize("format", ["arrow", "lance"])

NAMES = ("metadata", "crc32", "index")
OURS = {
    module.__file__
    for module in (arrow, arrow_columns, episode_folder, episode_log, lance, write_lock)
}


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Large files of two episodes."""
    monkeypatch.setattr(episode_log.LoggedWriter, "fold_episodes", 2)


def files_of(folder):
    """What a kill at this moment would leave: names, sizes and times of all files."""
    found = []
    for root, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            about = os.lstat(os.path.join(root, name))
            size = (about.st_size, about.st_mtime_ns) if name in names else None
            found.append((root, name, size))
    return sorted(found, key=lambda each: each[:2])


def moments(folder, copies, run):
    """Run ``run(say)``; return the folder, and how much was said, at each line that changes files."""
    seen, said = [], []
    last = None

    def trace(frame, event, argument):
        nonlocal last
        if frame.f_code.co_filename not in OURS:
            return None
        files = files_of(folder)
        if files != last:
            last = files
            shutil.copytree(folder, copies / str(len(seen)))
            seen.append((copies / str(len(seen)), len(said)))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(said.append)
    finally:
        sys.settrace(before)
    return seen


def some(items, number):
    """At most ``number`` of the items, evenly."""
    return items[:: max(1, -(-len(items) // number))]


@few_or_many(3, 250)
def test_whatever_is_written_last_each_episode_is_there_once(format, examples, tmp_path):
    (tmp_path / "data").mkdir()
    path = new_path(tmp_path / "data", format, "x")

    def run(say):
        for numbers in ([0, 1, 2, 3, 4], [5, 6]):
            with open_episodes(path, format=format, mode="append") as out:
                for number in numbers:
                    out.write_episode(numbered(number), {"number": number})
                    say(number)

    states = moments(tmp_path / "data", tmp_path / "copies", run)
    assert len(states) > 25
    for copy, said in some(states, examples):
        killed = copy / path.name
        found = len(EpisodeDataset(killed)) if killed.exists() else 0
        assert said <= found <= said + 1
        if found:
            check(killed, range(found))
        write(killed, format, [found, found + 1])
        check(killed, range(found + 2))
        assert os.listdir(copy) == [path.name]
        assert not [name for _, name, _ in files_of(copy) if "recent" in name or "unfin" in name]


@few_or_many(3, 250)
def test_an_overwrite_is_seen_at_once(format, examples, tmp_path):
    (tmp_path / "data").mkdir()
    path = new_path(tmp_path / "data", format, "x")
    write(path, format, [7, 8])

    def run(say):
        write(path, format, range(5), "overwrite")

    shown = []
    for copy, _ in some(moments(tmp_path / "data", tmp_path / "copies", run), examples):
        shown.append(len(EpisodeDataset(copy / path.name)))
        found = [7, 8] if shown[-1] == 2 else [*range(5)]
        check(copy / path.name, found)
        check(write(copy / path.name, format, [9]), [*found, 9])
    assert shown == sorted(shown)
    check(path, range(5))
    assert os.listdir(tmp_path / "data") == [path.name]


def large_files(path, format):
    """The large files of a data set, in the order of their episodes."""
    if format == "arrow":
        return sorted(path.glob("*/*.parquet"))
    fragments = import_module("lance").dataset(path).get_fragments()
    return [path / "data" / each.data_files()[0].path for each in fragments]


def test_files_hold_many_episodes_and_small_ones_are_joined(format, tmp_path, monkeypatch):
    path = new_path(tmp_path, format, "x")
    monkeypatch.setattr(episode_log.LoggedWriter, "fold_episodes", 5)
    write(path, format, range(12))
    assert len(large_files(path, format)) == 3
    for number in range(12, 24):
        write(path, format, [number])
    assert len(large_files(path, format)) < 9
    check(path, range(24))


def test_a_dataset_that_is_open_stays_readable_while_a_writer_goes_on(format, tmp_path):
    path = new_path(tmp_path, format, "x")
    opened = []
    with open_episodes(path, format=format) as out:
        for number in range(5):
            out.write_episode(numbered(number), {"number": number})
            opened.append(EpisodeDataset(path))
    for number in range(5, 15):
        write(path, format, [number])
    for i, dataset in enumerate(opened):
        assert len(dataset) == i + 1
        for number in range(i + 1):
            check_numbered(dataset.episode(number), number, format)
    before = EpisodeDataset(path)
    write(path, format, [30], "overwrite")
    with pytest.raises(DatasetError, match="was replaced since it was opened: open it again"):
        before.episode(0)


DAMAGES = {
    "truncated": lambda content: content[:-20],
    "beginning": lambda content: content[:100],
    "text": lambda content: b"no data",
    "zeros": lambda text: text[:8] + bytes(len(text) // 2) + text[8 + len(text) // 2 :],
    "deleted": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_other_episodes_of_a_damaged_file_are_readable(format, damage, tmp_path):
    path = new_path(tmp_path, format, "x")
    for first in (0, 2, 4):
        write(path, format, [first, first + 1])
    file = large_files(path, format)[1]
    content = file.read_bytes()
    file.unlink() if damage == "deleted" else file.write_bytes(DAMAGES[damage](content))
    dataset = EpisodeDataset(path)
    named = "" if format == "lance" else file.name if damage != "deleted" else "lacks the file"
    for i in range(6):
        if i in (2, 3):
            with pytest.raises(DatasetError, match=rf"(?s)episode {i} of .*{named}"):
                dataset.episode(i)
        else:
            check_numbered(dataset.episode(i), i, format)
    assert len(list(dataset.episodes(skip_unreadable=True))) == 4


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_episode_that_cannot_be_written_leaves_nothing(format, failing, tmp_path, monkeypatch):
    path = new_path(tmp_path, format, "x")

    class FullDisk(io.FileIO):
        writes = None

        def write(self, data):
            if FullDisk.writes is not None:
                FullDisk.writes -= 1
                if not FullDisk.writes:
                    super().write(data[: len(data) // 2])
                    raise OSError(28, "No space left on device")
            return super().write(data)

    def open_files(self):
        self._files = [FullDisk(self.data / f"episodes.{name}", "a") for name in NAMES]

    monkeypatch.setattr(episode_log.io, "FileIO", FullDisk)
    monkeypatch.setattr(episode_folder.EpisodeFolder, "_open", open_files)
    with open_episodes(path, format=format) as out:
        out.write_episode(numbered(0), {"number": 0})
        FullDisk.writes = failing  # the log, the metadata, the record
        with pytest.raises(OSError, match="No space"):
            out.write_episode(numbered(9), {"number": 9})
        FullDisk.writes = None
        check(path, [0])
        for number in (1, 2, 3):
            out.write_episode(numbered(number), {"number": number})
    check(path, range(4))
