"""What episodes wait for, and where their time goes."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.collectors.runs import beside, collecting, said
from tests.collectors.scripted import ScriptedEngine
from tests.waiting import wait_until
from torchrl_mt.collectors.statistics import call_times, episode_counts
from torchrl_mt.envs import TextEnv, TextStep


class Clock:
    """What ``time`` is to the module: time that passes as the test says."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(call_times, "time", clock)
    return clock


def test_time_is_the_engines_then_the_environments(clock):
    """A slow reference: second by second, whose it is by the calls that are under way."""
    spans = [("environment", 0, 9), ("engine", 2, 5), ("engine", 4, 6), ("environment", 11, 13)]
    episode, open_calls = call_times.CallTimes(), {}
    expected = {"engine": 0.0, "environment": 0.0}
    for second in range(15):
        clock.now = float(second)
        for span in spans:
            if second == span[1]:
                open_calls[span] = episode.call(span[0], str(span))
                open_calls[span].__enter__()
            if second == span[2]:
                open_calls.pop(span).__exit__(None, None, None)
        kinds = {span[0] for span in open_calls}
        waits_since = {
            kind: min((max(s[1], 0) for s in open_calls if s[0] == kind), default=None)
            for kind in expected
        }
        if "engine" in kinds:
            assert episode.longest()[0] == second - waits_since["engine"]
        for kind in ("engine", "environment"):
            if kind in kinds:
                expected[kind] += 1
                break
    assert episode.seconds == expected
    assert episode.longest() == (0.0, "")


def test_a_workflow_is_waited_for_from_the_engines_last_answer(clock):
    episode = call_times.CallTimes()
    with episode.call("environment", "W.arun_episode"):
        clock.now = 50.0
        with episode.call("engine", "the engine's answer"):
            clock.now = 70.0
            assert episode.longest() == (20.0, "the engine's answer")
        clock.now = 75.0
        assert episode.longest() == (5.0, "W.arun_episode")


class Slow(TextEnv):
    def __init__(self, where, gate):
        self.where, self.gate = where, gate

    async def reset(self, data=None):
        await self.at("reset")
        return [{"role": "user", "content": "1"}]

    async def step(self, response):
        await self.at("step")
        return TextStep(reward=1.0, done=True)

    async def at(self, where):
        while where == self.where and not self.gate:
            await asyncio.sleep(0.001)


class SlowEngine(ScriptedEngine):
    gate = None

    async def generate(self, prompt_ids, **kwargs):
        while self.gate is not None and not self.gate:
            await asyncio.sleep(0.001)
        return await super().generate(prompt_ids, **kwargs)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("reset", "Slow.reset"),
        ("step", "Slow.step"),
        ("engine", "the engine's answer"),
        ("workflow", "Workflow.arun_episode"),
    ],
)
@pytest.mark.parametrize("staleness", [None, 1])
def test_who_waits_long_says_once_what_for(tokenizer, where, what, staleness, caplog, monkeypatch):
    monkeypatch.setattr(episode_counts, "_LONG", 0.05)
    engine, gate = SlowEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id]), []
    engine.gate = gate if where == "engine" else None

    class Workflow:
        async def arun_episode(self, engine, data):
            await engine.generate([1, 2])
            while not gate:
                await asyncio.sleep(0.001)
            return 1.0

    def told():
        """Episodes that the lines tell of."""
        lines = said(caplog, "has waited for")
        return sum(2 if "the longest of 2 that wait" in line else 1 for line in lines)

    def open_the_gate():
        wait_until(lambda: told() == 2)
        longest = collector.stats()["waiting/longest"]
        wait_until(lambda: collector.stats()["waiting/longest"] > longest)
        gate.append(1)

    env = Workflow() if where == "workflow" else lambda: Slow(where, gate)
    data = ({"k": k} for k in itertools.count())
    options = {"max_staleness": staleness, "max_concurrency": 2, "total_episodes": 2}
    with collecting(env, engine, data, n=2, **options) as collector:
        with beside(open_the_gate):
            assert len(list(collector)) == 1
        stats = collector.stats()
    assert told() == 2
    lines = said(caplog, "has waited for")
    assert lines == said(caplog, f"has waited for {what} for")
    assert stats["waiting/longest"] == 0.0
    shares = [stats[f"time/{name}"] for name in ("engine", "environment", "waiting")]
    assert sum(shares) == pytest.approx(1.0)
    assert (shares[0] > shares[1]) == (where == "engine")
