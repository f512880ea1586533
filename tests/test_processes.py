"""What is sent between processes arrives, or says why not; processes answer every call, and end."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import Future

import psutil
import pytest

from tests.waiting import PATIENCE, wait_until
from torchrl_mt import processes
from torchrl_mt.processes import (
    WorkerProcess,
    answer,
    failure,
    pickle_argument,
    read_answer,
    read_failure,
)
from torchrl_mt.threads import start_daemon


class Unmakeable(Exception):
    """Pickled well, and cannot be made again."""

    def __init__(self, a, b):
        super().__init__(a)


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_errors_arrive_as_they_are_or_as_text():
    error = raised(ValueError("a number was expected."))
    arrived = read_failure(failure(error))
    assert (type(arrived), arrived.args) == (ValueError, error.args)
    assert "in raised" in str(arrived.__cause__)
    arrived = read_failure(failure(raised(Unmakeable("why", 1))))
    assert type(arrived) is RuntimeError
    assert str(arrived).startswith("Unmakeable: why\nTraceback")
    assert "in raised" in str(arrived)
    error.lock = threading.Lock()
    assert type(read_failure(failure(error))) is RuntimeError


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"make_env is sent .* makes it\."):
        pickle_argument("make_env", threading.Lock())
    assert pickle.loads(pickle_argument("make_env", Unmakeable)) is Unmakeable
    with pytest.raises(TypeError, match="the result of a call was sent"):
        read_answer(*answer(Unmakeable("why", 1)))


class Died(Exception):
    """A process is gone."""


class Sleeper:
    """Sleeps for seconds, and may have a fork."""

    def __init__(self, fork=False):
        self.child = os.fork() if fork else None
        if self.child == 0:
            time.sleep(1000)

    def call(self, method, args, shared):
        outcome = Future()
        start_daemon(self._work, outcome, *pickle.loads(args))
        return outcome

    def _work(self, outcome, seconds):
        time.sleep(seconds)
        outcome.set_result(answer((seconds, self.child)))

    def close(self):
        time.sleep(0 if self.child is None else 1000)


@pytest.mark.slow
def test_a_process_answers_every_call_and_ends_by_itself():
    process = WorkerProcess(Sleeper, (), "sleeper", Died)
    late, soon = process.call("sleep", 1000.0), process.call("sleep", 0.0)
    assert soon.result() == (0.0, None)
    assert not late.done()
    process.ask_to_end()
    process.end(1000)
    for call in (late, process.ended, process.call("sleep", 0.0)):
        with pytest.raises(Died, match=rf"sleeper \(pid {process.pid}\) has ended .* 0\."):
            call.result()
    assert not psutil.pid_exists(process.pid)


@pytest.mark.slow
def test_a_process_is_killed_and_missed_though_a_fork_has_its_pipe():
    process = WorkerProcess(Sleeper, (True,), "sleeper", Died)
    _, child = process.call("sleep", 0.0).result()
    late = process.call("sleep", 1000.0)
    process.ask_to_end()
    process.end(0.5)
    with pytest.raises(Died, match="exit code -9"):
        late.result()
    os.kill(child, 9)
    wait_until(lambda: not psutil.pid_exists(process.pid))


@pytest.mark.slow
def test_an_end_mark_goes_to_no_other_process(monkeypatch):
    """A descriptor that is closed is soon another connection's."""
    released, found = threading.Event(), Future()

    def send_all(connection, outbox):
        while outbox.get() is not None:
            pass
        released.wait(PATIENCE)
        found.set_result(connection.closed)

    monkeypatch.setattr(processes, "_send_all", send_all)
    process = WorkerProcess(Sleeper, (), "sleeper", Died)
    os.kill(process.pid, 9)
    with pytest.raises(Died):
        process.ended.result()
    time.sleep(0.05)
    released.set()
    assert found.result() is False
