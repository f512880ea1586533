import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_mt.data import EpisodeStorage


def episode(sizes, identity=0, key="x"):
    return lazy_stack(
        [
            TensorDict({"episode": torch.tensor(identity), key: torch.full((size,), identity)})
            for size in sizes
        ]
    )


@given(
    episodes=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=20),
    max_steps=st.integers(4, 12),
    max_tokens=st.integers(24, 40),
    at_once=st.booleans(),
)
def test_the_oldest_leave_until_both_budgets_hold_and_no_more(
    episodes, max_steps, max_tokens, at_once
):
    storage, model, varied = EpisodeStorage(max_steps, max_tokens=max_tokens), [], False
    for i, sizes in enumerate(episodes):
        storage.append(episode(sizes, i))
        model.append((i, sizes))
        while (
            sum(len(s) for _, s in model) > max_steps or sum(sum(s) for _, s in model) > max_tokens
        ):
            del model[0]
        varied = varied or len({size for _, s in model for size in s}) > 1
        assert storage.num_tokens == varied * sum(sum(s) for _, s in model)
        assert len(storage) == sum(len(s) for _, s in model)
        assert [e[0]["episode"].item() for e in storage.episodes()] == [i for i, _ in model]


def test_an_episode_of_too_many_tokens_is_refused_and_changes_nothing():
    storage = EpisodeStorage(100, max_tokens=10)
    storage.append(episode([3, 5]))
    with pytest.raises(ValueError, match=r"episode of 11 tokens .* max_tokens=10"):
        storage.append(episode([5, 6]))
    assert storage.lengths.tolist() == [2]
    assert storage.num_tokens == 8


def test_tokens_are_the_entries_under_tokens():
    steps = [
        TensorDict(
            {
                "tokens": {"prompt": torch.arange(1 + 3 * t), "response": torch.tensor([7, 7])},
                "log_probs": {"response": torch.zeros(2)},
                "note": torch.zeros(50 + t),
            }
        )
        for t in range(3)
    ]
    storage = EpisodeStorage(9, max_tokens=100)
    storage.append(lazy_stack(steps))
    # Prompts of 1, 4 and 7 tokens share 1 and 4 with the turn before.
    assert storage.num_tokens == 1 + 3 + 3 + 3 * 2


def test_tokens_in_a_tensorclass_count():
    steps = [
        TensorDict(
            {
                "tokens": Tokens(prompt=torch.arange(4 + t), response=torch.arange(t)),
                "note": torch.zeros(50 + t),
            }
        )
        for t in range(3)
    ]
    storage = EpisodeStorage(9, max_tokens=40)
    for _ in range(3):
        storage.append(lazy_stack(steps))
    assert storage.num_tokens == 2 * (4 + 6 + 8)
    assert storage.num_episodes == 2
    copy = EpisodeStorage(9, max_tokens=40)
    copy.load_state_dict(storage.state_dict())
    assert copy.num_tokens == 36


def test_other_objects_called_tokens_do_not_count():
    steps = [TensorDict({"tokens": f"{t}", "note": torch.zeros(50 + t)}) for t in range(3)]
    storage = EpisodeStorage(9)
    storage.append(lazy_stack(steps))
    assert storage.num_tokens == 50 + 51 + 52


def test_tokens_are_the_largest_ragged_entry_where_none_is_called_tokens():
    steps = [TensorDict({"a": torch.zeros(t), "b": torch.zeros(2 * t)}) for t in range(3)]
    storage = EpisodeStorage(9)
    storage.append(lazy_stack(steps))
    assert storage.num_tokens == 6


def test_an_entry_that_turns_out_to_vary_counts_from_its_first_episode_on():
    storage = EpisodeStorage(99, max_tokens=20)
    for i in range(3):
        storage.append(episode([4, 4], i))
    assert storage.num_tokens == 0
    storage.append(episode([5, 4], 3))
    assert storage.num_tokens == 17
    assert [e[0]["episode"].item() for e in storage.episodes()] == [2, 3]


def test_entries_that_cannot_vary_are_no_tokens():
    storage = EpisodeStorage(9, max_tokens=1)
    storage.append(TensorDict({"a": torch.zeros(5, 8)}, [5]))
    assert storage.num_tokens == 0


def test_a_state_of_too_many_tokens_is_refused_and_changes_nothing():
    full, small = EpisodeStorage(9), EpisodeStorage(9, max_tokens=5)
    full.append(episode([1, 2]))
    full.append(episode([1, 2]))
    small.append(episode([1, 2], 1))
    with pytest.raises(ValueError, match=r"6 tokens, more than max_tokens=5"):
        small.load_state_dict(full.state_dict())
    assert small.num_tokens == 3
    roomy = EpisodeStorage(9, max_tokens=6)
    roomy.load_state_dict(full.state_dict())
    assert roomy.num_tokens == 6


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "9"])
@pytest.mark.parametrize("name", ["max_steps", "max_tokens"])
def test_budgets_are_positive_integers(name, budget):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got"):
        EpisodeStorage(**{"max_steps": 5, name: budget})


def test_the_same_conversations_count_the_same_whatever_came_before():
    def turns(*sizes, fixed=None):
        history, steps = [], []
        for t, size in enumerate(sizes):
            prompt = history + [t] * size if fixed is None else [t] * fixed
            response = [9] * 3
            history = prompt + response
            tokens = {"prompt": torch.tensor(prompt), "response": torch.tensor(response)}
            steps.append(TensorDict({"tokens": tokens}))
        return lazy_stack(steps)

    same_length, growing = turns(5, 5, fixed=5), turns(10, 4, 6)
    first, second = EpisodeStorage(50), EpisodeStorage(50)
    for data in (same_length, growing):
        first.append(data)
    for data in (growing, same_length):
        second.append(data)
    third = EpisodeStorage(50)
    third.load_state_dict(first.state_dict())
    assert first.num_tokens == second.num_tokens == third.num_tokens == (5 + 5 + 6) + (20 + 9)
