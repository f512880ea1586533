"""Collectors play environments on servers: what fails is a rejected episode, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.collectors.chats import Chat
from tests.envs.some_tools import add
from tests.envs.speaking import adds, collected, speaker
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.envs import OpenEnvEnv, ToolEnv, serve

websockets = pytest.importorskip("websockets")


def engine():
    return speaker(lambda prompt: "one")


def test_episodes_of_a_server_are_those_of_the_environment():
    data = [{"turns": 3}]
    here, _ = collected(Chat, engine(), data, 8, group_size=2)
    with serve(Chat, max_sessions=3) as server:
        there, stats = collected(OpenEnvEnv(server.url), engine(), data, 8, group_size=2)
        wait_until(lambda: server.sessions == 0)
    assert stats["rejected"] == 0
    for key in (
        *(("tokens", "prompt"), ("tokens", "response")),
        *(("next", "reward"), ("next", "done")),
    ):
        ours, theirs = ([step[key].tolist() for step in of.unbind(0)] for of in (here, there))
        assert ours == theirs


def test_tools_of_a_server_are_offered_and_called():
    def answer(prompt):
        assert "Add two numbers" in prompt
        return adds(prompt)

    def make_env():
        return ToolEnv([add], reward=lambda messages, data: messages[-2]["content"] == data["sum"])

    item = {"messages": [{"role": "user", "content": "3 + 4?"}], "sum": "7"}
    with serve(make_env) as server:
        batch, _ = collected(OpenEnvEnv(server.url), speaker(answer), [item], 2)
        assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0] * 2


class Hangs(Chat):
    """Hangs if the item says so."""

    inline = False

    async def reset(self, data=None):
        if data["hangs"]:
            await asyncio.Event().wait()
        return super().reset(data)


def test_a_call_that_hangs_is_a_timeout_of_the_episode_and_its_session_ends():
    with serve(Hangs) as server:
        env, settings = OpenEnvEnv(server.url), {"episodes_per_batch": 1, "total_episodes": 2}
        limits, data = Limits(tool_timeout=0.1), [{"hangs": True}, {"hangs": False}]
        with MultiTurnCollector(env, engine(), data, limits=limits, **settings) as collector:
            assert len(list(collector)) == 2
            assert collector.stats()["rejected/tool_timeout"] >= 1
        wait_until(lambda: server.sessions == 0)
