"""Metadata of episodes comes back with its episode, and leaves with it."""

import weakref

import pytest

from torchrl_mt.data import EpisodeStorage


def pairs(storage):
    """The number and the metadata of each stored episode."""
    episodes = range(storage.num_episodes)
    return [(int(storage.episode(i)["episode"][0]), storage.metadata(i)) for i in episodes]


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


@pytest.mark.parametrize("how", ["load_memmap", "state_dict"])
def test_a_smaller_budget_keeps_the_metadata_of_what_it_keeps(make, tmp_path, how):
    storage, same = EpisodeStorage(20), EpisodeStorage(20, max_episodes=2)
    for i in range(4):
        storage.append(make.vectors([3], first_id=i), {"number": i})
    if how == "load_memmap":
        storage.dumps(tmp_path)
        same = EpisodeStorage.load_memmap(tmp_path, max_episodes=2)
    else:
        same.load_state_dict(storage.state_dict())
    assert pairs(same) == [(2, {"number": 2}), (3, {"number": 3})]
    assert len(same.table.metadata) == 2  # that of the others is not kept


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
