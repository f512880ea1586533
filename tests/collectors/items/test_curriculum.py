"""A curriculum is told of every item once, and chooses as it would have when a run is cut."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from tests.refusals import check_refused, refused
from tests.tiers import examples
from torchrl_mt.collectors import SuccessRateCurriculum, WeightedCurriculum
from torchrl_mt.collectors.items.items import Items


class Recording:
    """Counts up; remembers what it was told."""

    def __init__(self):
        self.number, self.reports = 0, []

    def next(self):
        self.number += 1
        return {"number": self.number - 1}

    def report(self, item, episodes):
        self.reports.append((item["number"], len(episodes)))

    def state_dict(self):
        return {"number": self.number, "reports": list(self.reports)}

    def load_state_dict(self, state_dict):
        self.number, self.reports = state_dict["number"], list(state_dict["reports"])


def episode(reward):
    return TensorDict({"next": {"reward": torch.tensor([[0.0], [float(reward)]])}}, [2])


def curriculum_of(kind, seed=0):
    items = [{"id": i} for i in range(6)]
    if kind == "rate":
        return SuccessRateCurriculum(items, window=4, revisit=0.3, seed=seed)
    if kind == "weighted":
        return WeightedCurriculum(items, update=lambda w, e: w / 2 + len(e), seed=seed)
    return Recording()


def drive(items, steps, generator, open_items):
    """Give out, be done with and put back at random; what was given out."""
    given = []
    for _ in range(steps):
        action = generator.integers(3)
        if action == 0 or not open_items:
            item = next(items)
            open_items[item.ticket] = item.value
            given.append((item.ticket, dict(item.value)))
            continue
        ticket = sorted(open_items)[generator.integers(len(open_items))]
        del open_items[ticket]
        if action == 1:
            items.done(ticket, [episode(r) for r in generator.integers(2, size=2)])
        else:
            items.put_back(ticket)
    return given


@examples(40, few=20)
@given(
    kind=st.sampled_from(["rate", "weighted", "own"]),
    seed=st.integers(0, 999),
    before=st.integers(0, 30),
    after=st.integers(1, 30),
)
def test_a_run_that_is_cut_goes_on_as_it_would_have(kind, seed, before, after):
    """A state is taken, and the run goes on from it: twice alike, here and in another process."""
    items, open_items = Items(curriculum_of(kind, seed)), {}
    drive(items, before, np.random.default_rng(seed), open_items)
    for ticket in open_items:  # as a collector does with what was not delivered
        items.put_back(ticket)
    state = pickle.loads(pickle.dumps(items.state_dict()))
    on = drive(items, after, np.random.default_rng(1), {})
    other = Items(curriculum_of(kind, seed + 1))
    other.load_state_dict(state)
    assert drive(other, after, np.random.default_rng(1), {}) == on
    assert pickle.dumps(items.state_dict()["following"]) == pickle.dumps(
        other.state_dict()["following"]
    )


def test_every_item_is_reported_once():
    recording, generator, open_items = Recording(), np.random.default_rng(0), {}
    items = Items(recording)
    given = drive(items, 200, generator, open_items)
    items.hand_over()
    reported = [number for number, _ in recording.reports]
    assert len(reported) == len(set(reported)) > 20
    not_done = set(items.state_dict()["open"])
    assert set(reported) == {ticket for ticket, _ in given} - not_done


def test_items_are_reported_although_nothing_more_is_read():
    recording = Recording()
    items = Items(recording)
    items.done(next(items).ticket, [episode(1)])
    assert recording.reports == []
    items.close()
    assert recording.reports == [(0, 1)]


def test_success_rates_keep_what_is_solved_sometimes():
    """Of items that are never, sometimes and always solved, those in between are drawn."""
    probability = [0.0, 0.5, 1.0, 0.5, 0.0]
    curriculum = SuccessRateCurriculum(range(5), revisit=0.1, seed=3)
    generator = np.random.default_rng(0)

    def play(item):
        curriculum.report(item, [episode(generator.random() < probability[item]) for _ in range(8)])

    first, drawn = [curriculum.next() for _ in range(5)], []
    assert sorted(first) == [0, 1, 2, 3, 4]
    for item in first:
        play(item)
    for _ in range(600):
        drawn.append(curriculum.next())
        play(drawn[-1])
    outside = sum(item in (0, 2, 4) for item in drawn) / len(drawn)
    assert 0.05 < outside < 0.16
    assert curriculum.num_inside == 2
    assert (curriculum.rate(0), curriculum.rate(2)) == (0, 1)
    assert 0.1 <= curriculum.rate(1) <= 0.9


def test_a_policy_that_improves_brings_items_back():
    curriculum = SuccessRateCurriculum(["hard"], window=4, revisit=0.0)
    for reward, inside in ((0, 0), (0, 0), (1, 1), (1, 0)):
        curriculum.report(curriculum.next(), [episode(reward), episode(reward)])
        assert curriculum.num_inside == inside
    assert curriculum.rate(0) == 1.0


def test_weights_are_probabilities():
    weights = np.array([1.0, 0.0, 3.0])
    curriculum = WeightedCurriculum(["a", "b", "c"], weights, seed=1)
    drawn = [curriculum.next() for _ in range(4000)]
    shares = np.array([drawn.count(name) for name in "abc"]) / 4000
    assert np.abs(shares - weights / 4).max() < 0.03


def test_equal_items_and_the_same_object_twice():
    same = {"task": "t"}
    curriculum = WeightedCurriculum([same, same, {"task": "t"}], update=lambda w, e: w + 1)
    playing = [curriculum.next() for _ in range(30)]
    for item in playing:
        curriculum.report(item, [episode(1)])
    assert curriculum.weights.sum() == 33
    with pytest.raises(ValueError, match="not reported yet"):
        curriculum.report(same, [])


def test_items_without_an_episode_teach_nothing():
    curriculum = SuccessRateCurriculum(["a"])
    curriculum.report(curriculum.next(), [])
    assert (curriculum.rate(0), curriculum.num_inside) == (None, 1)


def test_what_a_curriculum_raises_is_raised_where_items_are_read():
    class Broken(Recording):
        def report(self, item, episodes):
            raise KeyError("lost")

    items = Items(Broken())
    items.done(next(items).ticket)
    items.hand_over()
    with pytest.raises(RuntimeError, match=r"report\(\) of the data raised KeyError: 'lost'"):
        next(items)


def test_a_curriculum_may_end():
    class Ends(Recording):
        def next(self):
            if self.number == 2:
                raise StopIteration
            return super().next()

    assert [item.value["number"] for item in Items(Ends())] == [0, 1]


OF_TWO = SuccessRateCurriculum([1, 2]).state_dict()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("at least one item", SuccessRateCurriculum, []),
        refused("length and items by index", SuccessRateCurriculum, iter([1]), error=TypeError),
        refused("low <= high, got 0.9 and 0.1", SuccessRateCurriculum, [1], 0.9, 0.1),
        refused("revisit must be a prob… got 2", SuccessRateCurriculum, [1], revisit=2),
        refused("window must be … got 0", SuccessRateCurriculum, [1], window=0),
        refused("each of the 2 items…(1,)", WeightedCurriculum, [1, 2], [1.0]),
        refused("not all zero", WeightedCurriculum, [1, 2], [0, 0]),
        refused("finite", WeightedCurriculum, [1, 2], [1, float("nan")]),
        refused("chooses its items itself", Items, Recording(), shuffle=True),
        refused("one of 2 for 3", SuccessRateCurriculum([1, 2, 3]).load_state_dict, OF_TWO),
    ],
)
def test_bad_input_is_named(call, error, text):
    check_refused(call, error, text)


class Solves(Chat):
    """Rewards the items that it is said to."""

    async def step(self, response):
        result = await super().step(response)
        if self.data["id"] == "fails":
            raise ConnectionError("no answer")
        return dataclasses.replace(result, reward=float(self.data["id"] == "solved"))


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_a_collector_tells_the_curriculum_how_its_groups_went(engine, max_staleness):
    class Three(Recording):
        def next(self):
            item = super().next()
            return {**item, "id": ("solved", "failed", "fails")[item["number"] % 3]}

        def report(self, item, episodes):
            self.reports.append((item["id"], [float(e["next", "reward"].sum()) for e in episodes]))

    curriculum = Three()
    options = {"max_staleness": max_staleness, "max_consecutive_failures": 100}
    with collecting(Solves, engine, curriculum, n=4, group_size=2, **options) as collector:
        batches = iter(collector)
        for done in (4, 8):
            next(batches)
            delivered = [rewards for id, rewards in curriculum.reports if id != "fails"]
            assert sum(map(len, delivered)) == done
            engine.version += 1
    wanted = {"solved": [1.0, 1.0], "failed": [0.0, 0.0], "fails": []}
    assert all(rewards == wanted[id] for id, rewards in curriculum.reports)
    assert {id for id, _ in curriculum.reports} >= {"solved", "failed"}
