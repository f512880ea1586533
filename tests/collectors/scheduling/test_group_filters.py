"""Groups that teach nothing are refused, and others take their place."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting, first_batch, played
from torchrl_mt.collectors import context, has_spread


class Graded(Chat):
    """Members of a group earn different rewards if their item says so."""

    async def step(self, response):
        step = await super().step(response)
        object.__setattr__(step, "reward", float(self.data["spread"] * context.get().sample_idx))
        return step


def items(n, every=1):
    return [{"turns": 1, "k": k, "spread": int(k % every == 0)} for k in range(n)]


def of_size(*rewards, valid=None):
    entries = {("next", "reward"): torch.tensor(rewards)[:, None]}
    if valid is not None:
        entries["valid"] = torch.full((len(rewards),), valid)
    return TensorDict(entries, [len(rewards)])


def test_spread_is_of_what_whole_episodes_earned():
    assert has_spread([of_size(1.0), of_size(0.0)])
    assert not has_spread([of_size(1.0, 0.0), of_size(0.5, 0.5), of_size(1.0)])
    assert not has_spread([of_size(1.0), of_size(0.0, valid=False)])
    assert has_spread([of_size(1.0), of_size(0.0, valid=True)])
    assert not has_spread([of_size(0.0, valid=False)] * 2)
    assert not has_spread([of_size(*[0.1] * 10), of_size(1.0)])
    assert has_spread([of_size(1.0), of_size(float("nan"))]) is False


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("staleness", [None, 1])
def test_refused_groups_are_counted_and_others_take_their_place(
    engine, staleness, is_async, capsys
):
    async def later(episodes):
        return has_spread(episodes)

    options = {"accept_group": later if is_async else has_spread, "max_staleness": staleness}
    options |= {"n": 4, "group_size": 2, "progress": True, "cycle": False}
    seen = []
    with collecting(Graded, engine, items(30, every=3), **options) as collector:
        for batch in collector:
            assert len(batch) == 4
            seen += played(batch)
            engine.update_weights(None)
    stats = collector.stats()
    assert sorted(set(seen)) == list(range(0, 30, 3))
    assert stats["rejected"] == stats["rejected/group_not_accepted"] == 40
    assert stats["groups/refused"] == 20
    assert re.search(r"refused=[1-9]", capsys.readouterr().err)
    assert collector.state_dict()["items"]["open"] == []


def test_a_group_is_judged_whole_and_in_order(engine):
    seen = []

    def accept_group(episodes):
        seen.append([(e["data"][0]["k"], float(e["next", "reward"].sum())) for e in episodes])
        return True

    options = {"group_size": 3, "accept_group": accept_group, "cycle": False}
    with collecting(Graded, engine, items(3), n=9, **options) as collector:
        next(iter(collector))
        collector.evaluate(items(2), n=2)  # is not judged
    assert sorted(seen) == [[(k, 0.0), (k, 1.0), (k, 2.0)] for k in range(3)]


@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize(("attempts", "tried"), [(None, 20), (5, 5)])
def test_a_run_that_refuses_everything_stops_and_may_go_on(engine, attempts, tried, staleness):
    accepted = []
    options = {"total_attempts": attempts, "max_staleness": staleness, "n": 4, "group_size": 2}
    options["accept_group"] = lambda episodes: bool(accepted)
    with collecting(Graded, engine, items(7, every=100), **options) as collector:
        with pytest.raises(RuntimeError, match=f"refused {tried} of the {tried} groups"):
            next(collector.iterator())
        assert collector.stats()["groups/refused"] >= tried
        assert collector.stats()["running"] == 0 or staleness is not None
        accepted.append(True)
        assert len(next(collector.iterator())) == 4


def test_one_that_raises_refuses_by_its_cause(engine):
    def accept_group(episodes):
        return 1 / episodes[0]["data"][0]["spread"]

    options = {"group_size": 2, "accept_group": accept_group, "cycle": False}
    _, stats = first_batch(Graded, engine, items(6, every=2), n=6, **options)
    assert stats["rejected/ZeroDivisionError"] >= 4


def test_a_curriculum_is_told_of_groups_that_were_refused(engine):
    """That an item teaches nothing is what it steers by."""

    class Told:
        def __init__(self):
            self.left, self.reports = iter(items(12, every=2)), {}

        def next(self):
            return next(self.left)

        def report(self, item, episodes):
            self.reports[item["k"]] = len(episodes)

    data = Told()
    with collecting(Graded, engine, data, n=4, group_size=2, accept_group=has_spread) as collector:
        assert sum(len(batch) for batch in collector) == 12
        assert data.reports == dict.fromkeys(range(12), 2)
