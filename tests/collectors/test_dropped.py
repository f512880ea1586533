"""Collectors that are dropped without ``shutdown()`` leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import psutil
import pytest

from tests.bridges.cua_bench.loops import Scripted, play
from tests.collectors.distributed.played import SeededEngine, Talk, items
from tests.waiting import wait_until
from torchrl_mt.bridges.cua_bench import MultiTurnDataLoader
from torchrl_mt.collectors import (
    CollectorOptions,
    MultiProcessCollector,
    MultiTurnCollector,
    RayMultiTurnCollector,
)
from torchrl_mt.collectors.event_loop.loop_thread import LoopThread


class Asks:
    async def run(self, data, *, base_url, api_key, http_client):
        request = {"messages": [{"role": "user", "content": "1"}]}
        (await http_client.post("/chat/completions", json=request)).raise_for_status()
        return 1.0


def use(make, env=Talk, policy=SeededEngine, **options):
    """Make a collector, take a batch, update the weights; return what tells whether it is freed."""
    collector = make(env, policy, items(8), episodes_per_batch=4, **options)
    next(iter(collector))
    collector.update_policy_weights_(None)
    return weakref.ref(collector)


def left():
    """Files and processes of this process."""
    return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))


def check_that_nothing_is_left(number, *args, **options):
    use(*args, **options)  # It imports modules and starts servers that all share.
    gc.collect()
    threads, before = set(threading.enumerate()), left()
    used = [use(*args, **options) for _ in range(number)]
    gc.collect()
    assert [each() for each in used] == [None] * number
    wait_until(lambda: not set(threading.enumerate()) - threads)
    wait_until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))


@pytest.fixture
def quick_collection():
    """Of the test's garbage alone."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("max_staleness", [None, 0, 1, 2])
@pytest.mark.parametrize("env", [Talk, Asks])
def test_in_this_process(quick_collection, env, max_staleness):
    check_that_nothing_is_left(2, MultiTurnCollector, env, max_staleness=max_staleness)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_environments_in_processes(quick_collection, max_staleness, caplog):
    options = {"options": CollectorOptions(env_workers=1), "max_staleness": max_staleness}
    check_that_nothing_is_left(3, MultiTurnCollector, **options)
    assert "failed" not in caplog.text  # Environments are closed before their processes.


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_episodes_in_processes(quick_collection, max_staleness):
    options = {"num_collectors": 1, "max_staleness": max_staleness}
    check_that_nothing_is_left(3, MultiProcessCollector, **options)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_episodes_in_actors(quick_collection, max_staleness):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        # Each needs the only CPU: one whose actor is left waits for ever.
        for _ in range(2):
            used = use(RayMultiTurnCollector, num_collectors=1, max_staleness=max_staleness)
            gc.collect()
            assert used() is None
    finally:
        ray.shutdown()


def test_a_loader(tokenizer, quick_collection):
    """Its collector runs in the background."""
    threads = set(threading.enumerate())

    def use():
        loader = MultiTurnDataLoader(
            Scripted, tokenizer=tokenizer, batch_size=2, max_prompt_length=64, max_response_length=8
        )
        play(loader, lambda row: [5, tokenizer.eos_token_id], lambda: len(loader.storage) > 6)
        return weakref.ref(loader)

    used = use()

    def is_freed():
        gc.collect()
        return used() is None

    wait_until(is_freed)  # The collector's thread holds the loader while it counts a delivery.
    wait_until(lambda: not set(threading.enumerate()) - threads)


def test_a_loop_that_is_dropped_in_its_own_thread_ends():
    held, ended = [], threading.Event()
    held.append(LoopThread("dropped", then=ended.set))
    loop = held[0].loop
    loop.call_soon_threadsafe(held.clear)
    ended.wait()
    assert loop.is_closed()
