"""TorchRL's HERReplayBuffer on an EpisodeStorage: goals are those of the step's own episode."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer

from tests.data import makers
from tests.tiers import examples
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

FRACTION = 0.75


def reached(steps):
    """1 where the next state is the goal, which a goal of the episode's own future may be."""
    return (steps["next", "achieved_goal"] == steps["desired_goal"]).all(-1, keepdim=True).float()


def buffer(strategy="future", max_steps=12, **kwargs):
    return HERReplayBuffer(
        reached,
        her_ratio=FRACTION,
        strategy=strategy,
        storage=EpisodeStorage(max_steps),
        writer=EpisodeWriter(),
        batch_size=64,
        **kwargs,
    )


def episode(number, length):
    """States are (episode, time); the goal is out of reach."""
    time = torch.arange(length + 1.0)
    states = TensorDict({"achieved_goal": torch.stack([torch.full_like(time, number), time], -1)})
    states["desired_goal"] = torch.full_like(states["achieved_goal"], -1.0)
    states = states.auto_batch_size_(1)
    data = states[:-1].set("next", states[1:])
    data["next", "reward"] = torch.zeros(length, 1)
    data["next", "terminated"] = torch.zeros(length, 1, dtype=torch.bool)
    return makers.whole(data, length)


def check(rb, sample, strategy):
    relabelled = int(FRACTION * len(sample))
    number, time = sample["achieved_goal"].unbind(-1)
    goal = sample["desired_goal"]
    assert (goal[relabelled:] == -1).all()
    assert torch.equal(goal, sample["next", "desired_goal"])
    assert torch.equal(sample["next", "reward"], reached(sample))
    whose, when = goal[:relabelled].unbind(-1)
    lengths = {int(e["achieved_goal"][0, 0]): len(e) for e in rb.storage.episodes()}
    if strategy == "random":
        assert set(whose.tolist()) <= {float(each) for each in lengths}
        return
    assert torch.equal(whose, number[:relabelled])
    last = torch.tensor([lengths[int(each)] - 1 for each in whose.tolist()])
    assert (when <= last).all()
    if strategy == "future":
        assert (when >= time[:relabelled]).all()
    if strategy == "final":
        assert torch.equal(when, last.float())


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
@examples(15)
@example(lengths=[3, 5, 4, 4, 5, 3, 5, 4, 3], seed=0)  # 12 steps again and again
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=14), seed=st.integers(0, 99))
def test_goals_are_of_the_own_episode_while_others_come_and_go(strategy, lengths, seed):
    torch.manual_seed(seed)
    rb = buffer(strategy)
    for number, length in enumerate(lengths):
        rb.extend(episode(number, length))
        check(rb, rb.sample(), strategy)


def test_the_stored_goals_stay():
    rb = buffer()
    rb.extend(torch.cat([episode(0, 5), episode(1, 4)]))
    for _ in range(5):
        rb.sample()
    assert (rb.storage[:]["desired_goal"] == -1).all()
    assert (rb.storage[:]["next", "reward"] == 0).all()


def test_a_loaded_buffer_relabels_what_it_holds(tmp_path):
    rb = buffer("final")
    for number, length in enumerate([3, 5, 4]):
        rb.extend(episode(number, length))
    rb.sample()
    rb.dumps(tmp_path)
    state = rb.state_dict()
    for number, length in enumerate([5, 3, 4], 3):
        rb.extend(episode(number, length))
    check(rb, rb.sample(), "final")
    for load in (lambda each: each.loads(tmp_path), lambda each: each.load_state_dict(state)):
        for each in (rb, buffer("final")):
            load(each)
            assert each.storage.lengths.tolist() == [3, 5, 4]
            check(each, each.sample(), "final")


@pytest.mark.parametrize(
    "sampler", [ClipSampler(slice_len=2), PrioritizedClipSampler(slice_len=2), EpisodeSampler()]
)
def test_samplers_of_more_than_single_steps_are_refused(sampler):
    rb = buffer(sampler=sampler)
    with pytest.raises(TypeError, match=r"HERReplayBuffer .* single steps: .* RandomSampler"):
        rb.extend(episode(0, 4))
    assert len(rb) == 0
