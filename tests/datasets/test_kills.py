"""Killed writers: every episode whose ``write_episode`` returned is readable, and no other."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
import torch
from tensordict import TensorDict

from torchrl_mt.datasets import DatasetError, EpisodeDataset, open_episodes

from .episodes import assert_same
from .every_format import ALL, LOSSLESS, new_path, process_context

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("format", ALL)]

KILLS = 15


def episode(number: int, format: str) -> TensorDict:
    """An episode that is told by its number."""
    generator = torch.Generator().manual_seed(number)
    T = 1 + number % 7
    observation = torch.randn(T + 1, 3, generator=generator)
    data = TensorDict(
        {
            "number": torch.full((T,), number),
            "observation": observation[:-1],
            "next": {"observation": observation[1:], "done": torch.arange(T) == T - 1},
        },
        [T],
    )
    if format in ("folder", "video"):
        data["image"] = torch.randint(0, 256, (T, 8, 8, 3), dtype=torch.uint8, generator=generator)
    data["text"] = [f"step {t} of {number}" for t in range(T)]
    return data


def write_on(path, format, mode, first, acknowledged):
    """Write episodes until killed; say the number of each that was written."""
    with open_episodes(path, format=format, mode=mode) as out:
        number = first
        while True:
            out.write_episode(episode(number, format), {"number": number})
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
            got = dataset.episode(number)
            assert got["number"].unique().tolist() == [number]
            assert dataset.metadata(number) == {"number": number}
            if format in LOSSLESS:
                assert_same(got, episode(number, format))
    assert written > KILLS
    with open_episodes(path, format=format, mode="append") as out:
        out.write_episode(episode(written, format), {"number": written})
    dataset = EpisodeDataset(path)
    assert [dataset.metadata(i)["number"] for i in range(len(dataset))] == [*range(written + 1)]
    for i in range(len(dataset)):
        if format in LOSSLESS:
            assert_same(dataset.episode(i), episode(i, format))
    assert os.listdir(tmp_path) == [path.name]


def test_an_overwrite_that_was_killed_leaves_what_was_there(format, tmp_path):
    path, rng = new_path(tmp_path, format, "killed"), random.Random(1)
    with open_episodes(path, format=format) as out:
        out.write_episode(episode(7, format))
    for _ in range(5):
        killed_writer(path, format, "overwrite", 100, rng)
        dataset = EpisodeDataset(path)
        assert len(dataset) == 1
        if format in LOSSLESS:
            assert_same(dataset.episode(0), episode(7, format))
    with open_episodes(path, format=format, mode="overwrite") as out:
        out.write_episode(episode(8, format))
        out.write_episode(episode(9, format))
    dataset = EpisodeDataset(path)
    assert [dataset.episode(i)["number"][0].item() for i in range(len(dataset))] == [8, 9]
    assert os.listdir(tmp_path) == [path.name]
