"""A writer says so if ids are numbered anew, and only then."""

import logging
import random
from itertools import count, islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import InitTracker, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import CountingEnv

from tests.buffers import buffer_of
from tests.tiers import examples

SAID = "lacks its beginning"


def buffer(max_steps=10_000, **kwargs):
    return buffer_of(max_steps, **kwargs)


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

    def __init__(self, number, seed, is_init=False, *, cells=1_000_000):
        draw, ids = random.Random(seed), count(1)
        self.rows = [self.play(draw, ids, is_init, cells) for _ in range(number)]

    def play(self, draw, ids, is_init, cells):
        """The steps of one environment, without end."""
        for episode in ids:
            seen, length = 0, draw.randint(1, 9)
            for at in range(length):
                after, done = draw.randrange(cells), torch.tensor([at + 1 == length])
                following = {"observation": torch.tensor([after]), "done": done}
                step = {
                    "observation": torch.tensor([seen]),
                    "at": torch.tensor([at]),
                    "collector": {"traj_ids": torch.tensor(episode)},
                    "next": {**following, "truncated": torch.zeros_like(done)},
                }
                yield TensorDict(step | ({"is_init": torch.tensor([at == 0])} if is_init else {}))
                seen = after

    def batch(self, length):
        return torch.stack([torch.stack(list(islice(row, length))) for row in self.rows])


def renumbered(batch):
    """The ids of each row begin after the largest one of the row before."""
    largest = -1
    for ids in batch["collector", "traj_ids"]:
        ids += largest + 1
        largest = int(ids.max())
    return batch


@pytest.mark.parametrize("is_init", [False, True])
@given(
    number=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    cells=st.sampled_from([1, 2, 1_000_000]),
)
@examples(30)
def test_ids_that_stay_are_no_reason_to_warn(is_init, number, lengths, seed, cells):
    envs, rb = Envs(number, seed, is_init, cells=cells), buffer()
    with Said() as said:
        for length in lengths:
            rb.extend(envs.batch(length))
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
    envs, rb = Envs(number, seed, is_init), buffer()
    with Said() as said:
        for length in lengths:
            rb.extend(renumbered(envs.batch(length)))
    lost = sum(int(episode["at"][0]) > 0 for episode in rb.storage.episodes())
    assert len(said.texts) <= 1
    if lost:
        assert "split_trajs=False" in said.texts[0]


def test_done_flags_alone_are_no_ids(caplog):
    envs, rb = Envs(2, 0), buffer()
    for _ in range(4):
        rb.extend(envs.batch(5).exclude("collector"))
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
    rb = buffer(100, batch_size=4)
    for episode, t in product(range(3), range(5)):
        seen = torch.tensor([[[10.0 * episode + t]], [[100.0 + 10 * episode + t]]])
        done = torch.full((2, 1, 1), t == 4)
        after = {"observation": seen + 1, "odd": torch.rand(2, 1, 1), "reward": seen, "done": done}
        data = {"observation": seen, "odd": seen - 7, "next": after}
        if with_ids:
            data["collector"] = {"traj_ids": torch.tensor([[2 * episode], [2 * episode + 1]])}
        rb.extend(TensorDict(data, [2, 1]))
    assert rb.storage.lengths.tolist() == [5] * 6
    assert not rb.writer.open_episodes
