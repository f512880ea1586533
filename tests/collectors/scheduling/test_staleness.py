"""How far ahead of the training episodes are played: never further than allowed, and always as far."""

from __future__ import annotations

import asyncio
import itertools
import queue
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.collectors.chats import Chat
from tests.collectors.runs import balanced, collecting, played, said, versions_in
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import examples, first_fast
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.collectors.scheduling.staleness import Lead

PHASES = [Phase.explicit, Phase.generate]


def allowed(events, staleness, size):
    """The rule, from all that has happened: updates (``"u"``), deliveries (their sizes), and asking for
    a batch (``"a"``).
    """
    updates = events.count("u")
    last = max((k for k, event in enumerate(events) if event in ("u", "a")), default=-1)
    done_with = sum(event for event in events[: last + 1] if event not in ("u", "a"))
    return min((staleness + updates + 1) * size, done_with + (staleness + 1) * size)


@examples(200, few=100)
@given(
    batches=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 4)), max_size=8
    ),
    staleness=st.integers(0, 3),
    size=st.integers(1, 4),
    version=st.integers(0, 3),
)
def test_what_may_be_begun_follows_from_the_order_of_updates_and_deliveries(
    batches, staleness, size, version
):
    lead, delivered, events = Lead(staleness, size, version), 0, []
    for before, meanwhile, batch in batches:
        for event in ["u"] * before + ["a"] + ["u"] * meanwhile + [batch]:
            events.append(event)
            if event == "u":
                version += 1
            elif event == "a":
                lead.ask()
            else:
                delivered += event
                lead.deliver(delivered, version)
            assert lead.allowed(version) == allowed(events, staleness, size)


class Watched:
    """A collector whose episodes are counted as they begin."""

    def __init__(self, tokenizer, data=({"turns": 1},), **kwargs):
        self.engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
        self.collector = collecting(Chat, self.engine, list(data), **kwargs)
        self.events, self.leads = [], []
        self.versions = []
        """Of the engine, as each batch was delivered."""
        tally = self.collector._counts
        start = tally.start

        def watched(episode):
            start(episode)
            stats = tally.stats()
            self.leads.append(stats["started"] - stats["rejected"] - stats["accepted"])

        tally.start = watched

    def update(self, times):
        for _ in range(times):
            self.collector.update_policy_weights_(None)
            self.events.append("u")

    def update_until_it_may_go_on(self, staleness, size):
        delivered = sum(event for event in self.events if event != "u")
        while delivered + size > allowed([*self.events, "a"], staleness, size):
            self.update(1)

    def delivered(self, size):
        self.events.append(size)
        self.versions.append(self.engine.version)


@examples(12, few=4, phases=PHASES)
@given(data=st.data())
def test_the_lead_is_bounded_and_iteration_goes_on_whatever_the_updates(tokenizer, data):
    """Several updates a batch or none, a new beginning in the middle, groups, failures, evaluation."""
    staleness, group_size = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 2, 3]))
    size = 6
    goes = [{"turns": 1 + k % 2, "sleep": 0.001 * (k % 3)} for k in range(500)]
    items = [{**each, "fail_at": k % 7 == 3, "error": OSError()} for k, each in enumerate(goes)]
    kwargs = {
        **{"n": size, "group_size": group_size, "max_staleness": staleness},
        "incomplete_groups": data.draw(st.sampled_from(["drop", "keep"])),
        "max_concurrency": data.draw(st.sampled_from([1, 4, 40])),
        "yield_groups": data.draw(st.booleans()),
        "total_episodes": data.draw(st.sampled_from([-1, 48])),
    }
    state = None
    for _ in range(2):
        run = Watched(tokenizer, items, **kwargs)
        with run.collector as collector:
            if state is not None:
                collector.load_state_dict(state)
            run.update(data.draw(st.integers(0, 2)))
            batches = iter(collector)
            for _ in range(data.draw(st.integers(1, 4))):
                run.update_until_it_may_go_on(staleness, size)
                next(batches)
                run.delivered(size)
                if data.draw(st.booleans()):
                    collector.evaluate([{"turns": 1}] * 3)
                time.sleep(0.001 * data.draw(st.integers(0, 5)))
                run.update(data.draw(st.integers(0, 3)))
            assert max(run.leads) <= (staleness + 1) * size + group_size - 1
            state = collector.state_dict()


@examples(12, few=4, phases=PHASES)
@given(
    staleness=st.integers(0, 2),
    first=st.integers(0, 2),
    updates=st.lists(st.integers(0, 3), min_size=3, max_size=8),
    resumed=st.booleans(),
)
def test_episodes_that_come_in_order_are_no_older_than_the_lead(
    tokenizer, staleness, first, updates, resumed
):
    """Each is begun after the update that follows the batch ``max_staleness + 1`` batches before."""
    size, options = 3, {"staleness": "admission", "max_concurrency": 1}
    run = Watched(tokenizer, n=size, max_staleness=staleness, **options)
    begun_by = [first] * (staleness + 1)
    """By batch, the least version of its tokens."""
    with run.collector as collector:
        if resumed:
            collector.load_state_dict(collector.state_dict())
        run.update(first)
        batches = iter(collector)
        for k, times in enumerate(updates):
            batch = next(batches)
            run.delivered(size)
            assert min(versions_in(batch)) >= begun_by[k]
            if min(updates) > 0:
                most = max(updates[:k], default=1)
                assert collector.stats()["staleness/max"] <= (staleness + 1) * most - 1
            run.update(times)
            time.sleep(0.06 * (k % 2))
            run.update_until_it_may_go_on(staleness, size)
            begun_by.append(run.versions[k] + (run.engine.version > run.versions[k]))


@pytest.mark.parametrize("order", first_fast(["load, update", "update, load", "load"]))
def test_an_update_before_the_first_batch_leaves_the_lead_as_it_is(engine, order):
    def collector():
        return collecting(Chat, engine, [{"turns": 1}], n=4, max_staleness=1, max_concurrency=1)

    def play(collector):
        ages = []
        for _ in zip(range(6), collector, strict=False):
            ages.append(collector.stats()["staleness/max"])
            collector.update_policy_weights_(None)
            # Training, in which the next ones are played.
            wait_until(lambda: collector.stats()["queue"] == 8)
        return ages

    with collector() as first:
        assert play(first) == [0.0] + [1.0] * 5
        state = first.state_dict()
    with collector() as second:
        for step in order.split(", "):
            if step == "load":
                second.load_state_dict(state)
            else:
                second.update_policy_weights_(None)
        assert play(second) == [0.0] + [1.0] * 5


@examples(10, few=3, phases=PHASES)
@given(
    staleness=st.integers(0, 2),
    first=st.integers(0, 2),
    updates=st.lists(st.integers(1, 3), min_size=2, max_size=6),
)
def test_a_buffer_is_filled_as_far_ahead_as_allowed(tokenizer, staleness, first, updates):
    """In the background, where what is written is delivered; each batch is waited for and trained on."""
    size, rb = 4, ReplayBuffer(storage=LazyStackStorage(10_000))
    run = Watched(tokenizer, n=size, max_staleness=staleness, replay_buffer=rb)
    with run.collector as collector:
        run.update(first)
        collector.start()
        for k, times in enumerate(updates):
            batches = k + 1
            wait_until(lambda: len(rb) >= batches * size)  # noqa: B023
            run.update(times)
        collector.async_shutdown()
        assert max(run.leads) <= (staleness + 1) * size


# A maximum: what would be delivered older is played again


class Slow(Chat):
    """Takes as many turns of other work as its item says, so that some are overtaken by all others."""

    async def step(self, response):
        for _ in range(self.data["rounds"]):
            await asyncio.sleep(0.001)
        return await super().step(response)


def heavy_tailed(rng, n):
    return [
        {"k": k, "turns": rng.randint(1, 3), "rounds": min(int(rng.lognormvariate(0.5, 1.5)), 60)}
        for k in range(n)
    ]


@examples(20, few=4, phases=PHASES)
@given(
    staleness=st.integers(0, 3),
    group_size=st.sampled_from([1, 2, 3]),
    updates=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    rate=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_nothing_older_than_the_maximum_is_delivered_and_no_item_is_lost(
    tokenizer, staleness, group_size, updates, rate, seed
):
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    rng, size, seen, sizes = random.Random(seed), 6, set(), Counter()
    data, concurrency = heavy_tailed(rng, 24), rng.choice([2, 6, 40])
    options = {"n": size, "group_size": group_size, "max_staleness": staleness, "cycle": False}
    with collecting(Slow, engine, data, max_concurrency=concurrency, **options) as collector:
        for batch, times in zip(collector, itertools.cycle(updates), strict=False):
            age = engine.version - min(versions_in(batch))
            assert age == collector.stats()["staleness/max"] <= staleness
            seen.update(played(batch))
            ends = batch["next", "done"].flatten()
            sizes.update(batch["group"][ends].tolist())
            for _ in range(max(times, 1)):
                time.sleep(rng.random() * 0.02)
                collector.update_policy_weights_(None)
        stats = collector.stats()
    assert sorted(seen) == list(range(24))
    assert set(sizes.values()) == {group_size}
    assert stats["accepted"] == 24 * group_size
    assert stats["rejected"] == stats.get("rejected/stale", 0)
    assert balanced(stats, running=0)


def test_weights_that_change_while_a_batch_is_made_count(engine):
    """By the time it is written it is too old: it is made anew of what is not."""
    late = iter([True, False, True])

    def postproc(batch):
        if next(late, False):
            engine.update_weights(None)
        return batch

    data, seen = [{"turns": 1, "k": k} for k in range(12)], []
    options = {"max_staleness": 0, "postproc": postproc, "cycle": False}
    with collecting(Chat, engine, data, n=4, **options) as collector:
        for batch in collector:
            seen += played(batch)
            assert collector.stats()["staleness/max"] == 0
            engine.update_weights(None)
        stats = collector.stats()
    assert sorted(seen) == list(range(12))
    assert stats["rejected"] == stats["rejected/stale"] >= 8


def test_in_the_background_nothing_older_is_written(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    ages = []

    class Buffer(ReplayBuffer):
        def extend(self, batch):
            ages.append(engine.version - min(versions_in(batch)))
            return super().extend(batch)

    rng, options = random.Random(0), {"n": 4, "max_staleness": 1, "max_concurrency": 8}
    options["replay_buffer"] = Buffer(storage=LazyStackStorage(10_000))
    with collecting(Slow, engine, heavy_tailed(rng, 200), **options) as collector:
        collector.start()
        for _ in range(40):
            before = len(ages)
            wait_until(lambda: len(ages) > before)  # noqa: B023
            for _ in range(rng.randint(1, 2)):
                with collector._delivering:  # not between looking and writing
                    collector.update_policy_weights_(None)
                time.sleep(0.005)
        assert collector.stats()["rejected/stale"] > 0
    assert max(ages) == 1


def test_a_run_that_rejects_more_as_stale_than_it_delivers_says_so(engine, caplog):
    """The trainer does not wait for what it is to be trained on."""
    data = [{"turns": 1, "rounds": 40}]
    with in_the_background(engine, data, Slow, max_staleness=0) as collector:
        collector.start()

        def updated():
            collector.update_policy_weights_(None)
            return "rejected as stale" in caplog.text

        wait_until(updated)
    assert caplog.text.count("rejected as stale") == 1
    assert collector.stats()["accepted"] < collector.stats()["rejected/stale"]


# Who waits for weights that nobody hands over is told so


def stalls(caplog):
    return said(caplog, "waits for new weights")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    for name in ("STALL_SECONDS", "BACKGROUND_STALL_SECONDS"):
        monkeypatch.setattr(f"torchrl_mt.collectors.scheduling.run_warnings.{name}", 0.2)


def in_the_background(engine, data=({"turns": 1},), env=Chat, **kwargs):
    rb = ReplayBuffer(storage=LazyStackStorage(10_000))
    kwargs = {"n": 4, "max_staleness": 1, **kwargs}
    return collecting(env, engine, data, replay_buffer=rb, **kwargs)


def test_each_stall_is_told_of_once(engine, caplog):
    with in_the_background(engine) as collector:
        collector.start()
        wait_until(lambda: stalls(caplog))
        (message,) = stalls(caplog)
        for part in ("update_policy_weights_", "max_staleness=1", "8 delivered", "0 updates"):
            assert part in message
        time.sleep(0.6)
        assert len(stalls(caplog)) == 1
        collector.update_policy_weights_(None)
        wait_until(lambda: len(stalls(caplog)) == 2)
        assert "12 delivered" in stalls(caplog)[1]
        time.sleep(0.6)
        assert len(stalls(caplog)) == 2


def test_who_iterates_is_told_too(engine, caplog):
    with in_the_background(engine) as collector:
        batches = iter(collector)
        next(batches)
        next(batches)
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(next, batches)
            wait_until(lambda: stalls(caplog))
            collector.update_policy_weights_(None)
            third.result(PATIENCE)


@pytest.mark.parametrize(
    "why", first_fast(["pause", "slow episodes", "slow data", "training", "the end"], 2)
)
def test_whatever_else_keeps_us_waiting_is_no_stall(engine, caplog, why):
    waiting = queue.Queue()
    waiting.put({"turns": 1})
    kwargs = {
        "slow episodes": {"data": [{"hang_at": 1}]},
        "slow data": {"data": iter(waiting.get, None)},
        "the end": {"total_episodes": 8},
    }.get(why, {})
    with in_the_background(engine, **kwargs) as collector:
        with collector.pause() if why == "pause" else nullcontext():
            if why == "training":
                next(iter(collector))
            else:
                collector.start()
            time.sleep(0.8)
        waiting.put(None)
        assert not stalls(caplog)
