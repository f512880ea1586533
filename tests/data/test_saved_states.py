"""Saved states are plain data, and those of earlier releases load."""

import shutil

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data import earlier
from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage
from torchrl_mt.datasets import RunCheckpoint

SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "epoch": lambda: EpisodeSampler(replacement=False),
    "groups": lambda: EpisodeSampler(replacement=False, group_key="episode", max_sample_count=2),
}


def check(make, rb):
    """The buffer holds what the earlier release saved."""
    told = [earlier.turns(*episode) for episode in earlier.EPISODES]
    for got, expected in zip(rb.storage.episodes(), told, strict=True):
        assert make.steps(got) == make.steps(expected)
    assert rb.storage.growing_keys
    assert rb.storage.shared_keys == [("next", "observation")]
    (left_open,) = rb.writer.open_episodes.values()
    assert make.steps(left_open) == make.steps(earlier.turns(*earlier.OPEN, whole=False))
    again = earlier.filled()
    for each in (rb, again):
        each.set_rng(torch.Generator().manual_seed(1))
    assert make.steps(rb.sample()) == make.steps(again.sample())
    length, episode = earlier.OPEN
    end = earlier.turns(length + 1, episode)[length:]
    assert len(rb.extend(end)[0:0]) == 0
    assert make.steps(rb.storage.episode(-1)) == make.steps(earlier.turns(length + 1, episode))


@pytest.fixture
def saved(tmp_path):
    """The folder with the states of release 0.1.0."""
    shutil.unpack_archive(earlier.STATES, tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", ["dumps", "state_dict", "run"])
def test_the_buffer_of_an_earlier_release_is_loaded(make, saved, how):
    rb = earlier.empty()
    if how == "dumps":
        rb.loads(saved / "buffer", trust=True)
    elif how == "state_dict":
        rb.load_state_dict(torch.load(saved / "buffer.pt", weights_only=False))
    else:
        run = RunCheckpoint(saved / "run")
        assert run.restore(buffer=rb, **earlier.curricula(), trust=True) == 7
    check(make, rb)


def test_the_files_of_an_earlier_release_are_mapped(make, saved):
    storage = EpisodeStorage.load_memmap(saved / "buffer", trust=True)
    assert make.steps(storage.episode(1)) == make.steps(earlier.turns(*earlier.EPISODES[1]))


def test_curricula_of_an_earlier_release_are_loaded(saved):
    states = torch.load(saved / "curricula.pt", weights_only=False)
    for name, curriculum in earlier.curricula().items():
        curriculum.load_state_dict(states[name])
        same = earlier.curricula()[name]
        for _ in range(3):
            same.report(same.next(), [earlier.turns(2, 1)])
        assert [curriculum.next() for _ in range(9)] == [same.next() for _ in range(9)]


def read_plainly(state, path):
    """Save and load a state as tensors, numbers, strings and containers of them."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def test_a_buffers_state_is_plain(make, tmp_path):
    rb = earlier.empty()
    rb.load_state_dict(read_plainly(earlier.filled().state_dict(), tmp_path / "state.pt"))
    check(make, rb)


def test_a_buffers_files_are_plain(make, tmp_path):
    earlier.filled().dumps(tmp_path)
    files = [*tmp_path.rglob("*.pt")]
    assert len(files) == 4
    for file in files:
        torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_samplers_state_is_plain(make, name, tmp_path):
    def buffer():
        return buffer_of(
            20, SAMPLERS[name](), cls=TensorDictReplayBuffer, batch_size=4 if name == "clips" else 1
        )

    rb, other = buffer(), buffer()
    for length, episode in [(4, 0), (3, 1), (2, 3)]:
        rb.extend(earlier.turns(length, episode))
        rb.sample()
    other.load_state_dict(read_plainly(rb.state_dict(), tmp_path / "state.pt"))
    for each in (rb, other):
        each.set_rng(torch.Generator().manual_seed(1))
    assert make.steps(rb.sample()) == make.steps(other.sample())


def test_curricula_have_plain_states(tmp_path):
    for name, curriculum in earlier.curricula().items():
        curriculum.report(curriculum.next(), [earlier.turns(2, 1)])
        other = earlier.curricula()[name]
        other.load_state_dict(read_plainly(curriculum.state_dict(), tmp_path / "state.pt"))
        assert [curriculum.next() for _ in range(9)] == [other.next() for _ in range(9)]
