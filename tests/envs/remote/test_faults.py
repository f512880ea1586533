"""Whatever goes wrong with served environments, every item is delivered once and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter, defaultdict
from contextlib import ExitStack

import psutil
import pytest

from tests.collectors.runs import collecting
from tests.collectors.scripted import ScriptedEngine
from tests.envs.remote.faulty_proxy import FAULTS, HARMLESS, FaultyProxy, drawn
from tests.envs.remote.worker_envs import Counts
from tests.envs.remote.workers_left import health, processes
from tests.waiting import PATIENCE, wait_until
from torchrl_mt.envs.remote.open_env import OpenEnvEnv
from torchrl_mt.envs.remote.server import serve
from torchrl_mt.envs.remote.workers import create_workers

ITEMS = 250
"""Of a thousand episodes."""
CAUSES = {
    "OpenEnvConnectionError": {"500", "drop", "exit"},
    "OpenEnvTimeoutError": {"silent", "hang"},
    "OpenEnvProtocolError": {"malformed", "misshapen"},
    "OpenEnvError": {"raise"},
}
"""Faults that reject an episode, by the cause that it is rejected for."""


class Unlucky(OpenEnvEnv):
    """Tells the environment at the server what is to go wrong in this attempt."""

    def draw(self):
        return None

    async def reset(self, data=None):
        fault = self.draw()
        if fault:
            self.faults[fault] += 1
        return await super().reset({**data, "fault": fault})


@pytest.fixture(autouse=True)
def nothing_left():
    def left():
        gc.collect()
        connections = psutil.Process().net_connections("all")
        # The fork server's socket stays, as it does.
        sockets = [
            c for c in connections if "listener-" not in str(c.laddr) and c.status != "TIME_WAIT"
        ]
        return Counter(
            [*(t.name for t in threading.enumerate()), *(c.family.name for c in sockets)]
        )

    before, running = left(), processes()
    yield
    wait_until(lambda: not [p for p in processes() if p not in running])
    wait_until(lambda: not left() - before)


def play(env, tokenizer, items, group_size, **kwargs):
    """Play every item of the data once, and check the books."""
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    groups, data = defaultdict(list), [{"number": number} for number in range(items)]
    options = {"cycle": False, "incomplete_groups": "requeue", "max_retries": 2, **kwargs}
    options |= {"n": 200, "group_size": group_size, "max_consecutive_failures": 100_000}
    with collecting(env, engine, data, **options) as collector:
        for batch in collector:
            for step in batch:
                if step["next", "done"]:
                    groups[int(step["group"])].append(int(step["next", "reward"]))
        stats = collector.stats()
    # Every item came once, with its whole group.
    assert sorted(groups.values()) == [[number] * group_size for number in range(items)]
    assert stats["accepted"] + stats["rejected"] == stats["started"]
    assert stats["running"] == 0
    assert stats["accepted"] >= items * group_size
    return stats


def check_causes(stats, faults, exactly=False):
    """No cause is named without its fault, and none is missing; one fault may come before another."""
    causes = {name.removeprefix("rejected/"): n for name, n in stats.items() if "rejected/" in name}
    assert sum(causes.values()) == stats["rejected"]
    assert set(causes) - {"incomplete_group"} <= set(CAUSES)
    for cause, its_faults in CAUSES.items():
        suffered = sum(faults[fault] for fault in its_faults)
        assert suffered > 0 or cause not in causes
        assert suffered < 10 or cause in causes
        assert not exactly or causes.get(cause, 0) == suffered


@pytest.mark.parametrize(("raising", "group_size"), [(0.0, 1), (0.2, 2)])
def test_faults_in_this_process(tokenizer, raising, group_size):
    faults = [fault for fault in FAULTS if fault not in ("silent", "slow")]
    Unlucky.faults, Unlucky.draw = Counter(), staticmethod(drawn(raising, ["raise"]))
    with serve(Counts) as server, FaultyProxy([server.url], drawn(0.4, faults)) as proxy:
        stats = play(Unlucky(proxy.url), tokenizer, 24 // group_size, group_size)
        assert stats["rejected"] > 0
        check_causes(stats, Unlucky.faults + proxy.faults, exactly=not raising)
        wait_until(lambda: health(server.url)["sessions"] == 0)
        assert proxy.open == 0


@pytest.mark.slow
def test_a_thousand_episodes_with_faults_everywhere(tokenizer):
    Unlucky.faults = Counter()
    Unlucky.draw = staticmethod(drawn(0.2, ["exit", "hang", "raise", "raise", "slow"], seed=1))
    workers = asyncio.run(create_workers(3, Counts, max_sessions=12, timeout=PATIENCE))
    with workers, ExitStack() as stack:
        proxies = [
            stack.enter_context(FaultyProxy([url], drawn(0.25, seed=seed)))
            for seed, url in enumerate(workers.urls)
        ]
        env = Unlucky([proxy.url for proxy in proxies], timeout=2.0)
        stats = play(env, tokenizer, items=ITEMS, group_size=4, max_concurrency=48)
        faults = sum((proxy.faults for proxy in proxies), Unlucky.faults)
        check_causes(stats, faults)
        assert stats["accepted"] == 4 * ITEMS
        harmful = sum(n for fault, n in faults.items() if fault not in HARMLESS)
        assert harmful > 0.25 * stats["started"]
        assert all(worker.error is None for worker in workers)
        for url in workers.urls:
            wait_until(lambda url=url: health(url)["sessions"] == 0)
        assert not any(proxy.open for proxy in proxies)
