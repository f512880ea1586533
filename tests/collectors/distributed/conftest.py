"""Workers of each kind, and what kills them."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.collectors.distributed.played import Talk, items, ledger, slow_engine
from tests.collectors.runs import balanced, beside, collecting
from tests.waiting import wait_until
from torchrl_mt.collectors import MultiProcessCollector, RayMultiTurnCollector
from torchrl_mt.collectors.distributed import collector as module
from torchrl_mt.collectors.distributed import workers
from torchrl_mt.collectors.distributed.backend import WorkerDied
from torchrl_mt.collectors.distributed.worker import EpisodeWorker
from torchrl_mt.collectors.event_loop.host import Host
from torchrl_mt.processes import pickled, read_answer
from torchrl_mt.threads import settle, start_daemon


class ThreadHandle:
    """A worker in a thread of this process, which can die."""

    def __init__(self, setup, index, seed):
        self.name = f"the worker {index}"
        self.ended = Future()
        self.lock, self.gone = threading.Lock(), None
        self.calls, self.plays = [], []
        self.methods = []
        self.host = None
        self._made = Future()
        start_daemon(self._make, setup, index, seed)

    def _make(self, setup, index, seed):
        self.host = Host(EpisodeWorker.of, setup, index, seed)
        self._made.set_result(None)

    def call(self, method, *args, shared=None):
        outcome = Future()
        outcome.set_running_or_notify_cancel()
        with self.lock:
            if self.gone is not None:
                outcome.set_exception(self.gone)
                return outcome
            self.methods.append(method)
            self.calls.append(outcome)
            if method == "play":
                self.plays.append(outcome)
        data = pickled(args)

        def begin(_):
            self.host.call(method, data, shared).add_done_callback(end)

        def end(answer):
            if self.gone is None and not answer.cancelled():
                with suppress(InvalidStateError):
                    settle(outcome, read_answer, *answer.result())

        self._made.add_done_callback(begin)
        return outcome

    def is_playing(self):
        return not self.ended.done() and any(not call.done() for call in self.plays)

    def die(self):
        with self.lock:
            if self.gone is not None:
                return
            self.gone = WorkerDied("the worker was killed.")
        self.ended.set_exception(self.gone)
        for call in self.calls:
            with suppress(InvalidStateError):  # It was answered in this moment.
                call.set_exception(self.gone)

    def ask_to_end(self):
        pass

    def end(self, seconds):
        self.die()
        if self.host is not None:
            self.host.close()


class ThreadBackend:
    """Starts workers in threads; remembers all of them."""

    def __init__(self, setup):
        self.setup = setup
        self.started = []

    def start(self, index, seed):
        self.started.append(ThreadHandle(self.setup, index, seed))
        return self.started[-1]

    def put(self, value):
        return value

    def close(self):
        pass


in_processes = partial(collecting, make=MultiProcessCollector, num_collectors=2)
"""Makes collectors with workers in processes."""


@pytest.fixture
def in_threads(monkeypatch):
    """Make collectors with workers in threads; the last backend is ``in_threads.backends[-1]``."""

    def make(*args, **kwargs):
        return collecting(*args, make=MultiProcessCollector, **{"num_collectors": 2, **kwargs})

    make.backends = []

    def backend(setup):
        make.backends.append(ThreadBackend(setup))
        return make.backends[-1]

    monkeypatch.setattr(module, "ProcessBackend", backend)
    monkeypatch.setattr(workers, "_LONGEST_PAUSE", 0.0)
    yield make
    for made in make.backends:
        for worker in made.started:
            wait_until(lambda worker=worker: worker.host is not None)
            worker.host.close()


@pytest.fixture(params=["process", "ray"])
def distributed(request):
    """Make collectors with workers in processes or actors."""
    if request.param == "process":
        return in_processes
    request.getfixturevalue("ray_cluster")
    return partial(collecting, make=RayMultiTurnCollector, num_collectors=2)


def kill(pid):
    """Kill a process if it is alive, and wait until it is gone."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)


def pids_of(collector):
    """Processes of a :class:`MultiProcessCollector`'s workers that play."""
    slots = collector._player.workers._slots
    return [slot.handle.pid for slot in slots if slot.handle is not None]


def played_while_workers_die(make, die, folder, sleep, **options):
    """Play with two workers of which ``die(collector)`` kills one that plays, ten times in all.

    No group of two is lost or doubled; returns the ledger.
    """
    unbalanced, done, flag = [], threading.Event(), folder / "all are killed"
    data = [*items(24, sleep=sleep), {"k": 24, "wait_for": str(flag)}]
    with make(Talk, slow_engine, data, max_restarts=10, **options) as collector:

        def watch():
            while not done.is_set():
                if not balanced(stats := collector.stats()):
                    unbalanced.append(stats)

        def destroy():
            for _ in range(10):
                die(collector)
            flag.touch()

        with beside(watch):
            with beside(destroy):
                batches = list(collector)
            done.set()
        stats = collector.stats()
    found = ledger(batches)
    assert sorted(found) == [(k, member) for k in range(25) for member in range(2)]
    assert stats["accepted"] == 50
    assert stats["rejected"] == stats["rejected/WorkerDied"] == stats["started"] - 50 > 0
    assert not unbalanced
    return found
