"""Killed writers: every episode whose ``write_episode`` returned is readable, and no other."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes

from .every_format import ALL, new_path, process_context
from .numbered import check, check_numbered, numbered, write

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("format", ALL)]

KILLS = 8


def write_on(path, format, mode, first, acknowledged):
    """Write episodes until killed; say the number of each that was written."""
    with open_episodes(path, format=format, mode=mode) as out:
        number = first
        while True:
            out.write_episode(numbered(number), {"number": number})
            acknowledged.send_bytes(b"\n")
            number += 1


def killed_writer(path, format, mode, first, rng) -> int:
    """Kill a writer at a random moment; return how many episodes it said were written."""
    context = process_context(format)
    read, write = context.Pipe(duplex=False)
    writer = context.Process(target=write_on, args=(path, format, mode, first, write))
    writer.start()
    write.close()
    said = 0
    with contextlib.suppress(EOFError):
        if rng.random() < 0.9:
            read.recv_bytes()  # the first episode, before which most of the time passes
            said = 1
        time.sleep(rng.random() ** 2 * 0.1)
        os.kill(writer.pid, signal.SIGKILL)
        while True:
            read.recv_bytes()
            said += 1
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    read.close()
    return said


def readable(path) -> int:
    """How many episodes a data set has; 0 if it has none yet."""
    with contextlib.suppress(FileNotFoundError, DatasetError):
        return len(EpisodeDataset(path))
    return 0


def test_appended_episodes_survive(format, tmp_path):
    path, rng, written = new_path(tmp_path, format, "killed"), random.Random(0), 0
    for _ in range(KILLS):
        mode = "append" if path.exists() else "error"
        said = killed_writer(path, format, mode, written, rng)
        found = readable(path)
        # The kill may have come between the commit and what the writer said.
        assert written + said <= found <= written + said + 1
        written = found
        dataset = EpisodeDataset(path) if found else []
        for number in range(max(0, found - said - 2), found):
            check_numbered(dataset.episode(number), number, format)
            assert dataset.metadata(number) == {"number": number}
    assert written > KILLS
    check(write(path, format, [written]), range(written + 1))
    assert os.listdir(tmp_path) == [path.name]


def test_an_overwrite_that_was_killed_leaves_what_was_there(format, tmp_path):
    path, rng = new_path(tmp_path, format, "killed"), random.Random(1)
    write(path, format, [7])
    for _ in range(3):
        killed_writer(path, format, "overwrite", 100, rng)
        check(path, [7])
    check(write(path, format, [8, 9], "overwrite"), [8, 9])
    assert os.listdir(tmp_path) == [path.name]
