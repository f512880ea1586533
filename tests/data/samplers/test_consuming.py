"""Episodes that are given out so many times, and then never again."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data.saving import saved
from tests.tiers import examples
from torchrl_mt.data import EpisodeSampler


def buffer(count, *, max_steps=1000, **kwargs):
    kwargs = {"replacement": False, "max_sample_count": count, "batch_size": 3, "seed": 0, **kwargs}
    return buffer_of(max_steps, EpisodeSampler, **kwargs)


def episodes(sample):
    """Which episodes are in a sample."""
    return sample["episode"].unique_consecutive().tolist()


@examples(15)
@given(
    count=st.integers(1, 3),
    writes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    batch_size=st.integers(1, 4),
)
def test_each_episode_comes_so_many_times(make, count, writes, batch_size):
    rb = buffer(count, batch_size=batch_size)
    seen, written = Counter(), 0
    for number in writes:
        rb.extend(make.vectors([2] * number, first_id=written))
        written += number
        drawn = episodes(rb.sample())
        assert len(set(drawn)) == len(drawn)
        seen.update(drawn)
        left = sum(count > seen[i] for i in range(written))
        assert rb.sampler._sampleable_count(rb.storage, batch_size) == left
        assert rb.sampler.can_sample(rb.storage, batch_size) == (left > 0)
        if not left:
            break
    while rb.sampler.can_sample(rb.storage, batch_size):
        seen.update(episodes(rb.sample()))
    assert seen == Counter(dict.fromkeys(range(written), count))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"given out max_sample_count={count} times"):
            rb.sample()
    rb.extend(make.vectors([2], first_id=written))
    assert episodes(rb.sample()) == [written]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_iterating_ends_with_what_is_left(make, cls, prefetch):
    rb = buffer(1, cls=cls, prefetch=prefetch)
    for first in (0, 7):
        rb.extend(make.vectors([2] * 7, first_id=first))
        seen = [i for batch in rb for i in episodes(batch)]
        assert sorted(seen) == list(range(first, first + 7))


def test_what_was_used_up_leaves_as_others_do(make):
    rb = buffer(1, max_steps=6, batch_size=2)
    seen = []
    for k in range(10):
        rb.extend(make.vectors([2], first_id=k))
        if k % 2:
            seen += episodes(rb.sample())
    assert sorted(seen) == list(range(10))
    assert rb.sampler._epoch._counts.keys() <= {7, 8, 9}


def test_groups_are_used_up_whole(make):
    data = make.vectors([2] * 7)
    data["group"] = data["episode"] // 2  # the last one has a single episode
    for size, groups in ((None, [0, 1, 2, 3]), (2, [0, 1, 2])):
        rb = buffer(1, batch_size=1, group_key="group", group_size=size)
        rb.extend(data)
        seen = []
        while rb.sampler.can_sample(rb.storage, 1):
            assert rb.sampler._sampleable_count(rb.storage, 1) <= len(rb.storage.lengths)
            seen += rb.sample()["group"].unique().tolist()
        assert sorted(seen) == groups
        with pytest.raises(RuntimeError, match="given out max_sample_count=1 times"):
            rb.sample()


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_what_was_used_up_is_saved(make, how, tmp_path):
    rb = buffer(2)
    rb.extend(make.vectors([2] * 5))
    for _ in range(3):
        rb.sample()
    for each in (rb, saved(rb, how, tmp_path, buffer(2))):
        seen = []
        while each.sampler.can_sample(each.storage, 3):
            seen += episodes(each.sample())
        assert len(seen) == 2
    rb.empty()
    rb.extend(make.vectors([2] * 3, first_id=9))
    assert sorted(episodes(rb.sample())) == [9, 10, 11]
