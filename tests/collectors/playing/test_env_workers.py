"""Environments in processes: they play as in threads, and one that dies takes only its own episodes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest

from tests.collectors.pictures import SeeingEngine, new_images
from tests.collectors.playing.worker_envs import Async, Shows, Tells, Unimportable, no_environment
from tests.collectors.runs import balanced, first_batch, run_of
from tests.tiers import first_fast
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage


def collect(env, engine, data, **options):
    options = {"n": 4, "max_consecutive_failures": 20, "env_workers": 2, **options}
    return first_batch(env, engine, data, **options)


def children():
    return [
        p for p in psutil.Process().children(recursive=True) if "spawn" in " ".join(p.cmdline())
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "env", first_fast([Async, Tells, Tells("2"), "tests.collectors.playing.worker_envs.Tells"])
)
def test_episodes_are_played_in_other_processes(engine, env):
    batch, stats = collect(env, engine, [{}], group_size=2)
    infos = batch["info"]
    pids = {info["pid"] for info in infos}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert [info["rank"] for info in infos] == [0, 0, 1, 1] * 2
    assert stats["accepted"] == 4
    assert stats["rejected"] == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_images_come_from_other_processes_and_are_kept_once():
    _, processor = tiny_vl_model("qwen2_5_vl")
    engine = SeeingEngine(processor)
    batch, stats = collect(Shows(), engine, [{}], group_size=2, processor=processor)
    assert stats["accepted"] == 4
    images = [Shows.picture(number) for number in range(2)]
    # A data: URI of pixels is a PNG file of them, which is another image.
    first = (*images[:1] * 3, StoredImage.of(images[0].data_uri()))
    assert new_images(batch) == [first, (images[1],)] * 4
    assert set(engine.images) == {first, (*first, images[1])}


@pytest.mark.slow
def test_a_process_that_dies_takes_its_own_episodes_and_is_replaced(engine):
    dying = {"step": "exit"}
    batch, stats = collect(Tells, engine, [dying, {}, {}, {}], n=6)
    assert len(batch) == 12
    assert stats["rejected"] == stats["rejected/EnvWorkerError"] >= 1


@pytest.mark.slow
def test_no_call_is_forgotten_where_processes_come_and_go(engine):
    data = [{"step": "exit"} if k % 4 == 0 else {} for k in range(24)]
    options = {"env_workers": 2, "max_retries": 2, "max_consecutive_failures": 1000}
    batches, stats = run_of(Tells, engine, data, n=12, cycle=False, **options)
    assert stats["accepted"] == sum(map(len, batches)) // 2
    assert balanced(stats, running=0)
    assert stats["rejected/EnvWorkerError"] >= 6 * 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("what", "cause"),
    [("sys.exit", "SystemExit"), ("raise", "RuntimeError"), ("exit", "EnvWorkerError")],
)
def test_what_goes_wrong_is_a_failure_of_its_episode(engine, where, what, cause):
    _, stats = collect(Tells, engine, [{where: what}, {}], n=2)
    assert stats["accepted"] == 2
    assert {name for name in stats if name.startswith("rejected/")} == {f"rejected/{cause}"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sys.exit", "raise", "exit"])
def test_closing_that_goes_wrong_costs_nothing(engine, what):
    data = [{"close": what}, {}]
    batch, stats = collect(Tells, engine, data, env_workers=1, max_retries=5)
    assert len(batch) == 8
    assert stats["accepted"] == 4
    assert not children()


@pytest.mark.slow
def test_a_call_that_hangs_holds_up_nobody(engine):
    options = {"env_workers": 1, "limits": Limits(tool_timeout=1.0)}
    _, stats = collect(Tells, engine, [{"step": "hang"}, {}], **options)
    assert stats["accepted"] == 4
    assert not children()


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_ends_the_run(engine):
    with pytest.raises(RuntimeError, match="ImportError: no such thing here"):
        collect(Unimportable(), engine, [{}], max_consecutive_failures=2)


@pytest.mark.slow
def test_processes_end_with_the_one_that_made_them(engine):
    """Killed, too: they find their pipe closed."""
    script = (
        "import time\n"
        "from torchrl_mt.collectors.playing.env_workers import EnvWorkers\n"
        "from tests.collectors.playing.worker_envs import Tells\n"
        "if __name__ == '__main__':\n"
        "    workers = EnvWorkers(2, Tells)\n"
        "    print(*[w._process.pid for w in workers._workers], flush=True)\n"
        "    time.sleep(1000)\n"
    )
    path = os.pathsep.join(sys.path)
    maker = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    maker.kill()
    maker.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_bad_input_is_named(engine):
    class Local(Tells):
        lock = threading.Lock()

    class Flow:
        async def arun_episode(self, engine, data):
            return 0.0

    class Asks:
        async def run(self, data, *, base_url, api_key, http_client):
            return 0.0

    with pytest.raises(TypeError, match="pickling it raised"):
        collect(Local, engine, [{}])
    for calls_the_engine in (Flow(), Asks()):
        match = r"env_workers runs environments.*got .*which calls the engine"
        with pytest.raises(TypeError, match=match):
            collect(calls_the_engine, engine, [{}])
    with pytest.raises(RuntimeError, match=r"TypeError: env must be a TextEnv.*makes int"):
        collect(no_environment, engine, [{}], max_consecutive_failures=2)
