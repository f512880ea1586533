import copy
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer
from torchrl.modules.llm.policies import Tokens

from tests.data import makers
from tests.data.conversations import turns_of
from tests.tiers import examples
from torchrl_mt.data import EpisodeStorage, EpisodeWriter


def episode(sizes, identity=0, key="x"):
    return lazy_stack(
        [
            TensorDict({"episode": torch.tensor(identity), key: torch.full((size,), identity)})
            for size in sizes
        ]
    )


@examples()
@given(
    episodes=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=20),
    max_steps=st.integers(4, 12),
    max_tokens=st.integers(24, 40),
    max_episodes=st.none() | st.integers(1, 5),
)
# Sizes that differ only from one that has left, and sizes that never differ: what does not vary is
# no column of tokens.
@example(episodes=[[0], [1]], max_steps=4, max_tokens=24, max_episodes=1)
@example(episodes=[[6] * 4] * 2, max_steps=12, max_tokens=24, max_episodes=None)
@example(episodes=[[6] * 4] * 2 + [[1]], max_steps=12, max_tokens=24, max_episodes=None)
def test_the_oldest_leave_until_all_budgets_hold_and_no_more(
    episodes, max_steps, max_tokens, max_episodes
):
    storage = EpisodeStorage(max_steps, max_tokens=max_tokens, max_episodes=max_episodes)
    model, seen = [], set()
    for i, sizes in enumerate(episodes):
        storage.append(episode(sizes, i))
        model.append((i, sizes))
        seen.update(sizes)
        varies = len(seen) > 1
        while (
            sum(len(s) for _, s in model) > max_steps
            or varies * sum(sum(s) for _, s in model) > max_tokens
            or len(model) > (max_episodes or 99)
        ):
            del model[0]
        assert storage.num_tokens == varies * sum(sum(s) for _, s in model)
        assert len(storage) == sum(len(s) for _, s in model)
        assert [e[0]["episode"].item() for e in storage.episodes()] == [i for i, _ in model]


def test_an_episode_of_too_many_tokens_is_refused_and_changes_nothing():
    storage = EpisodeStorage(100, max_tokens=10)
    storage.append(episode([3, 5]))
    with pytest.raises(ValueError, match=r"episode of 11 tokens .* max_tokens=10"):
        storage.append(episode([5, 6]))
    assert storage.lengths.tolist() == [2]
    assert storage.num_tokens == 8


@pytest.mark.parametrize(
    ("entries", "tokens"),
    [
        pytest.param(
            lambda t: {
                "tokens": {"prompt": torch.arange(1 + 3 * t), "response": torch.tensor([7, 7])},
                "log_probs": {"response": torch.zeros(2)},
                "note": torch.zeros(50 + t),
            },
            1 + 3 + 3 + 3 * 2,  # prompts of 1, 4 and 7 tokens share 1 and 4 with the turn before
            id="those under tokens",
        ),
        pytest.param(
            lambda t: {
                "tokens": Tokens(prompt=torch.arange(4 + t), response=torch.arange(t)),
                "note": torch.zeros(50 + t),
            },
            4 + 6 + 8,
            id="those in a tensorclass",
        ),
        pytest.param(
            lambda t: {"tokens": f"{t}", "note": torch.zeros(50 + t)}, 50 + 51 + 52, id="no text"
        ),
        pytest.param(
            lambda t: {"a": torch.zeros(t), "b": torch.zeros(2 * t)}, 6, id="the largest otherwise"
        ),
        pytest.param(lambda t: {"a": torch.zeros(5, 8)}, 0, id="none that cannot vary"),
    ],
)
def test_which_entries_are_tokens(entries, tokens):
    storage, other = (EpisodeStorage(9, max_tokens=max(2 * tokens, 1)) for _ in range(2))
    for _ in range(3):
        storage.append(lazy_stack([TensorDict(entries(t)) for t in range(3)]))
    other.load_state_dict(storage.state_dict())
    for each in (storage, other):
        assert each.num_tokens == (2 if tokens else 3) * tokens
        assert each.num_episodes == (2 if tokens else 3)


def test_of_a_state_of_too_many_tokens_the_newest_episodes_are_loaded(said):
    full, small = EpisodeStorage(9), EpisodeStorage(9, max_tokens=5)
    full.append(episode([1, 2], 1))
    full.append(episode([1, 2], 2))
    small.append(episode([1], 3))
    small.load_state_dict(full.state_dict())
    assert small.num_tokens == 3
    assert small[:]["episode"].tolist() == [2, 2]
    (message,) = said()
    assert "the newest 1 of 2 saved episodes" in message
    assert "max_tokens=5" in message
    tiny = EpisodeStorage(9, max_tokens=2)
    tiny.append(episode([1], 3))
    with pytest.raises(ValueError, match=r"newest .* has 3 tokens, more than max_tokens=2"):
        tiny.load_state_dict(full.state_dict())
    assert tiny.lengths.tolist() == [1]
    roomy = EpisodeStorage(9, max_tokens=6)
    roomy.load_state_dict(full.state_dict())
    assert roomy.num_tokens == 6


def test_the_same_conversations_count_the_same_whatever_came_before():
    def turns(*sizes, fixed=None):
        history, prompts = [], []
        for t, size in enumerate(sizes):
            prompts.append(torch.tensor(history + [t] * size if fixed is None else [t] * fixed))
            history = [*prompts[-1].tolist(), 9, 9, 9]
        return turns_of(prompts, [torch.tensor([9, 9, 9])] * len(sizes))

    same_length, growing = turns(5, 5, fixed=5), turns(10, 4, 6)
    first, second = EpisodeStorage(50), EpisodeStorage(50)
    for data in (same_length, growing):
        first.append(data)
    for data in (growing, same_length):
        second.append(data)
    third = EpisodeStorage(50)
    third.load_state_dict(first.state_dict())
    assert first.num_tokens == second.num_tokens == third.num_tokens == (5 + 5 + 6) + (20 + 9)


def dense(lengths, first_id):
    """Whole episodes of vectors, one after the other."""
    ids = torch.arange(first_id, first_id + len(lengths)).repeat_interleave(torch.tensor(lengths))
    return makers.whole({"episode": ids}, *lengths)


@pytest.mark.parametrize(
    ("budgets", "kept", "raised"),
    [
        ({"max_steps": 9}, 3, "max_steps from 9 to 14"),
        ({"max_steps": 14}, 5, None),
        ({"max_steps": 99, "max_episodes": 2}, 2, "max_episodes from 2 to 5"),
        (
            {"max_steps": 13, "max_episodes": 3},
            3,
            "max_steps from 13 to 14 and max_episodes from 3 to 5",
        ),
        ({"max_steps": 99, "max_tokens": 17}, 2, "max_tokens from 17 to 33"),
    ],
)
def test_a_write_larger_than_a_budget_is_warned_of_once(said, budgets, kept, raised):
    storage = EpisodeStorage(**budgets)
    rb = ReplayBuffer(storage=storage, writer=EpisodeWriter())
    for k in range(3):
        data = dense([2, 3, 4, 1, 4], first_id=5 * k)
        if "max_tokens" in budgets:
            data = lazy_stack(
                [step.set("x", torch.zeros(1 + i % 4)) for i, step in enumerate(data)]
            )
        rb.extend(data)
        assert storage.lengths.tolist() == [2, 3, 4, 1, 4][5 - kept :]
    if raised is None:
        assert not said()
    else:
        (message,) = said()
        assert f"only the last {kept} of the 5 episodes of one write are kept" in message
        assert f"raise {raised}," in message


def test_what_leaves_for_later_writes_is_not_warned_of(said):
    rb = ReplayBuffer(storage=EpisodeStorage(10, max_episodes=3), writer=EpisodeWriter())
    for k in range(9):
        rb.extend(dense([2, 3][: 1 + k % 2], first_id=2 * k))
        rb.storage.append(dense([10 - k], first_id=100 + k))
    assert not said()


def test_a_refused_write_warns_of_nothing_and_each_storage_warns_for_itself(said):
    rb = ReplayBuffer(storage=EpisodeStorage(4), writer=EpisodeWriter())
    with pytest.raises(ValueError, match="5 steps does not fit"):
        rb.extend(dense([3, 5], first_id=0))
    assert not said()
    for each in (rb, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        before = len(said())
        for k in range(2):
            each.extend(dense([3, 3], first_id=2 * k))
        assert len(said()) == before + 1


def test_threads_that_write_too_much_are_warned_of_once(said, meanwhile):
    storage = EpisodeStorage(4)

    def writing():
        rb = ReplayBuffer(storage=storage, writer=EpisodeWriter())
        return lambda k: rb.extend(dense([3, 3], first_id=2 * k))

    write = writing()
    with meanwhile(writing(), writing()):
        for k in range(30):
            write(k)
    assert len(said()) == 1
