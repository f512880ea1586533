"""Metadata of episodes comes back with its episode, and leaves with it."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import ReplayBuffer

from tests.data.saving import HOW, saved
from tests.tiers import examples
from torchrl_mt.data import EpisodeStorage, EpisodeWriter

values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.floats(0, 1), max_size=2)
metadata = st.none() | st.dictionaries(st.text(max_size=3), values, max_size=3)


def pairs(storage):
    """The number and the metadata of each stored episode."""
    episodes = range(storage.num_episodes)
    return [(int(storage.episode(i)["episode"][0]), storage.metadata(i)) for i in episodes]


def fitting(stored, max_steps, max_episodes):
    """The newest of ``(length, number, metadata)`` that fit."""
    kept = []
    for each in reversed(stored):
        if sum(n for n, *_ in [each, *kept]) > max_steps or len(kept) == max_episodes:
            break
        kept.insert(0, each)
    return kept


@examples(60, few=4)
@given(
    events=st.lists(st.lists(st.tuples(st.integers(1, 6), metadata), max_size=4), max_size=12),
    by_writer=st.sets(st.integers(0, 11)),
    emptied=st.none() | st.integers(0, 11),
    how=st.sampled_from([*HOW, "load_memmap"]),
    budgets=st.tuples(st.integers(6, 30), st.none() | st.integers(1, 5)),
)
def test_metadata_follows_its_episode(
    make, tmp_path_factory, events, by_writer, emptied, how, budgets
):
    def rb(max_steps=15, max_episodes=None):
        storage = EpisodeStorage(max_steps, max_episodes=max_episodes)
        return ReplayBuffer(storage=storage, writer=EpisodeWriter())

    buffer, model, number = rb(), [], 0

    def write(storage, event, buffer=None):
        nonlocal model, number
        if buffer is not None and event:
            buffer.extend(make.vectors([n for n, _ in event], first_id=number))
        for n, facts in event:
            if buffer is None:
                storage.append(make.vectors([n], first_id=number), facts)
            model.append((n, number, facts if buffer is None and facts else {}))
            number += 1

    for i, event in enumerate(events):
        write(buffer.storage, event, buffer if i in by_writer else None)
        model = fitting(model, 15, None)
        if i == emptied:
            buffer.empty()
            model = []
        expected = [(number, given) for _, number, given in model]
        assert pairs(buffer.storage) == expected
        assert len(buffer.storage.table.metadata) == sum(map(bool, dict(expected).values()))
    folder = tmp_path_factory.mktemp("metadata")
    if how == "load_memmap":
        buffer.dumps(folder)
        same = EpisodeStorage.load_memmap(folder, max_steps=budgets[0], max_episodes=budgets[1])
    else:
        same = saved(buffer, how, folder, rb(*budgets)).storage
        budgets = budgets if how in ("dumps", "state_dict") else (15, None)
    model = fitting(model, *budgets)
    assert pairs(same) == [(number, given) for _, number, given in model]
    assert len(same.table.metadata) == sum(bool(given) for *_, given in model)
    for event in events[:3]:  # It goes on.
        write(same, event)
        model = fitting(model, *budgets)
        assert pairs(same) == [(number, given) for _, number, given in model]


def test_what_is_kept_and_given_out_are_copies(make):
    storage, other, given = EpisodeStorage(20), EpisodeStorage(20), {"a": [1]}
    storage.append(make.vectors([3]), given)
    given["a"].append(2)
    assert storage.metadata(0) == {"a": [1]}
    storage.metadata(0)["a"].append(3)
    state = storage.state_dict()
    storage.state_dict()["metadata"][0]["a"].append(4)
    other.load_state_dict(state)
    state["metadata"][0]["a"].append(5)
    assert storage.metadata(-1) == other.metadata(0) == {"a": [1]}


def test_metadata_of_an_evicted_episode_is_freed(make):
    class Fact:
        pass

    storage, fact = EpisodeStorage(5), Fact()
    storage.append(make.vectors([3]), {"fact": fact})
    alive = weakref.ref(fact)
    del fact
    storage.append(make.vectors([4]))
    assert alive() is None


@pytest.mark.parametrize("given", ["demonstration", [("a", 1)], 3])
def test_metadata_that_is_no_dict_is_refused(make, given):
    storage = EpisodeStorage(20)
    with pytest.raises(TypeError, match=r"metadata must be a dict or None, got (str|list|int)"):
        storage.append(make.vectors([3]), given)
    assert len(storage) == 0
    for i in (0, -1):
        with pytest.raises(IndexError, match=f"episode {i} is out of range: 0 episodes"):
            storage.metadata(i)


@pytest.mark.parametrize("refused", ["schema", "budget"])
def test_a_refused_episode_leaves_no_metadata(make, refused):
    storage = EpisodeStorage(5)
    storage.append(make.vectors([3]), {"a": 1})
    odd = make.vectors([3]).exclude("action") if refused == "schema" else make.vectors([6])
    with pytest.raises(ValueError, match="action" if refused == "schema" else "max_steps=5"):
        storage.append(odd, {"b": 2})
    assert pairs(storage) == [(0, {"a": 1})]


def test_states_without_metadata_load(make):
    """As versions before metadata wrote them."""
    storage, other = EpisodeStorage(20), EpisodeStorage(20)
    storage.append(make.vectors([3]), {"a": 1})
    other.append(make.vectors([4]), {"b": 2})
    state = storage.state_dict()
    del state["metadata"]
    other.load_state_dict(state)
    assert pairs(other) == [(0, {})]
