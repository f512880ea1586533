"""What is decided in the collector's process, with workers in threads of it."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from tests.collectors.distributed.conftest import played_while_workers_die
from tests.collectors.distributed.played import (
    Picky,
    SeededEngine,
    Talk,
    broken_engine,
    has_hung,
    items,
    ledger,
    may_go_on,
    slow_engine,
    weights,
)
from tests.collectors.runs import balanced, beside, played, run_of, versions_in
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.collectors import AgentOptions, Limits
from torchrl_mt.collectors.distributed import workers
from torchrl_mt.collectors.distributed.workers import WorkersFailedError


class ListBuffer(list):
    """A buffer that keeps batches."""

    extend = list.append


OPTIONS = {"n": 8, "group_size": 2, "cycle": False, "sampling": {"seed": 3}}
ONCE_MORE = {**OPTIONS, "cycle": True}


def versions_are_right(batch):
    """Weights of version ``v`` are ``v`` in these tests, and log-probs lie in ``[v - 1, v]``."""
    log_probs, versions = (
        torch.cat(batch.get((name, "response"), as_list=True)) for name in ("log_probs", "versions")
    )
    assert ((log_probs <= versions) & (log_probs >= versions - 1)).all()


@pytest.mark.parametrize(
    "limits", [Limits(max_turns=2), Limits(max_response_tokens=2, on_cut="continue")]
)
def test_batches_are_those_of_one_process(in_threads, limits):
    options = {**OPTIONS, "limits": limits, "accept": lambda td: len(td) != 1}
    with in_threads(Talk, SeededEngine, items(16), **options) as collector:
        batches = list(collector)
        stats = collector.stats()
        loads = [handle.methods.count("play") for handle in in_threads.backends[-1].started]
    expected, of_one = run_of(Talk, SeededEngine(), items(16), **options)
    for name in ("started", "accepted", "turns", "tokens"):
        assert stats[name] == of_one[name]
    assert ledger(batches) == ledger(expected)
    assert min(loads) >= 8
    assert stats["time/environment"] > 0


def test_no_item_is_lost_or_doubled_when_workers_die(in_threads, tmp_path):
    rng = random.Random(0)

    def die(collector):
        started = in_threads.backends[-1].started
        wait_until(lambda: any(each.is_playing() for each in started))
        time.sleep(0.01)
        rng.choice([each for each in started if not each.ended.done()]).die()

    found = played_while_workers_die(in_threads, die, tmp_path, sleep=0.005, **OPTIONS)
    assert all(len(found[k, member]) == 1 + k % 3 for k, member in found)


def test_versions_are_those_of_the_weights_also_after_a_restart(in_threads):
    data = items(64, turns=3)
    with in_threads(Talk, slow_engine, data, max_staleness=2, **ONCE_MORE) as collector:
        iterator = iter(collector)
        for version in range(6):
            if version == 3:
                in_threads.backends[-1].started[0].die()
            assert collector.policy_version == version
            batch = next(iterator)
            versions_are_right(batch)
            assert version - 2 <= min(versions_in(batch)) <= version
            collector.update_policy_weights_(weights(version + 1.0))
        wait_until(lambda: len(in_threads.backends[-1].started) == 3)
        collector.increment_version()
        assert collector.policy_version == 7
        again = in_threads.backends[-1].started[2]
        wait_until(lambda: again.methods.count("play") > 0)
    assert again.methods.index("restore") < again.methods.index("play")


def test_running_episodes_that_become_too_old_are_cancelled(in_threads, tmp_path):
    flag = tmp_path / "go"
    data = [{"k": 0, "turns": 2, "wait_for": str(flag)}, *items(64, turns=1)]
    options = {**ONCE_MORE, "group_size": 1, "n": 4}
    with in_threads(Talk, SeededEngine, data, **options, max_staleness=1) as collector:
        for version, _ in zip(range(4), collector, strict=False):
            collector.update_policy_weights_(weights(version + 1.0))
        wait_until(lambda: collector.stats().get("rejected/stale", 0) >= 1)
        started = in_threads.backends[-1].started
        assert sum(handle.methods.count("cancel") for handle in started) >= 1
        flag.touch()


def test_weights_that_no_engine_takes_count_nowhere(in_threads):
    with in_threads(Talk, Picky, items(16), **OPTIONS) as collector:
        collector.update_policy_weights_(weights(1.0))
        with pytest.raises(ValueError, match="w must be positive"):
            collector.update_policy_weights_(weights(-1.0))
        assert collector.policy_version == 1
        for batch in collector:
            versions_are_right(batch)


def test_updates_after_shutdown_are_refused(in_threads):
    seen = []
    for more in ({}, {"on_update": seen.append}):
        collector = in_threads(Talk, SeededEngine, items(4), **OPTIONS, **more)
        collector.shutdown()
        for call in (
            lambda c: c.update_policy_weights_(weights(1.0)),
            lambda c: c.update_policy_weights_(),
            lambda c: c.increment_version(),
            lambda c: c.set_seed(1),
            next,
        ):
            with pytest.raises(RuntimeError, match="was shut down: make a new one"):
                call(iter(collector) if call is next else collector)
        assert collector.policy_version == 0
    assert not seen


def test_a_shutdown_ends_an_update_with_an_error(in_threads):
    with in_threads(Talk, StuckEngine, items(4), **OPTIONS) as collector:
        may_load.clear()
        started = in_threads.backends[-1].started

        def close():
            wait_until(lambda: all("update" in each.methods for each in started))
            collector.shutdown(0.0, raise_on_error=False)

        with beside(close):
            with pytest.raises(RuntimeError, match="was shut down"):
                collector.update_policy_weights_(weights(1.0))
            may_load.set()


def test_on_update_sends_the_weights_elsewhere(in_threads):
    seen, given = [], weights(5.0)
    with in_threads(Talk, SeededEngine, items(4), on_update=seen.append, **OPTIONS) as collector:
        collector.update_policy_weights_(given)
        (batch,) = list(collector)
        started = in_threads.backends[-1].started
        assert not any("update" in handle.methods for handle in started)
    assert seen == [given]
    assert set(batch[0]["versions", "response"].tolist()) == {1}
    assert (batch[0]["log_probs", "response"] <= 0).all()


def test_each_worker_may_have_a_factory_of_its_own(in_threads):
    with in_threads(Talk, [SeededEngine, Picky], items(4), **OPTIONS) as collector:
        assert len(list(collector)) == 1
        started = in_threads.backends[-1].started
        engines = {type(each.host._object._engine._engine) for each in started}
    assert engines == {SeededEngine, Picky}


def test_a_worker_that_dies_again_and_again_ends_the_run(in_threads):
    with in_threads(Talk, slow_engine, items(64, turns=20), max_restarts=2, **OPTIONS) as collector:
        backend = in_threads.backends[-1]

        def destroy():
            for number in range(2, 5):
                backend.started[-1].die()
                wait_until(lambda number=number: len(backend.started) > number or number == 4)

        failed = pytest.raises(WorkersFailedError, match=r"died 3 times in a row.*max_restarts=2")
        with beside(destroy), failed:
            list(collector)
        assert balanced(collector.stats())


def test_evaluation_pause_and_states(in_threads):
    with in_threads(Talk, SeededEngine, items(16), **OPTIONS) as collector:
        evaluated = collector.evaluate([{"k": 40}, {"k": 41}], n=2)
        assert played(evaluated) == [40] * 4 + [41] * 6
        assert collector.stats()["eval/accepted"] == 4
        iterator = iter(collector)
        first = next(iterator)
        collector.update_policy_weights_(weights(1.0))
        state = collector.state_dict()
    with in_threads(Talk, SeededEngine, items(16), **OPTIONS) as collector:
        collector.load_state_dict(state)
        assert collector.policy_version == 1
        rest = list(collector)
        assert set().union(*map(versions_in, rest)) == {1}
    found = ledger([first, *rest])
    assert sorted(found) == [(k, member) for k in range(16) for member in range(2)]


def test_deaths_in_an_evaluation_keep_the_order(in_threads):
    with in_threads(Talk, slow_engine, items(4), **OPTIONS) as collector:
        killing = threading.Timer(0.05, in_threads.backends[-1].started[0].die)
        killing.start()
        evaluated = collector.evaluate(items(12, turns=6), n=2)
        killing.join()
    assert played(evaluated) == [k for k in range(12) for _ in range(12)]


def test_long_calls_are_seen(in_threads, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_mt.collectors.distributed.player._WATCH_SECONDS", 0.01)
    flag, options = tmp_path / "go", {**OPTIONS, "replay_buffer": ListBuffer()}
    with in_threads(Talk, SeededEngine, items(4, wait_for=str(flag)), **options) as collector:
        collector.start()
        wait_until(lambda: collector.stats()["waiting/longest"] > 0.05)
        flag.touch()
        wait_until(lambda: collector.stats()["accepted"] == 8)


@pytest.fixture
def one_hangs(in_threads, monkeypatch):
    """Make collectors of which a worker hangs until ``may_go_on``; their patience is short."""
    monkeypatch.setattr("torchrl_mt.collectors.distributed.player._WATCH_SECONDS", 0.01)
    monkeypatch.setattr(workers, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(workers, "SILENT_SECONDS", 0.3)
    said = []
    monkeypatch.setattr(
        workers._logger, "warning", lambda text, *args, **_: said.append(text % args)
    )
    data = [{"k": 1, "turns": 1, "hangs": True}, *items(7)]

    def make(**limits):
        options = {**OPTIONS, "limits": Limits(**limits), "group_size": 1, "max_retries": 99}
        return in_threads(Talk, SeededEngine, data, **options), said

    has_hung.clear()
    may_go_on.clear()
    yield make
    may_go_on.set()


def test_a_worker_that_hangs_is_named_and_not_asked_again(in_threads, one_hangs):
    collector, said = one_hangs()
    with collector:
        with beside(lambda: (wait_until(lambda: said), may_go_on.set())):
            (batch,) = list(collector)  # It waited for the worker.
        assert len(ledger([batch])) == 7
        wait_until(lambda: len(said) == 2)
        asked = [each.methods.count("report") for each in in_threads.backends[-1].started]
    hung, again = said
    assert "has not answered for 0 s" in hung
    assert again == f"{hung[:12]} answers again."
    assert min(asked) < max(asked)


@pytest.mark.parametrize("timeout", ["episode_timeout", "turn_timeout"])
def test_time_runs_out_for_episodes_of_a_worker_that_hangs(in_threads, one_hangs, timeout):
    collector, _ = one_hangs(**{timeout: 0.2})
    iterator = iter(collector)  # Its end is the collector's, which waits for the worker.
    try:
        batch = next(iterator)
        stats = collector.stats()
    finally:
        may_go_on.set()
        collector.shutdown()
    assert len(ledger([batch])) == 7  # What waited for the worker was played by the other.
    assert stats["rejected"] == stats[f"rejected/{timeout}"] >= 2


class Unreadable:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


LOCK = r"pickling the item \{'k': 1, 'thing': <unlocked _thread\.lock.* raised "
UNREADABLE = r"the item was sent to another process, but unpickling it there raised Val"


@pytest.mark.parametrize(("thing", "said"), [(threading.Lock(), LOCK), (Unreadable(), UNREADABLE)])
def test_an_item_that_cannot_be_sent_is_rejected_by_name(in_threads, thing, said):
    bad = {"k": 1, "thing": thing}
    with in_threads(Talk, SeededEngine, [*items(1), bad, *items(1)], **OPTIONS) as collector:
        assert sum(map(len, collector)) == 4
        assert collector.stats()["rejected/TypeError"] >= 1
        with pytest.raises(RuntimeError, match=f"no episode .* TypeError: .*{said}"):
            collector.evaluate([bad])


def test_sampling_that_cannot_be_sent_ends_the_run(in_threads):
    options = {**ONCE_MORE, "sampling": {"lock": threading.Lock()}, "max_consecutive_failures": 3}
    named = pytest.raises(RuntimeError, match=r"3 episodes .* arguments of sampling are sent to th")
    with in_threads(Talk, SeededEngine, items(4), **options) as collector, named:
        next(iter(collector))


def test_bad_data_leaves_no_workers(in_threads):
    with pytest.raises(ValueError, match="data"):
        in_threads(Talk, SeededEngine, [], **OPTIONS)
    assert all(worker.ended.done() for worker in in_threads.backends[-1].started)


@pytest.mark.parametrize(
    ("policy", "more", "message"),
    [
        (SeededEngine(), {}, "policy_factory must be a function that makes an engine"),
        (3, {}, "policy_factory must be a function .* got a int"),
        ([SeededEngine], {}, "one for each of num_collectors=2, got 1"),
        (SeededEngine, {"env": threading.Lock()}, "env is sent to other processes"),
        (SeededEngine, {"agents": AgentOptions(port=8000)}, "port must be 0"),
        (SeededEngine, {"num_collectors": 0}, "num_collectors"),
        (SeededEngine, {"backend": "slurm"}, "backend"),
        (SeededEngine, {"accepts": 1}, "argument 'accepts'"),
    ],
)
def test_bad_input_is_named(in_threads, policy, more, message):
    options = {**OPTIONS, **more}
    env = options.pop("env", Talk)
    with pytest.raises((TypeError, ValueError), match=message):
        in_threads(env, policy, items(2), **options)
    assert not in_threads.backends


may_load = threading.Event()


class StuckEngine(SeededEngine):
    """Takes weights once it may."""

    def update_weights(self, source):
        may_load.wait(PATIENCE)
        return super().update_weights(source)


may_start = threading.Event()


def waiting_engine():
    may_start.wait(PATIENCE)
    return SeededEngine()


def test_workers_that_do_not_start_are_named(in_threads, monkeypatch):
    may_start.clear()
    said = []

    def warning(message, *args):
        said.append(message % args)
        may_start.set()

    monkeypatch.setattr(workers, "WARN_SECONDS", 0.01)
    monkeypatch.setattr(workers._logger, "warning", warning)
    in_threads(Talk, waiting_engine, items(4), **OPTIONS).shutdown()
    (text,) = said
    assert "2 of 2 workers have not started" in text
    assert "`ray status`" in text


def test_the_error_of_one_worker_ends_the_wait_for_others(in_threads):
    may_start.clear()
    try:
        with pytest.raises(FileNotFoundError, match="no weights here"):
            in_threads(Talk, [waiting_engine, broken_engine], items(4), **OPTIONS)
    finally:
        may_start.set()
