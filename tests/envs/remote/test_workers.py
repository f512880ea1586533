"""Workers: each keeps its address whatever becomes of its process, and no process is left over."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import psutil
import pytest

from tests.collectors.runs import first_batch
from tests.collectors.scripted import ScriptedEngine
from tests.envs.remote.worker_envs import Closes, Counts, GoesWrong
from tests.envs.remote.workers_left import health, is_served, processes
from tests.waiting import PATIENCE, in_thread, wait_until
from torchrl_mt.envs import OpenEnvEnv, create_workers
from torchrl_mt.envs.remote import WorkerError
from torchrl_mt.envs.remote import worker as module


def create(n_workers=1, make_env=Counts, **kwargs):
    return asyncio.run(create_workers(n_workers, make_env, timeout=PATIENCE, **kwargs))


def leftovers():
    """Processes, threads and sockets of workers."""
    threads = [t for t in threading.enumerate() if t.name == "torchrl_mt-worker"]
    listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    return [*processes(), *threads, *listening]


@pytest.fixture(autouse=True)
def nothing_left():
    before = leftovers()
    yield
    wait_until(lambda: not [p for p in processes() if p not in before])
    assert [left for left in leftovers() if left not in before] == []


def pid_of(worker):
    """The process of a worker, once it has one."""
    wait_until(lambda: worker.pid is not None)
    return worker.pid


@pytest.fixture
def flag(tmp_path):
    """A file; while it exists, workers go wrong where they start."""
    (tmp_path / "flag").touch()
    return tmp_path / "flag"


# ---- what every worker does ---------------------------------------------------------------------


@pytest.mark.slow
def test_workers_serve_at_addresses_of_their_own():
    with create(3, token="secret") as workers:
        assert workers.urls == [worker.api_url for worker in workers]
        assert len(set(workers.urls)) == len({worker.pid for worker in workers}) == 3
        for url in workers.urls:
            assert health(url) == {"status": "healthy", "sessions": 0}
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/ws", timeout=PATIENCE)
        assert all(worker.error is None for worker in workers)
        assert len(processes()) >= 3
    with pytest.raises(OSError, match="refused"):
        health(workers[0].api_url)
    for worker in workers:
        worker.stop()  # again
        assert worker.pid is None


@pytest.mark.slow
def test_workers_may_have_addresses_in_a_row():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            create(2, port=port)
    with create(1, host="::1") as workers:
        assert workers.urls[0].startswith("http://[::1]:")
        assert health(workers.urls[0])


@pytest.mark.slow
def test_any_thread_may_stop_a_worker_and_all_wait():
    workers = create(2)

    def stop():
        workers.stop()
        return processes()

    stopping = [in_thread(stop) for _ in range(8)]
    assert [stopped() for stopped in stopping] == [[]] * 8


@pytest.mark.slow
async def test_environments_are_closed_where_workers_stop(tmp_path):
    file = tmp_path / "closed"
    async with await create_workers(1, Closes, timeout=PATIENCE) as workers:
        await OpenEnvEnv(workers.urls, timeout=PATIENCE).reset({"file": str(file)})
        assert health(workers[0].api_url)["sessions"] == 1
        assert not file.exists()
    assert file.exists()


# ---- workers that die ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_at_its_address(caplog):
    with create(2) as workers:
        one, other = workers
        for _ in range(2):
            pid, stays = pid_of(one), other.pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: one.pid != pid)
            wait_until(lambda: is_served(one.api_url))
            assert one.pid != pid
            assert other.pid == stays
    warnings = [r.getMessage() for r in caplog.records if r.name == "torchrl_mt"]
    assert len(warnings) == 2
    assert all(one.api_url in text and "ended with exit code -9" in text for text in warnings)


@pytest.mark.slow
def test_a_worker_that_is_dead_delays_nobody_else(tmp_path, tokenizer):
    flag = tmp_path / "flag"
    with create(2, GoesWrong(flag, "wait")) as workers:
        dead = workers[0]
        flag.touch()
        pid = dead.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: dead.pid not in (None, pid))
        engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
        data = [{"number": number} for number in range(8)]
        _, stats = first_batch(OpenEnvEnv(workers.urls, timeout=PATIENCE), engine, data, n=16)
        assert (stats["accepted"], stats["rejected"]) == (16, 0)
        assert not is_served(dead.api_url)
        flag.unlink()
        wait_until(lambda: is_served(dead.api_url))


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_at_its_address(monkeypatch, caplog):
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.05)
    with asyncio.run(create_workers(1, Counts, timeout=20.0)) as workers:
        (worker,) = workers
        worker._timeout = 0.5
        pid = worker.pid
        os.kill(pid, signal.SIGSTOP)
        killed = "did not answer /health within 0.5 seconds and was killed"
        wait_until(lambda: killed in caplog.text)
        assert not psutil.pid_exists(pid)
        worker._timeout = PATIENCE
        wait_until(lambda: is_served(worker.api_url))


@pytest.mark.slow
def test_a_worker_that_always_dies_at_once_is_given_up(tmp_path, caplog):
    flag = tmp_path / "flag"
    with create(2, GoesWrong(flag, "exit")) as workers:
        one, other = workers
        flag.touch()
        os.kill(one.pid, signal.SIGKILL)
        wait_until(lambda: one.error is not None)
        wait_until(lambda: not one._supervisor.is_alive())
        assert isinstance(one.error, WorkerError)
        assert "died at once 5 times in a row and is given up" in str(one.error)
        assert "has ended with exit code 7" in str(one.error)
        assert "given up" in repr(one)
        with pytest.raises(OSError, match="refused"):
            health(one.api_url)
        assert health(other.api_url)
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert [r.getMessage() for r in errors] == [str(one.error)]


# ---- starts that fail ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("raise", ImportError, "no such thing here"),
        ("strange", RuntimeError, "Strange: a\nTraceback"),
        ("exit", WorkerError, "ended with exit code 7"),
    ],
)
def test_the_error_of_a_start_is_raised_and_nothing_is_left(flag, what, error, message):
    with pytest.raises(error, match=message):
        create(3, GoesWrong(flag, what))
    assert processes() == []


@pytest.mark.slow
def test_a_start_that_hangs_is_given_up(flag):
    with pytest.raises(WorkerError, match=r"did not answer /health within 0.5 seconds"):
        asyncio.run(create_workers(1, GoesWrong(flag, "hang"), timeout=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at once", "with processes"])
async def test_nothing_is_left_of_a_start_that_is_cancelled(flag, when):
    before, running = leftovers(), len(processes())
    start = asyncio.ensure_future(create_workers(2, GoesWrong(flag, "hang"), timeout=PATIENCE))
    await asyncio.sleep(0)
    while when == "with processes" and len(processes()) < running + 2:
        await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [left for left in leftovers() if left not in before] == []


# ---- the end of the parent ----------------------------------------------------------------------


MAKES_WORKERS = """
import asyncio, sys
from tests.envs.remote.worker_envs import Counts
from torchrl_mt.envs.remote.workers import create_workers
if __name__ == '__main__':
    workers = asyncio.run(create_workers(2, Counts))
    print(*[w.pid for w in workers], flush=True)
    if sys.stdin.readline() == 'raise\\n':
        raise KeyboardInterrupt
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_workers_end_with_the_process_that_made_them(how):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MAKES_WORKERS]
    maker = subprocess.Popen(command, env=environment, text=True, **pipes)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 2
    if how == "kill":
        maker.kill()
        maker.wait()
    _, errors = maker.communicate(None if how == "kill" else f"{how}\n")
    assert ("Traceback" in errors) == (how == "raise")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((0, Counts), {}, ValueError, "n_workers must be a positive integer, got 0"),
        ((2.5, Counts), {}, ValueError, r"n_workers must be a positive integer, got 2\.5"),
        ((1, Counts()), {}, TypeError, "make_env must be the class"),
        ((1, threading.Lock().acquire), {}, TypeError, "make_env is sent to other processes"),
        ((1, Counts), {"timeout": 0.0}, ValueError, "timeout must be positive, got 0"),
        ((1, Counts), {"port": 70000}, ValueError, "port must be"),
        ((2, Counts), {"port": 65535}, ValueError, "port must be"),
        ((1, Counts), {"port": "80"}, ValueError, "port must be"),
        ((1, Counts), {"host": ""}, TypeError, "host must be"),
        ((1, Counts), {"host": "0.0.0.0"}, ValueError, "token"),
        ((1, Counts), {"max_sessions": 0}, ValueError, "max_sessions"),
        ((1, Counts), {"idle_timeout": -1.0}, ValueError, "idle_timeout"),
        ((1, Counts), {"allowed_ips": ["here"]}, ValueError, "allowed_ips"),
    ],
)
def test_bad_input_is_named_before_anything_starts(monkeypatch, args, kwargs, error, message):
    monkeypatch.setattr(module, "WorkerProcess", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(error, match=message):
        asyncio.run(create_workers(*args, **kwargs))
