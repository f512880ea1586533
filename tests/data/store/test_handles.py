"""A handle stays with its step for good, whatever happens to the storage."""

import copy
import pickle
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.data.handles import HANDLES, numbers_of
from tests.tiers import runs
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "rows of clips": lambda: ClipSampler(slice_len=2, layout="clips"),
    "strided clips": lambda: ClipSampler(slice_len=1, stride=2),
    "clips by priority": lambda: PrioritizedClipSampler(slice_len=2),
    "episodes": lambda: EpisodeSampler(),
}


def steps(numbers, identity):
    """A whole episode of numbered steps."""
    done = torch.zeros(len(numbers), 1, dtype=torch.bool)
    done[-1] = True
    ids = torch.full((len(numbers),), identity)
    return TensorDict(
        {"number": torch.tensor(numbers), "id": ids, "next": {"done": done}}, [len(numbers)]
    )


class Machine(RuleBasedStateMachine):
    """Each handle ever given out by the storage means one number; the model is a list of numbers."""

    max_steps = 9

    @initialize(
        cls=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
        sampler=st.sampled_from(sorted(SAMPLERS)),
        max_episodes=st.sampled_from([None, 3]),
    )
    def begin(self, cls, sampler, max_episodes):
        self.cls, self.sampler, self.max_episodes = cls, sampler, max_episodes
        self.rb = self.new()
        self.stored: list[list[int]] = []
        self.number_of: dict[int, int] = {}
        """Of every handle that this storage gave out, or the one whose state it began with."""
        self.number = self.identity = 0
        self.saved: list[tuple[dict, list[list[int]], dict[int, int]]] = []

    def new(self):
        return self.cls(
            storage=EpisodeStorage(self.max_steps, max_episodes=self.max_episodes),
            writer=EpisodeWriter(traj_key="id"),
            sampler=SAMPLERS[self.sampler](),
            batch_size=4,
            generator=torch.Generator().manual_seed(1),
        )

    def given_out(self, index, numbers):
        for handle, number in zip(index, numbers, strict=True):
            assert handle >= HANDLES
            handle = HANDLES + numbers_of(handle)  # A sample's also tells of its clip.
            assert self.number_of.setdefault(handle, number) == number

    def leave(self):
        while sum(map(len, self.stored)) > self.max_steps or len(self.stored) > (
            self.max_episodes or 99
        ):
            del self.stored[0]

    @rule(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
    def write(self, lengths):
        """Some of the episodes may leave again at once."""
        episodes = []
        for length in lengths:
            numbers = list(range(self.number, self.number + length))
            episodes.append(numbers)
            self.number += length
        parts = [steps(numbers, self.identity + i) for i, numbers in enumerate(episodes)]
        self.identity += len(parts)
        index = self.rb.extend(torch.cat(parts))
        self.stored += episodes
        self.leave()
        new = [number for numbers in episodes for number in numbers]
        stored = {number for numbers in self.stored for number in numbers}
        if self.cls is ReplayBuffer:
            self.given_out(index.tolist(), [number for number in new if number in stored])
            return
        assert index.shape == (len(new),)
        for handle, number in zip(index.tolist(), new, strict=True):
            assert (handle != -1) == (number in stored)
            if handle != -1:
                self.given_out([handle], [number])

    @rule(length=st.integers(1, 6))
    def flush(self, length):
        """An episode without an end."""
        numbers = list(range(self.number, self.number + length))
        self.number += length
        data = steps(numbers, self.identity)
        self.identity += 1
        data["next", "done"].zero_()
        assert (self.rb.extend(data) == -1).all()
        index = self.rb.writer.flush()
        self.stored.append(numbers)
        self.leave()
        self.given_out(index.tolist(), numbers)

    @rule()
    def empty(self):
        self.rb.empty()
        self.stored = []

    @precondition(lambda self: self.stored)
    @rule()
    def sample(self):
        if not self.rb.can_sample():
            return
        sample, info = self.rb.sample(return_info=True)
        index, numbers = info["index"].flatten().tolist(), sample["number"].flatten().tolist()
        self.given_out(index, numbers)
        if self.cls is TensorDictReplayBuffer:
            assert sample["index"].flatten().tolist() == index
        if self.sampler == "clips by priority":
            self.rb.update_priority(info["index"], 1.0)

    @rule()
    def save(self):
        storage = self.rb.storage
        state = copy.deepcopy(storage.state_dict())
        self.saved.append((state, [list(e) for e in self.stored], dict(self.number_of)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data):
        """Into the storage that gave other handles out since."""
        state, stored, _ = data.draw(st.sampled_from(self.saved))
        self.rb.storage.load_state_dict(copy.deepcopy(state))
        self.stored = [list(e) for e in stored]
        # What was given out is of no step of now, even where the same steps are stored again.
        for handle in self.number_of:
            with pytest.raises(IndexError, match="not stored"):
                self.rb.storage.get(handle)
        self.number_of = dict.fromkeys(self.number_of, -1)

    @rule(how=st.sampled_from(["state_dict", "dumps", "pickle"]))
    def move(self, how):
        """Into another storage: handles go on to mean their steps there."""
        if how == "pickle":
            self.rb = pickle.loads(pickle.dumps(self.rb))
        else:
            fresh = self.new()
            if how == "state_dict":
                fresh.load_state_dict(self.rb.state_dict())
            else:
                with tempfile.TemporaryDirectory() as folder:
                    self.rb.dumps(folder)
                    fresh.loads(folder)
            self.rb = fresh

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back(self, data):
        """Into another storage, what was saved before: handles of then mean their steps there."""
        state, stored, number_of = data.draw(st.sampled_from(self.saved))
        self.rb = self.new()
        self.rb.storage.load_state_dict(copy.deepcopy(state))
        self.stored = [list(e) for e in stored]
        self.number_of = dict(number_of)

    @invariant()
    def every_handle_means_its_step_or_none(self):
        if not hasattr(self, "rb"):
            return
        storage = self.rb.storage
        numbers = [number for episode in self.stored for number in episode]
        place = {number: i for i, number in enumerate(numbers)}
        assert len(storage) == len(numbers)
        if numbers:
            assert storage[:]["number"].tolist() == numbers
        stays, left = [], []
        for handle, number in self.number_of.items():
            (stays if number in place else left).append(handle)
        if stays:
            wanted = [self.number_of[handle] for handle in stays]
            index = torch.tensor(stays)
            assert storage.get(index)["number"].tolist() == wanted
            assert storage.places(index).tolist() == [place[number] for number in wanted]
            assert storage.contains(index).all()
            handles = HANDLES + storage.table.first + storage.places(index)
            assert torch.equal(handles, index)
        if left:
            assert not storage.contains(torch.tensor(left)).any()
        for handle in left:
            for read in (storage.get, storage.places):
                with pytest.raises(IndexError, match="not stored"):
                    read(handle)
            with pytest.raises(IndexError, match="not stored"):
                storage.get(torch.tensor([*stays, handle]))


Machine.TestCase.settings = runs(60)
TestHandles = Machine.TestCase


@pytest.fixture
def stored():
    """A storage of steps 3 to 9, from which others have left."""
    storage = EpisodeStorage(7)
    storage.append(steps(list(range(3)), 0))
    storage.append(steps(list(range(3, 7)), 1))
    storage.append(steps(list(range(7, 10)), 2))
    return storage


def test_a_handle_is_taken_in_every_form(stored):
    for form in (HANDLES + 5, np.int64(HANDLES + 5), torch.tensor(HANDLES + 5), (HANDLES + 5,)):
        step = stored[form]
        assert step.batch_size == ()
        assert int(step["number"]) == 5
        assert stored.places(form[0] if isinstance(form, tuple) else form).shape == ()
    many = torch.tensor([[HANDLES + 4, HANDLES + 9], [0, -1]])
    for form in (many, many.numpy(), many.tolist(), many.flip(1).flip(1)):
        assert stored.get(form)["number"].tolist() == [[4, 9], [3, 9]]
        assert stored.places(form).tolist() == [[1, 6], [0, 6]]
    assert stored[range(HANDLES + 4, HANDLES + 7)]["number"].tolist() == [4, 5, 6]
    # A handle is exact as a double, if it is an integer again.
    assert int(float(HANDLES + 5)) == HANDLES + 5
    assert stored.contains(HANDLES + 3)
    assert not stored.contains(HANDLES + 2)
    assert stored.contains(-7)
    assert not stored.contains(-8)
    assert not stored.contains(HANDLES + 10)


def test_what_is_not_stored_is_said(stored):
    for handle in (HANDLES, HANDLES + 2, HANDLES + 10, 2**62):
        with pytest.raises(IndexError, match=rf"1 steps .*not stored .* such as {handle}: the 7 "):
            stored[handle]
    with pytest.raises(IndexError, match=f"2 steps .* such as {HANDLES}.* from {HANDLES + 3}"):
        stored[[HANDLES, HANDLES + 4, HANDLES + 11]]
    with pytest.raises(IndexError, match=r"index must lie in \[-7, 7\)"):
        stored[[HANDLES + 4, 7]]
    with pytest.raises(IndexError, match=r"index must lie in \[-7, 7\)"):
        stored[HANDLES - 1]
    with pytest.raises(TypeError, match=r"integer dtype, got torch\.float64"):
        stored[[float(HANDLES + 4)]]
