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


@pytest.mark.parametrize("given", ["demonstration", [("a", 1)], 3])
def test_metadata_that_is_no_dict_is_refused(make, given):
    storage = EpisodeStorage(20)
    with pytest.raises(TypeError, match=r"metadata must be a dict or None, got (str|list|int)"):
        storage.append(make.vectors([3]), given)
    assert len(storage) == 0
    for i in (0, -1):
        with pytest.raises(IndexError, match=f"episode {i} is out of range: 0 episodes"):
            storage.metadata(i)
