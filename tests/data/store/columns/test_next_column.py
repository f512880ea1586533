"""Next entries come back as they were written, whether they share rows or not."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import ReplayBuffer

from tests.buffers import buffer_of
from tests.data import makers
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter

NEXT = ("next", "observation")


def episode(length, number, odd=False, *, size=3):
    """An episode whose next observations are its observations, but for one if it is odd."""
    seen = number + torch.arange((length + 1) * size).view(length + 1, size) / 1000
    following = seen[1:].clone()
    if odd:
        following[number % (length - 1)] += 1
    data = {"observation": seen[:-1], "next": {"observation": following}}
    return makers.whole({**data, "number": torch.full((length,), number)}, length)


@examples(25)
@given(data=st.data(), size=st.sampled_from([3, 300]), scratch=st.booleans())
def test_what_is_read_is_what_was_written(make, tmp_path_factory, data, size, scratch):
    folder = tmp_path_factory.mktemp("storage")
    max_steps = data.draw(st.integers(20, 60))
    scratch_dir = folder / "scratch" if scratch else None
    storage = EpisodeStorage(max_steps, scratch_dir=scratch_dir)
    rb = ReplayBuffer(storage=storage, writer=EpisodeWriter(), sampler=ClipSampler(slice_len=2))
    first = [episode(n, i, size=size) for i, n in enumerate([3, 2, 4, 5, 2])]
    rb.extend(torch.cat(first))
    stored, number = [*first], len(first)
    share = st.sampled_from([False] * 3 + [True])
    for _ in range(data.draw(st.integers(1, 12))):
        some = data.draw(st.lists(st.tuples(st.integers(2, 9), share), min_size=1, max_size=4))
        lazy = data.draw(st.booleans())
        written = [episode(n, number + i, odd, size=size) for i, (n, odd) in enumerate(some)]
        number += len(written)
        batch = torch.cat(written)
        rb.extend(lazy_stack(list(batch.unbind(0))) if lazy else batch)
        stored += written
        while sum(map(len, stored)) > max_steps:
            del stored[0]
        how = data.draw(st.sampled_from(["no", "no", "dumps", "state_dict", "pickle", "smaller"]))
        if how == "pickle":
            rb = pickle.loads(pickle.dumps(rb))
        elif how == "state_dict":
            rb.load_state_dict(rb.state_dict())
        elif how in ("dumps", "smaller"):
            rb.dumps(folder / "saved")
            if how == "smaller":
                max_steps = max(20, max_steps - 7)
                while sum(map(len, stored)) > max_steps:
                    del stored[0]
            storage = EpisodeStorage.load_memmap(folder / "saved", max_steps=max_steps)
            rb = buffer_of(storage, ClipSampler(slice_len=2))
            rb.loads(folder / "saved")
        storage = rb.storage
        got = list(storage.episodes())
        assert [make.steps(e) for e in got] == [make.steps(e) for e in stored]
        steps = make.steps(torch.cat(stored))
        assert make.steps(storage[:]) == steps
        order = torch.randperm(len(storage), generator=torch.Generator().manual_seed(number))
        assert make.steps(storage[order]) == [steps[i] for i in order.tolist()]
        clips = rb.sample(32)
        known = {str(step["observation",]): step[NEXT] for step in steps}
        for step in make.steps(clips):
            assert step[NEXT] == known[str(step["observation",])]


def test_all_episodes_have_their_own_rows_once_one_disagrees(make, said):
    storage, written = EpisodeStorage(1000), []
    for number in range(20):
        written.append(episode(5, number, odd=number in (13, 15)))
        storage.append(written[-1])
        assert (NEXT in storage.shared_keys) == (number < 13)
    assert make.steps(storage[:]) == make.steps(torch.cat(written))
    (message,) = said()
    assert "('next', 'observation') of an episode is not 'observation' of the step after" in message
    other = EpisodeStorage(1000)
    other.load_state_dict(storage.state_dict())
    assert make.steps(other[:]) == make.steps(storage[:])


def test_a_refused_write_leaves_the_rows_shared(make):
    storage = EpisodeStorage(100)
    storage.append(episode(5, 0))
    bad = episode(5, 1, odd=True)
    bad["number"] = bad["number"].float()
    with pytest.raises(ValueError, match="number"):
        storage.append(bad)
    assert NEXT in storage.shared_keys
    storage._empty()
    storage.append(episode(5, 2, odd=True))
    assert make.steps(storage[:]) == make.steps(episode(5, 2, odd=True))
