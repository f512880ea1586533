"""A writer says so if ids are numbered anew, and only then."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import MultiSyncCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import InitTracker, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import CountingEnv

from tests.tiers import examples
from torchrl_mt.data import EpisodeStorage, EpisodeWriter

SAID = "lacks its beginning"


def buffer():
    return ReplayBuffer(storage=EpisodeStorage(10_000), writer=EpisodeWriter())


class Said(logging.Handler):
    """The warnings inside a ``with`` block."""

    def __enter__(self):
        self.texts = []
        logging.getLogger("torchrl_mt").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("torchrl_mt").removeHandler(self)

    def emit(self, record):
        if SAID in record.getMessage():
            self.texts.append(record.getMessage())


class Envs:
    """Environments whose steps come in batches, as a collector's do."""

    def __init__(self, number, seed, *, cells=1_000_000):
        self.generator = torch.Generator().manual_seed(seed)
        self.cells = cells
        self.number, self.episodes = number, 0
        self.now = [self.reset() for _ in range(number)]

    def draw(self, stop):
        return int(torch.randint(stop, (), generator=self.generator))

    def reset(self):
        self.episodes += 1
        return {"id": self.episodes, "seen": 0, "length": 1 + self.draw(9), "at": 0}

    def step(self, i):
        env = self.now[i]
        after = self.draw(self.cells)
        done = env["at"] + 1 == env["length"]
        step = {
            "id": env["id"],
            "at": env["at"],
            "is_init": env["at"] == 0,
            "seen": env["seen"],
            "after": after,
            "done": done,
        }
        self.now[i] = self.reset() if done else {**env, "seen": after, "at": env["at"] + 1}
        return step

    def batch(self, length):
        return [[self.step(i) for _ in range(length)] for i in range(self.number)]


def renumbered(rows):
    """The ids of each row begin after the largest one of the row before."""
    largest, out = -1, []
    for row in rows:
        ids = [step["id"] + largest + 1 for step in row]
        out.append([{**step, "id": i} for step, i in zip(row, ids, strict=True)])
        largest = max(ids)
    return out


def steps(rows, is_init):
    flat = [step for row in rows for step in row]
    done = torch.tensor([[step["done"]] for step in flat])
    data = {
        "observation": torch.tensor([[step["seen"]] for step in flat]),
        "at": torch.tensor([[step["at"]] for step in flat]),
        "collector": {"traj_ids": torch.tensor([step["id"] for step in flat])},
        "next": {
            "observation": torch.tensor([[step["after"]] for step in flat]),
            "done": done,
            "truncated": torch.zeros_like(done),
        },
    }
    if is_init:
        data["is_init"] = torch.tensor([[step["is_init"]] for step in flat])
    return TensorDict(data, [len(flat)]).reshape(len(rows), -1)


@pytest.mark.parametrize("is_init", [False, True])
@given(
    number=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    cells=st.sampled_from([1, 2, 1_000_000]),
)
@examples(30)
def test_ids_that_stay_are_no_reason_to_warn(is_init, number, lengths, seed, cells):
    envs, rb = Envs(number, seed, cells=cells), buffer()
    with Said() as said:
        for length in lengths:
            rb.extend(steps(envs.batch(length), is_init))
    assert not said.texts
    assert all(int(episode["at"][0]) == 0 for episode in rb.storage.episodes())


@pytest.mark.parametrize("is_init", [False, True])
@given(
    number=st.integers(2, 4),
    lengths=st.lists(st.integers(3, 12), min_size=6, max_size=12),
    seed=st.integers(0, 2**31),
)
@examples(30)
def test_episodes_that_lose_their_beginning_to_new_ids_are_said(is_init, number, lengths, seed):
    envs, rb = Envs(number, seed), buffer()
    with Said() as said:
        for length in lengths:
            rb.extend(steps(renumbered(envs.batch(length)), is_init))
    lost = sum(int(episode["at"][0]) > 0 for episode in rb.storage.episodes())
    assert len(said.texts) <= 1
    if lost:
        assert "split_trajs=False" in said.texts[0]


def test_done_flags_alone_are_no_ids(caplog):
    envs, rb = Envs(2, 0), buffer()
    for _ in range(4):
        rb.extend(steps(renumbered(envs.batch(5)), False).exclude("collector"))
    assert SAID not in caplog.text


def counting():
    return TransformedEnv(CountingEnv(max_steps=7), StepCounter()).append_transform(InitTracker())


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_torchrls_multi_sync_collector(split, caplog):
    rb = buffer()
    collector = MultiSyncCollector(
        [counting] * 2, None, frames_per_batch=20, total_frames=240, split_trajs=split
    )
    try:
        for data in collector:
            rb.extend(data)
    finally:
        collector.shutdown()
    lost = sum(int(episode["step_count"][0]) > 0 for episode in rb.storage.episodes())
    assert (lost > 0) == (SAID in caplog.text) == split


@pytest.mark.parametrize("with_ids", [False, True])
def test_single_steps_with_an_entry_that_never_agrees_are_whole_episodes(with_ids):
    rb = ReplayBuffer(storage=EpisodeStorage(100), writer=EpisodeWriter(), batch_size=4)
    for episode, t in itertools.product(range(3), range(5)):
        seen = torch.tensor([[[10.0 * episode + t]], [[100.0 + 10 * episode + t]]])
        done = torch.full((2, 1, 1), t == 4)
        after = {"observation": seen + 1, "odd": torch.rand(2, 1, 1), "reward": seen, "done": done}
        data = {"observation": seen, "odd": seen - 7, "next": after}
        if with_ids:
            data["collector"] = {"traj_ids": torch.tensor([[2 * episode], [2 * episode + 1]])}
        rb.extend(TensorDict(data, [2, 1]))
    assert rb.storage.lengths.tolist() == [5] * 6
    assert not rb.writer.open_episodes
