import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.buffers import buffer_of
from tests.data.makers import whole
from torchrl_mt.data import EpisodeStorage, EpisodeWriter
from torchrl_mt.transforms import DiscountedReturn, ReturnBalance

REWARDS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, float("nan")])
EPISODES = st.lists(st.lists(REWARDS, min_size=1, max_size=6), min_size=1, max_size=4)
EVENTS = st.lists(
    st.tuples(EPISODES, st.sampled_from(["write", "write", "empty", "load"]), st.booleans()),
    max_size=12,
)


def buffer(max_steps=12):
    return buffer_of(max_steps, writer=EpisodeWriter(transform=DiscountedReturn(gamma=0.5)))


def write(rb, *episodes):
    reward = torch.tensor([[r] for rewards in episodes for r in rewards])
    rb.extend(whole({"next": {"reward": reward}}, *map(len, episodes)))


def count(rb, threshold):
    if not len(rb):
        return 0, 0
    returns = rb[:]["next", "return"]
    return int((returns < threshold).sum()), int((returns >= threshold).sum())


@settings(max_examples=30)
@given(events=EVENTS, threshold=st.sampled_from([-0.5, 0.0, 0.25, 0.5]))
def test_counts_are_those_of_the_stored_steps(events, threshold):
    rb, balance = buffer(), ReturnBalance(threshold)
    state = rb.storage.state_dict()
    for episodes, event, look in events:
        if event == "write":
            write(rb, *episodes)
        elif event == "empty":
            rb.empty()
        else:
            rb.storage.load_state_dict(state)
            write(rb, *episodes)
            state = rb.storage.state_dict()
        if look:
            balance.update(rb.storage)
            assert (balance.below, balance.at_or_above) == count(rb, threshold)
    balance.update(rb.storage)
    assert (balance.below, balance.at_or_above) == count(rb, threshold)


@settings(max_examples=20)
@given(
    writes=st.lists(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=3), max_size=9),
    decay=st.sampled_from([0.0, 0.5, 0.99]),
    twice=st.booleans(),
)
def test_the_outcome_takes_in_each_episode_once_and_in_order(writes, decay, twice):
    rb, balance, expected = buffer(), ReturnBalance(0.0, decay=decay), None
    for k, outcomes in enumerate(writes):
        # The last reward of an episode, not any other.
        write(rb, *([7.0] * (k % 4) + [outcome] for outcome in outcomes))
        for _ in range(1 + twice):
            balance.update(rb.storage)
        for outcome in outcomes:
            before = outcome if expected is None else expected
            expected = decay * before + (1 - decay) * outcome
        assert balance.outcome == pytest.approx(expected, abs=1e-9)


def test_state_continues():
    rb, balance = buffer(), ReturnBalance(0.5)
    write(rb, [0.0, 1.0], [2.0])
    balance.update(rb.storage)
    other, copy = buffer(), ReturnBalance(0.5)
    other.load_state_dict(rb.state_dict())
    copy.load_state_dict(balance.state_dict())
    for each, b in ((rb, balance), (other, copy)):
        write(each, [0.0], [3.0, 0.0])
        b.update(each.storage)
    assert repr(copy) == repr(balance)
    assert (copy.below, copy.at_or_above) == count(rb, 0.5)


def test_an_update_that_fails_changes_nothing():
    rb, balance = buffer(), ReturnBalance(0.5)
    write(rb, [0.0, 1.0])
    balance.update(rb.storage)
    before = repr(balance)
    write(rb, [1.0])
    balance.reward_key = "nothing"
    with pytest.raises(KeyError, match="'nothing' is not stored"):
        balance.update(rb.storage)
    assert repr(balance) == before
    balance.reward_key = ("next", "reward")
    balance.update(rb.storage)
    assert (balance.below, balance.at_or_above) == count(rb, 0.5)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="threshold must be a number"):
        ReturnBalance(float("nan"))
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="decay must be in"):
            ReturnBalance(0.0, decay=decay)
    with pytest.raises(TypeError, match="storage must be an EpisodeStorage"):
        ReturnBalance(0.0).update(LazyTensorStorage(3))
    rb = ReplayBuffer(storage=EpisodeStorage(9), writer=EpisodeWriter())
    rb.extend(whole({"next": {"return": torch.zeros(2, 3)}}, 2))
    with pytest.raises(ValueError, match=r"one number per step, got \(3,\)"):
        ReturnBalance(0.0).update(rb.storage)
    with pytest.raises(KeyError, match="'g' is not stored"):
        ReturnBalance(0.0, in_key="g").update(rb.storage)
