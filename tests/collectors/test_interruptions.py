"""What goes wrong around the episodes: data, disks, Ctrl-C, a new beginning. Nothing is lost by it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import queue
import sys
import threading
import time

import pytest
from torch.utils.data import DataLoader
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper

from tests.collectors.chats import Chat, failing
from tests.collectors.runs import (
    balanced,
    beside,
    collecting,
    first_batch,
    played,
    played_to_the_end,
    said,
    versions_in,
)
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import LIMIT
from tests.tiers import first_fast
from tests.waiting import PATIENCE, ctrl_c, wait_until
from torchrl_mt.collectors import Limits
from torchrl_mt.engines import TransformersEngine

COUNTS = ("started", "accepted", "rejected", "running")


def items(n, **more):
    return [{"turns": 1, "k": k, **more} for k in range(n)]


def let_the_loop_see(collector):
    """Until the collector's loop has found out about what was done from outside."""

    async def several_rounds():
        for _ in range(100):
            await asyncio.sleep(0)

    collector._thread.run(several_rounds())


def counts(collector):
    stats = collector.stats()
    assert balanced(stats)
    return {name: stats[name] for name in COUNTS}


def buffer():
    return ReplayBuffer(storage=LazyStackStorage(10_000))


# Data


class Broken:
    """Data with one item that cannot be read."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, k):
        if k == self.bad:
            raise OSError("disk error")
        return {"turns": 1, "k": k}


@pytest.mark.parametrize("staleness", [None, 1])
def test_data_that_raises_is_heard_of(engine, staleness):
    seen = []
    with collecting(Chat, engine, Broken(7), n=2, max_staleness=staleness) as collector:
        with pytest.raises(RuntimeError, match=r"data\[7\] raised OSError: disk error"):
            played_to_the_end(collector, seen)
        assert set(seen) <= set(range(7))
        assert counts(collector)["running"] == 0


@pytest.mark.parametrize("staleness", [None, 1])
def test_items_that_come_back_after_the_data_has_ended_are_played(engine, staleness):
    fails = [False, True]

    def postproc(batch):
        if fails and fails.pop(0):
            raise ValueError("not now")
        return batch

    options = {"cycle": False, "postproc": postproc, "max_staleness": staleness}
    with collecting(Chat, engine, items(6), n=4, **options) as collector:
        seen = played(next(collector.iterator()))
        with pytest.raises(ValueError, match="not now"):
            list(collector.iterator())
        engine.update_weights(None)
        assert sorted(played_to_the_end(collector, seen)) == list(range(6))


class Ticks(Chat):
    """Every episode goes on until all data has been read, and the episodes before it were judged."""

    ticks = read = judged = 0

    async def step(self, response):
        while "error" not in self.data and (Ticks.read < 4 or Ticks.judged < self.data["k"]):
            Ticks.ticks += 1
            await asyncio.sleep(0.001)
        return await super().step(response)

    @staticmethod
    def others_go_on():
        """Block the caller until they have."""
        enough = Ticks.ticks + 3
        wait_until(lambda: Ticks.ticks >= enough)


@pytest.fixture(autouse=True)
def ticks_from_zero():
    Ticks.ticks = Ticks.read = Ticks.judged = 0


def test_slow_data_and_a_slow_judge_delay_nobody_else(engine):
    def data():
        for item in items(4):
            if item["k"] > 0:
                Ticks.others_go_on()
            Ticks.read += 1
            yield item

    def accept(episode):
        if Ticks.judged < 3:
            Ticks.others_go_on()
        Ticks.judged += 1
        return True

    with collecting(Ticks, engine, data(), n=4, accept=accept) as collector:
        assert len(next(iter(collector))) == 4


@pytest.fixture
def pipe():
    """Data that comes from a queue, which is empty now and then."""
    waiting = queue.Queue()
    yield waiting
    waiting.put(None)  # lets go of the thread that reads


def test_a_batch_is_delivered_while_the_data_keeps_us_waiting(engine, pipe):
    for item in items(4):
        pipe.put(item)
    with collecting(Chat, engine, iter(pipe.get, None), n=4, max_staleness=4) as collector:
        assert sorted(played(next(collector.iterator()))) == list(range(4))
        assert collector.state_dict()["items"]["following"] == 4
        collector.shutdown()


def test_ctrl_c_comes_through_while_the_data_keeps_us_waiting(engine, pipe):
    pipe.put(items(1)[0])
    with (
        collecting(Chat, engine, iter(pipe.get, None), n=2) as collector,
        ctrl_c(when=lambda: collector.stats()["accepted"] or engine.calls),
        pytest.raises(KeyboardInterrupt),
    ):
        next(collector.iterator())
    assert counts(collector)["running"] == 0


def test_a_member_that_fails_while_data_is_read_holds_nobody_up(engine):
    """Its item is done with at once, though another is being read."""

    def data():
        yield {"k": 0, "fail_at": 1, "error": OSError("gone")}
        wait_until(lambda: collector.stats()["rejected"])
        for item in items(4)[1:]:
            if item["k"] > 1:
                Ticks.others_go_on()
            if item["k"] == 3:
                Ticks.read = Ticks.judged = 4
            yield item

    with collecting(Ticks, engine, data(), n=3) as collector:
        assert sorted(played(next(collector.iterator()))) == [1, 2, 3]


def accepts_even(episode):
    return episode["data"][0]["k"] % 2 == 0


async def accepts_even_later(episode):
    await asyncio.sleep(0)
    return accepts_even(episode)


def raises_for_odd(episode):
    return 1 / (1 - episode["data"][0]["k"] % 2)


def leaves_for_odd(episode):
    return accepts_even(episode) or sys.exit(3)


async def leaves_for_odd_later(episode):
    return leaves_for_odd(episode)


@pytest.mark.parametrize(
    ("accept", "cause"),
    [
        (accepts_even, "not_accepted"),
        (accepts_even_later, "not_accepted"),
        (raises_for_odd, "ZeroDivisionError"),
        (leaves_for_odd, "SystemExit"),
        (leaves_for_odd_later, "SystemExit"),
    ],
)
def test_what_is_not_accepted_is_rejected(engine, accept, cause, caplog):
    """Also where the function is asynchronous, raises or leaves."""
    options = {"accept": accept, "max_concurrency": 1}
    batch, stats = first_batch(Chat, engine, items(8), n=4, **options)
    assert played(batch) == [0, 2, 4, 6]
    assert stats[f"rejected/{cause}"] == stats["rejected"] == 3
    assert balanced(stats)
    gc.collect()
    assert "never retrieved" not in caplog.text


# Failures in a row


def test_one_failure_is_no_reason_to_stop(engine):
    env, options = failing(lambda k, _: k == 1), {"max_retries": 3, "max_consecutive_failures": 1}
    with collecting(env, engine, items(1), **options) as collector:
        assert len(next(iter(collector))) == 1
        assert counts(collector) == {"started": 2, "accepted": 1, "rejected": 1, "running": 0}


def test_an_item_that_always_fails_does_not_stop_a_run_that_refills(engine):
    data = [{"k": 0, "fail_at": 1, "error": OSError("bad")}, *items(21)[1:]]
    with collecting(Chat, engine, data, n=4, incomplete_groups="refill", cycle=False) as collector:
        seen = [k for batch in collector for k in played(batch)]
        assert sorted(seen) == list(range(1, 21))
        assert collector.stats()["rejected/OSError"] == 17


@pytest.mark.parametrize("staleness", [None, 9])
def test_a_run_that_gave_up_may_be_taken_up_again(engine, staleness):
    is_down = []
    env = failing(lambda *_: is_down)
    options = {"max_consecutive_failures": 4, "max_staleness": staleness}
    with collecting(env, engine, n=16, **options) as collector:
        # With staleness, what was played ahead would be given out before the next failure.
        for _ in range(3 if staleness is None else 1):
            is_down.append(True)
            with pytest.raises(RuntimeError, match="4 episodes in a row"):
                next(collector.iterator())
            is_down.clear()
            assert len(next(collector.iterator())) == 16


class DownAtOnce(Chat):
    """Fails before there is a turn."""

    def reset(self, data=None):
        raise OSError("the server is down")


def endless():
    """More than anybody may ask for."""
    yield from ({"k": k} for k in range(10_000))
    raise AssertionError("this run does not stop")


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("group_size", first_fast([4, 1]))
@pytest.mark.parametrize("staleness", [None, 1])
def test_a_run_that_can_only_fail_stops_whatever_the_data(engine, inline, group_size, staleness):
    """Items come one by one while episodes fail as fast: there is always room for another."""
    env = type("Down", (DownAtOnce,), {"inline": inline})
    options = {"group_size": group_size, "max_staleness": staleness, "max_consecutive_failures": 5}
    with collecting(env, engine, endless(), n=16, **options) as collector:
        with pytest.raises(RuntimeError, match=r"5 episodes in a row .* OSError: the s") as caught:
            next(collector.iterator())
        assert isinstance(caught.value.__cause__, OSError)
        assert counts(collector)["running"] == 0
        with pytest.raises(RuntimeError, match="5 episodes in a row"):
            collector.evaluate(endless())


def test_a_run_that_can_only_fail_stops_while_the_data_keeps_us_waiting(engine, pipe):
    for item in items(3):
        pipe.put(item)
    data, options = iter(pipe.get, None), {"n": 8, "max_consecutive_failures": 3}
    with collecting(DownAtOnce, engine, data, **options) as collector:
        with pytest.raises(RuntimeError, match="3 episodes in a row"):
            next(collector.iterator())
        assert collector.state_dict()["items"]["following"] == 3


@pytest.mark.parametrize("staleness", [None, 1])
def test_the_last_items_failure_is_heard_of(engine, staleness):
    """The data ends at the very item that is one too many."""

    def data():
        yield from [{"fail_at": 1, "error": OSError("gone")}] * 4
        wait_until(lambda: collector.stats()["rejected"] == 4)

    options = {"max_consecutive_failures": 4, "max_staleness": staleness}
    gave_up = pytest.raises(RuntimeError, match="4 episodes in a row")
    with collecting(Chat, engine, data(), n=8, **options) as collector, gave_up:
        next(collector.iterator())


def test_a_failure_between_two_batches_is_heard_of_and_ends_what_goes_on(engine):
    data = [*items(2), *[{"fail_at": 1, "error": OSError("gone")}] * 500]
    options = {"max_consecutive_failures": 4, "max_staleness": 100, "cycle": False}
    with collecting(Chat, engine, data, n=2, **options) as collector:
        batches = collector.iterator()
        next(batches)
        wait_until(lambda: collector.stats()["rejected"] >= 4)  # training
        wait_until(lambda: collector.stats()["running"] == 0)
        assert counts(collector)["started"] < 20
        with pytest.raises(RuntimeError, match="4 episodes in a row"):
            next(batches)


def test_a_pause_that_ends_while_episodes_run_is_over_at_once(engine):
    """The others do not wait for the one that runs."""
    data = [{"turns": 1, "hang_at": 1}, *items(3)]

    def slow():
        for item in data:
            time.sleep(0.1)
            yield item

    with collecting(Chat, engine, slow(), n=4, replay_buffer=buffer()) as collector:
        with collector.pause():
            collector.start()
            time.sleep(0.1)
        wait_until(lambda: collector.stats()["started"] > 0)
        with collector.pause():
            time.sleep(0.3)
        wait_until(lambda: collector.stats()["queue"] == 3)


@pytest.mark.parametrize("staleness", [None, 1])
def test_an_item_that_comes_during_a_pause_waits_for_its_end(engine, pipe, staleness):
    first, second = items(2)
    pipe.put(first)
    options = {"n": 3, "replay_buffer": buffer(), "max_staleness": staleness}
    with collecting(Chat, engine, iter(pipe.get, None), **options) as collector:
        collector.start()
        wait_until(lambda: collector.stats()["queue"] == 1)  # The data is asked for another.
        with collector.pause():
            pipe.put(second)
            time.sleep(0.2)
            assert collector.stats()["started"] == 1
        wait_until(lambda: collector.stats()["queue"] == 2)
        collector.shutdown()


def test_siblings_that_succeed_are_no_failures_in_a_row(engine):
    every_fourth = failing(lambda k, _: k % 4 == 0 and k < 80)
    options = {"n": 4, "group_size": 4, "max_consecutive_failures": 3}
    _, stats = first_batch(every_fourth, engine, **options)
    assert stats["rejected/OSError"] >= 10


def test_a_run_that_gave_up_plays_no_more_and_says_so_at_the_end_of_the_context(engine):
    data = [{"fail_at": 1, "error": OSError("gone")}]
    options = {"n": 2, "max_staleness": 1, "max_consecutive_failures": 3}

    def run():
        with collecting(Chat, engine, data, replay_buffer=buffer(), **options) as collector:
            collector.start()
            wait_until(lambda: not collector.is_running)
            before = counts(collector)
            time.sleep(0.2)
            assert counts(collector) == before
            assert before["running"] == 0

    with pytest.raises(RuntimeError, match="3 episodes in a row"):
        run()


def test_every_cause_is_logged_once(engine, caplog, idle_clock):
    data = [{"k": 0, "hang_at": 1}, {"k": 1, "fail_at": 1, "error": OSError("x")}, *items(4)] * 2
    options = {"limits": Limits(tool_timeout=LIMIT), "accept": lambda td: td["data"][0]["k"] != 3}
    with collecting(Chat, engine, data, n=6, cycle=False, **options) as collector:
        list(collector)
        state = collector.state_dict()
    for cause in ("tool_timeout", "OSError", "not_accepted"):
        assert collector.stats()[f"rejected/{cause}"] == 2
        found = [r for r in caplog.records if f"rejected for {cause};" in r.getMessage()]
        assert len(found) == 1
        assert bool(found[0].exc_info) == (cause == "OSError")
    # A run that goes on is another process: what was logged there is not seen here.
    caplog.clear()
    with collecting(Chat, engine, data[1:2], cycle=False) as collector:
        collector.load_state_dict({**state, "items": collector.state_dict()["items"]})
        list(collector)
    assert said(caplog, "OSError")


# Groups


@pytest.mark.parametrize("staleness", [None, 3])
def test_members_that_are_done_make_room_for_others(engine, staleness):
    """One slow member of each group: all of them at once, not one group after the other."""

    class OneSlow(Chat):
        made = slow = 0

        def reset(self, data=None):
            OneSlow.made += 1
            self.is_slow = OneSlow.made % 8 == 1
            return super().reset(data)

        async def step(self, response):
            OneSlow.slow += self.is_slow
            while self.is_slow and OneSlow.slow < 4:
                await asyncio.sleep(0.001)
            return await super().step(response)

    options = {"n": 32, "group_size": 8, "max_concurrency": 8, "total_episodes": 32}
    first_batch(OneSlow, engine, max_staleness=staleness, **options)
    assert OneSlow.slow == 4
    assert engine.most_running <= 8


# Interrupts


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("staleness", [None, 1])
def test_ctrl_c_settles_every_episode_and_the_run_may_go_on(engine, staleness, group_size):
    """Episodes that had finished are not accepted either."""
    data, size = [*items(3), *items(8, hang_at=1)[3:]], 4 * group_size
    options = {"group_size": group_size, "max_concurrency": size, "max_staleness": staleness}
    with collecting(Chat, engine, data, n=size, cycle=False, **options) as collector:
        with ctrl_c(when=lambda: len(engine.calls) >= size), pytest.raises(KeyboardInterrupt):
            next(iter(collector))
        stats = counts(collector)
        assert stats["accepted"] == stats["running"] == 0
        assert stats["started"] == stats["rejected"] == collector.stats()["rejected/cancelled"]
        for item in data:
            item.pop("hang_at", None)
        assert sorted(played_to_the_end(collector)) == sorted([*range(8)] * group_size)
        assert counts(collector)["running"] == 0


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_ctrl_c_as_a_batch_arrives_loses_none_of_it(engine, staleness, monkeypatch):
    with collecting(Chat, engine, items(8), n=2, max_staleness=staleness, cycle=False) as collector:
        found = played(next(collector.iterator()))
        collector.update_policy_weights_()
        run = collector._thread.run

        def interrupted(coroutine):
            run(coroutine)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(collector._thread, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(collector.iterator())
        assert sorted(played_to_the_end(collector, found)) == list(range(8))
        assert counts(collector)["running"] == 0


def test_ctrl_c_in_an_evaluation_leaves_the_training_alone(engine):
    with collecting(Chat, engine, items(4, sleep=0.01), n=2, replay_buffer=buffer()) as collector:
        collector.start()
        evaluates = ctrl_c(when=lambda: collector.stats().get("eval/running"))
        with evaluates, pytest.raises(KeyboardInterrupt):
            collector.evaluate([{"hang_at": 1}])
        accepted = collector.stats()["accepted"]
        wait_until(lambda: collector.stats()["accepted"] > accepted + 4)
        assert collector.is_running
        assert collector.stats()["eval/rejected/cancelled"] == 1


def test_evaluations_may_run_at_once(engine):
    collector = collecting(Chat, engine, items(2), n=2)
    with collector, beside(*[lambda: collector.evaluate(items(5, sleep=0.02))] * 3):
        pass
    assert collector.stats()["eval/started"] == collector.stats()["eval/accepted"] == 15


@pytest.mark.parametrize(
    ("env", "staleness"), [(Chat, None), (Chat, 5), pytest.param(DownAtOnce, None, id="failing")]
)
def test_nothing_begins_during_a_pause(engine, env, staleness):
    """Also where episodes fail as fast as items come."""
    data = ({"k": k, "sleep": 0.005} for k in itertools.count())
    options = {"max_staleness": staleness, "max_consecutive_failures": 10**9}
    with collecting(env, engine, data, n=2, replay_buffer=buffer(), **options) as collector:
        # Nothing bounds the run but the pause.
        engine.version = 10**6
        collector.start()
        wait_until(lambda: collector.stats()["started"] > 10)
        with collector.pause():
            let_the_loop_see(collector)
            before = collector.stats()["started"]
            time.sleep(0.2)
            assert collector.stats()["started"] == before
        wait_until(lambda: collector.stats()["started"] > before + 4)


def test_a_pause_that_ends_at_the_worst_moment_is_over(engine):
    """The scheduler asks whether it may begin, and a moment later the answer is another one."""
    answers = iter([False, True] * 1000)
    with collecting(Chat, engine, n=2) as collector:
        asked = collector._run.scheduler.gather(2, lambda: next(answers))
        assert len(collector._thread.run(asked)) == 2


def test_what_waits_for_the_loop_is_refused_in_the_loop(engine):
    class Recursive:
        async def arun_episode(self, engine, data):
            await engine.generate([5])
            return {"evaluate": lambda: collector.evaluate([{}]), "shutdown": collector.shutdown}[
                data["call"]
            ]()

    calls = [{"call": "evaluate"}, {"call": "shutdown"}]
    with collecting(Recursive(), engine, calls, max_consecutive_failures=2) as collector:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            next(collector.iterator())
        assert collector.stats()["rejected/RuntimeError"] == 2


# Beginning anew


@pytest.mark.parametrize("staleness", [None, 9])
def test_a_collector_that_has_run_may_load_a_state(engine, staleness):
    options = {"cycle": False, "total_episodes": 6, "max_staleness": staleness}
    with collecting(Chat, engine, items(6), n=2, **options) as collector:
        batches = iter(collector)
        first = played(next(batches))
        state = collector.state_dict()
        rest = sorted(k for batch in batches for k in played(batch))
        collector.load_state_dict(state)
        again = sorted(k for batch in collector for k in played(batch))
        assert rest == again
        assert sorted([*first, *again]) == list(range(6))


def test_a_new_seed_ends_what_runs(engine):
    with collecting(Chat, engine, n=2, max_staleness=3) as collector:
        batches = iter(collector)
        next(batches)
        collector.set_seed(5)
        seeds = [item["seed"] for _ in range(2) for item in next(batches)["data"]]
        assert sorted(seeds) == [5 * 1_000_003 + k for k in range(4)]
        assert counts(collector)["accepted"] == 6


def test_a_new_seed_keeps_to_what_was_allowed(engine):
    with collecting(Chat, engine, n=4, max_staleness=0, total_episodes=12) as collector:
        batches = collector.iterator()
        for _ in range(2):
            next(batches)
            engine.update_weights(None)
        collector.set_seed(5)
        next(batches)
        let_the_loop_see(collector)
        found = counts(collector)
        # The last four may have begun before the new seed.
        assert found.pop("rejected") == found.pop("started") - 12 in (0, 4)
        assert found == {"accepted": 12, "running": 0}


@pytest.mark.slow
def test_a_state_is_one_moment_s(engine):
    """Taken by another thread all the time: what was accepted is what was done with."""
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    states, stop = [], threading.Event()
    data = items(100_000)
    try:
        with collecting(Chat, engine, data, n=4, replay_buffer=buffer()) as collector:

            def look():
                while not stop.is_set():
                    state = collector.state_dict()
                    given = state["items"]["following"] - len(state["items"]["open"])
                    states.append((state["counts"]["accepted"], given))

            with beside(look):
                for k, _ in enumerate(collector):
                    if k > 200 and len(states) > 10:
                        break
                stop.set()
    finally:
        sys.setswitchinterval(switching)
    assert all(accepted == given for accepted, given in states)


def test_a_state_is_not_loaded_under_way(engine):
    with collecting(Chat, engine, items(4), n=2, shuffle=True, replay_buffer=buffer()) as collector:
        state = collector.state_dict()
        collector.start()
        for call in (lambda: collector.load_state_dict(state), lambda: collector.set_seed(1)):
            with pytest.raises(RuntimeError, match="in the background"):
                call()


def test_versions_go_on_from_those_of_the_saved_run(tokenizer, tmp_path):
    def run(state=None):
        own = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
        with collecting(Chat, own, items(4), n=2, dump_dir=tmp_path) as collector:
            if state is not None:
                collector.load_state_dict(state)
            for _ in range(3):
                batch = next(iter(collector))
                collector.update_policy_weights_({})
            return collector.state_dict(), collector, batch

    state, collector, _ = run()
    assert collector.policy_version == state["policy_version"] == 3
    _, collector, batch = run(state)
    assert collector.policy_version == collector.get_policy_version() == 6
    assert versions_in(batch) == {5}
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {f"{k}.jsonl" for k in range(6)}


# Records


def test_a_dump_that_fails_costs_no_episode(engine, tmp_path, caplog, monkeypatch):
    with collecting(Chat, engine, items(8), n=2, cycle=False, dump_dir=tmp_path) as collector:

        def full(*args, **kwargs):
            raise OSError("no space left on device")

        monkeypatch.setattr(collector._dump, "write", full)
        assert [k for batch in collector for k in played(batch)] == list(range(8))
        assert collector.stats()["dump_errors"] == 4
    assert len(said(caplog, "could not be dumped")) == 1


# The end


@pytest.mark.slow
def test_no_process_of_a_data_loader_is_left(engine):
    before = set(multiprocessing.active_children())
    loader = DataLoader(items(8), num_workers=1, batch_size=2)
    with collecting(Chat, engine, loader, n=2) as collector:
        next(iter(collector))
        assert set(multiprocessing.active_children()) - before
    wait_until(lambda: not set(multiprocessing.active_children()) - before)
    assert collector.state_dict()["items"]["following"] == 2


def test_what_is_collected_in_the_background_is_counted_before_the_end(engine):
    writing = threading.Event()

    def slowly(batch):
        writing.set()
        time.sleep(0.3)
        return batch

    rb = buffer()
    collector = collecting(Chat, engine, items(2), n=2, replay_buffer=rb, postproc=slowly)
    collector.start()
    assert writing.wait(PATIENCE)
    collector.shutdown()
    assert not any(t.name == "torchrl_mt-collect" for t in threading.enumerate())
    assert len(rb) == counts(collector)["accepted"] == 2


def test_a_collector_is_true_and_takes_weights_by_any_of_torchrls_names(engine):
    with collecting(Chat, engine, items(2), n=2) as collector:
        assert collector
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_(policy=object())
        collector.update_policy_weights_(weights={"a": 1})
        collector.update_policy_weights_(weights_dict={"policy": {"a": 1}}, worker_ids=[0])
        assert collector.policy_version == 3
        assert min(versions_in(next(batches))) == 3
        with pytest.raises(TypeError, match="once"):
            collector.update_policy_weights_({"a": 1}, policy={"a": 2})
        collector.set_postproc(lambda batch: batch[:1])
        assert len(next(iter(collector))) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_sampling_with_weights_that_are_being_trained_is_warned_of(
    model, tokenizer, caplog, shared
):
    policy = TransformersEngine(model, tokenizer, share_weights=shared)
    for staleness in (None, 1):
        collecting(Chat, policy, n=2, max_staleness=staleness).shutdown()
    policy.close()
    assert len(said(caplog, "share_weights=False")) == shared


def test_a_policys_engine_is_ended_with_the_collector(model, tokenizer):
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=True, return_log_probs=True
    )
    first_batch(Chat, policy, n=2)
    assert not any("policy" in thread.name for thread in threading.enumerate())
