"""Collectors play environments on servers: what fails is a rejected episode, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.chat.families import QWEN25
from tests.chat.families_in_play import tokenizer_of
from tests.collectors.scripted import ScriptedEngine
from tests.envs.some_tools import add
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.envs import OpenEnvEnv, TextEnv, TextStep, ToolEnv, serve

websockets = pytest.importorskip("websockets")


class Count(TextEnv):
    """Three turns, each of reward 1."""

    inline = True

    def reset(self, data=None):
        self.turn = 0
        return [{"role": "user", "content": "count"}]

    def step(self, response):
        self.turn += 1
        said = [{"role": "user", "content": "go on"}]
        return TextStep(said, reward=1.0, done=self.turn == 3)


def engine(says="one"):
    tokenizer = tokenizer_of(QWEN25)
    text = QWEN25.say({"role": "assistant", "content": says}) + QWEN25.stop
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ScriptedEngine(tokenizer, lambda prompt: token_ids)


def test_episodes_of_a_server_are_those_of_the_environment():
    def batch(env):
        settings = {"episodes_per_batch": 4, "total_episodes": 8, "group_size": 2}
        with MultiTurnCollector(env, engine(), [{"n": 1}], **settings) as collector:
            batches = list(collector)
            return batches, collector.stats()

    here, _ = batch(Count)
    with serve(Count, max_sessions=3) as server:
        there, stats = batch(OpenEnvEnv(server.url))
        wait_until(lambda: server.sessions == 0)
    assert stats["rejected"] == 0
    for one, other in zip(here, there, strict=True):
        for kind, name in (
            *(("tokens", "prompt"), ("tokens", "response")),
            *(("next", "reward"), ("next", "done")),
        ):
            ours, theirs = (
                [step[kind, name].tolist() for step in of.unbind(0)] for of in (one, other)
            )
            assert ours == theirs


def test_tools_of_a_server_are_offered_and_called():
    tokenizer = tokenizer_of(QWEN25)

    def rule(prompt):
        text = tokenizer.decode(prompt)
        assert "Add two numbers" in text
        message = {"role": "assistant", "content": "7"}
        if "<tool_response>" not in text:
            called = {"name": "add", "arguments": {"a": 3, "b": 4}}
            message = {"role": "assistant", "content": "", "tool_calls": [{"function": called}]}
        return tokenizer(QWEN25.say(message) + QWEN25.stop, add_special_tokens=False)["input_ids"]

    def make_env():
        return ToolEnv([add], reward=lambda messages, data: messages[-2]["content"] == data["sum"])

    item = {"messages": [{"role": "user", "content": "3 + 4?"}], "sum": "7"}
    with serve(make_env) as server:
        settings = {"episodes_per_batch": 2, "total_episodes": 2}
        env = OpenEnvEnv(server.url)
        with MultiTurnCollector(env, ScriptedEngine(tokenizer, rule), [item], **settings) as made:
            (batch,) = made
        assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0] * 2


class Hangs(Count):
    """Hangs if the item says so."""

    inline = False

    async def reset(self, data=None):
        if data == "hang":
            await asyncio.Event().wait()
        return Count.reset(self, data)


def test_a_call_that_hangs_is_a_timeout_of_the_episode_and_its_session_ends():
    with serve(Hangs) as server:
        env, settings = OpenEnvEnv(server.url), {"episodes_per_batch": 1, "total_episodes": 2}
        limits, data = Limits(tool_timeout=0.1), ["hang", "play"]
        with MultiTurnCollector(env, engine(), data, limits=limits, **settings) as collector:
            assert len(list(collector)) == 2
            assert collector.stats()["rejected/tool_timeout"] >= 1
        wait_until(lambda: server.sessions == 0)
