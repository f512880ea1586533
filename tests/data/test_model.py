"""A buffer driven at random, beside a plain Python list of episodes.

Steps have numbers, by which they are told, and a handle stays with its step for good.
"""

import copy
import tempfile
from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.data.handles import HANDLES, numbers_of
from tests.data.saving import HOW, saved
from tests.tiers import runs
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)

IDS = range(4)
SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "rows of clips": lambda: ClipSampler(slice_len=2, layout="clips"),
    "strided clips": lambda: ClipSampler(slice_len=1, stride=2),
    "short clips": lambda: ClipSampler(slice_len=3, strict_length=False, weighting="episode"),
    "clips by priority": lambda: PrioritizedClipSampler(slice_len=2),
    "episodes": lambda: EpisodeSampler(),
    "each episode once": lambda: EpisodeSampler(replacement=False),
}


def dense_step(number, done, following, goal):
    """A step whose next observation is the observation of the next step, and its goal unless told
    otherwise.
    """
    return TensorDict(
        {
            "observation": torch.tensor([number, -number]),
            "number": torch.tensor(number),
            "goal": torch.tensor(goal),
            "next": {
                "observation": torch.tensor([following, -following]),
                "goal": torch.tensor(goal),
                "done": torch.tensor([done]),
            },
        }
    )


def turn(number, done, history, adds):
    """A turn of a conversation whose prompt extends ``history`` by ``adds`` tokens."""
    prompt = torch.tensor([*history, *[number] * adds], dtype=torch.int64)
    return TensorDict(
        {
            "tokens": {"prompt": prompt, "response": torch.full((number % 3,), -number)},
            "number": torch.tensor(number),
            "text": f"turn {number}",
            "next": {"done": torch.tensor([done])},
        }
    )


class Machine(RuleBasedStateMachine):
    """Steps have numbers; the model holds, per episode, the steps as they were written."""

    max_steps = 12

    @initialize(
        turns=st.booleans(),
        cls=st.sampled_from([ReplayBuffer, TensorDictReplayBuffer]),
        sampler=st.sampled_from(sorted(SAMPLERS)),
        max_tokens=st.sampled_from([None, 60]),
        max_episodes=st.sampled_from([None, None, 3]),
    )
    def begin(self, turns, cls, sampler, max_tokens, max_episodes):
        self.turns, self.cls, self.sampler = turns, cls, sampler
        self.budgets = {"max_tokens": max_tokens if turns else None, "max_episodes": max_episodes}
        self.rb = self.new()
        self.stored: list[list[TensorDict]] = []
        self.open: dict[int, list[TensorDict]] = {}
        self.number = 0
        self.number_of: dict[int, int] = {}
        """Of every handle that this storage gave out, or the one whose state it began with."""
        self.saved: list[tuple[dict, list[list[TensorDict]], dict[int, int]]] = []

    def new(self):
        return buffer_of(
            EpisodeStorage(self.max_steps, **self.budgets),
            SAMPLERS[self.sampler](),
            cls=self.cls,
            writer=EpisodeWriter(traj_key="id", max_open_steps=1000),
            batch_size=6,
            seed=1,
        )

    def step(self, identity, done, odd):
        """The next step of an episode."""
        self.number += 1
        begun = self.open.get(identity, [])
        if self.turns:
            history = []
            if begun and not odd:
                last = begun[-1]["tokens"]
                history = torch.cat([last["prompt"], last["response"]]).tolist()
            step = turn(self.number, done, history, adds=1 + self.number % 2)
        else:
            goal = int(begun[-1]["goal"]) if begun and not odd else self.number
            step = dense_step(self.number, done, self.number + 100, goal)
            if begun:
                step["observation"] = begun[-1]["next", "observation"].clone()
        return step.set("id", torch.tensor(identity))

    @rule(
        events=st.lists(
            st.tuples(st.sampled_from(IDS), st.booleans(), st.sampled_from([False] * 9 + [True])),
            min_size=1,
            max_size=7,
        )
    )
    def write(self, events):
        batch, ended = [], []
        for identity, done, odd in events:
            # An episode that grows beyond the budget would be refused: end it before.
            done = done or len(self.open.get(identity, [])) >= self.max_steps - 2
            step = self.step(identity, done, odd)
            batch.append(step)
            self.open.setdefault(identity, []).append(step)
            if done:
                ended.append(self.open.pop(identity))
        data = lazy_stack(batch) if self.turns else torch.stack(batch)
        index = self.rb.extend(data).tolist()
        self.commit(ended)
        if self.cls is ReplayBuffer:
            self.given_out(index, self.stored_of(ended))
        else:
            handle_of = {int(s["number"]): h for s, h in zip(batch, index, strict=True) if h != -1}
            assert handle_of.keys() == {*self.stored_of([batch])}
            self.given_out(handle_of.values(), handle_of)

    @rule()
    def flush(self):
        index = self.rb.writer.flush()
        ended = [[step.clone() for step in episode] for episode in self.open.values()]
        ended.sort(key=lambda episode: int(episode[-1]["number"]))
        for episode in ended:
            episode[-1]["next", "done"] = torch.tensor([True])
        self.open = {}
        self.commit(ended)
        self.given_out(index.tolist(), self.stored_of(ended))

    def stored_of(self, episodes):
        """The numbers of those of their steps that are stored now."""
        stored = {int(step["number"]) for episode in self.stored for step in episode}
        numbers = [int(step["number"]) for episode in episodes for step in episode]
        return [number for number in numbers if number in stored]

    def given_out(self, index, numbers):
        for handle, number in zip(index, numbers, strict=True):
            assert handle >= HANDLES
            handle = HANDLES + numbers_of(handle)  # A sample's also tells of its clip.
            assert self.number_of.setdefault(handle, number) == number

    @rule()
    def empty(self):
        self.rb.empty()
        self.stored, self.open = [], {}

    @precondition(lambda self: self.stored)
    @rule()
    def sample(self):
        if not self.rb.can_sample():
            assert "clips" in self.sampler
            assert max(map(len, self.stored)) < 2
            return
        sample, info = self.rb.sample(return_info=True)
        sample, index = sample.reshape(-1), info["index"].flatten()
        numbers = sample["number"].tolist()
        self.given_out(index.tolist(), numbers)
        if self.cls is TensorDictReplayBuffer:
            assert torch.equal(sample["index"], index)
        if self.sampler == "strided clips":
            return
        places = {
            int(s["number"]): (e, t) for e, ep in enumerate(self.stored) for t, s in enumerate(ep)
        }
        drawn = [places[number] for number in numbers]
        for (e, t), got in zip(drawn, sample.unbind(0), strict=True):
            expected = self.stored[e][t]
            for key in expected.keys(True, True):
                if key not in (("next", "done"), "text"):
                    assert torch.equal(got[key], expected[key]), key
        if self.sampler == "clips by priority":
            self.rb.update_priority(index, torch.arange(len(numbers)) % 3)
        ends = sample["next", "done"].flatten().tolist()
        assert ends[-1]
        for ((e, t), following), end in zip(pairwise(drawn), ends, strict=False):
            assert end or following == (e, t + 1)

    @rule(how=st.sampled_from(HOW))
    def checkpoint(self, how):
        with tempfile.TemporaryDirectory() as folder:
            fresh = saved(self.rb, how, folder, self.new())
        assert torch.equal(fresh._rng.get_state(), self.rb._rng.get_state())
        if self.stored and self.rb.can_sample():
            # Both go on alike.
            twin = self.rb.sample()["number"].tolist()
            assert fresh.sample()["number"].tolist() == twin
        self.rb = fresh

    @rule()
    def save(self):
        state = copy.deepcopy(self.rb.storage.state_dict())
        self.saved.append((state, [*self.stored], dict(self.number_of)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), into_another=st.booleans())
    def load(self, data, into_another):
        """Into the storage that gave other handles out since, or into another one."""
        state, stored, number_of = data.draw(st.sampled_from(self.saved))
        if into_another:  # Handles of then mean their steps there.
            self.rb, self.open, self.number_of = self.new(), {}, dict(number_of)
        self.rb.storage.load_state_dict(copy.deepcopy(state))
        self.stored = [*stored]
        if not into_another:
            # What was given out is of no step of now, even where the same steps are stored again.
            self.number_of = dict.fromkeys(self.number_of, -1)

    def commit(self, ended):
        self.stored += ended
        max_tokens, max_episodes = self.budgets["max_tokens"], self.budgets["max_episodes"]
        while (
            self.steps() > self.max_steps
            or (max_tokens and self.tokens() > max_tokens)
            or len(self.stored) > (max_episodes or 99)
        ):
            del self.stored[0]

    def steps(self):
        return sum(map(len, self.stored))

    def tokens(self):
        total = 0
        for episode in self.stored:
            history = []
            for step in episode:
                prompt = step["tokens", "prompt"].tolist()
                kept = next(
                    (i for i, (a, b) in enumerate(zip(prompt, history, strict=False)) if a != b),
                    min(len(prompt), len(history)),
                )
                history = [*prompt, *step["tokens", "response"].tolist()]
                total += len(history) - kept
        return total

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "rb"):
            return
        storage = self.rb.storage
        assert storage.lengths.tolist() == [len(episode) for episode in self.stored]
        assert len(self.rb) == self.steps()
        if self.budgets["max_tokens"]:
            assert storage.num_tokens == self.tokens()
        for got, expected in zip(storage.episodes(), self.stored, strict=True):
            self.equal(got, expected)
        opened = self.rb.writer.open_episodes
        assert opened.keys() == self.open.keys()
        for identity, expected in self.open.items():
            self.equal(opened[identity], expected)

    @invariant()
    def every_handle_means_its_step_or_none(self):
        if not hasattr(self, "rb"):
            return
        storage = self.rb.storage
        place = {number: i for i, number in enumerate(self.stored_of(self.stored))}
        stays = [handle for handle, number in self.number_of.items() if number in place]
        left = [handle for handle, number in self.number_of.items() if number not in place]
        if stays:
            index, wanted = torch.tensor(stays), [self.number_of[handle] for handle in stays]
            assert storage.get(index)["number"].tolist() == wanted
            assert storage.places(index).tolist() == [place[number] for number in wanted]
            assert storage.contains(index).all()
            assert torch.equal(HANDLES + storage.table.first + storage.places(index), index)
        if left:
            assert not storage.contains(torch.tensor(left)).any()
        for handle in left:
            for index in (handle, torch.tensor([*stays, handle])):
                with pytest.raises(IndexError, match="not stored"):
                    storage.get(index)
            with pytest.raises(IndexError, match="not stored"):
                storage.places(handle)

    def equal(self, got, expected):
        assert got.batch_size == (len(expected),)
        for step, wanted in zip(got.unbind(0), expected, strict=True):
            assert set(step.keys(True, True)) == set(wanted.keys(True, True))
            for key in wanted.keys(True, True):
                if key == "text":
                    assert step[key] == wanted[key]
                else:
                    assert torch.equal(step[key], wanted[key]), key


# A failing run is short enough to be read as it is; to shorten it takes minutes.
Machine.TestCase.settings = runs(60)
TestBuffer = Machine.TestCase
