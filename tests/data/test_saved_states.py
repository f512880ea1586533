"""Saved states are plain data: no class of this package is needed to read them."""

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data import contents
from torchrl_mt.data import ClipSampler, EpisodeSampler

SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "epoch": lambda: EpisodeSampler(replacement=False),
    "groups": lambda: EpisodeSampler(replacement=False, group_key="episode", max_sample_count=2),
}


def check(make, rb):
    """The buffer holds what :func:`contents.filled` has, and goes on from there."""
    told = [contents.turns(*episode) for episode in contents.EPISODES]
    for got, expected in zip(rb.storage.episodes(), told, strict=True):
        assert make.steps(got) == make.steps(expected)
    assert rb.storage.growing_keys
    assert rb.storage.shared_keys == [("next", "observation")]
    (left_open,) = rb.writer.open_episodes.values()
    assert make.steps(left_open) == make.steps(contents.turns(*contents.OPEN, whole=False))
    again = contents.filled()
    for each in (rb, again):
        each.set_rng(torch.Generator().manual_seed(1))
    assert make.steps(rb.sample()) == make.steps(again.sample())
    length, episode = contents.OPEN
    end = contents.turns(length + 1, episode)[length:]
    assert len(rb.extend(end)[0:0]) == 0
    assert make.steps(rb.storage.episode(-1)) == make.steps(contents.turns(length + 1, episode))


def read_plainly(state, path):
    """Save and load a state as tensors, numbers, strings and containers of them."""
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def test_a_buffers_state_is_plain(make, tmp_path):
    rb = contents.empty()
    rb.load_state_dict(read_plainly(contents.filled().state_dict(), tmp_path / "state.pt"))
    check(make, rb)


def test_a_buffers_files_are_plain(make, tmp_path):
    contents.filled().dumps(tmp_path)
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
        rb.extend(contents.turns(length, episode))
        rb.sample()
    other.load_state_dict(read_plainly(rb.state_dict(), tmp_path / "state.pt"))
    for each in (rb, other):
        each.set_rng(torch.Generator().manual_seed(1))
    assert make.steps(rb.sample()) == make.steps(other.sample())


def test_curricula_have_plain_states(tmp_path):
    for name, curriculum in contents.curricula().items():
        curriculum.report(curriculum.next(), [contents.turns(2, 1)])
        other = contents.curricula()[name]
        other.load_state_dict(read_plainly(curriculum.state_dict(), tmp_path / "state.pt"))
        assert [curriculum.next() for _ in range(9)] == [other.next() for _ in range(9)]
