"""Both ways with the openenv package: its clients at our server, our client at its server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.envs.remote.served_envs import END, Asynchronous, Echo, Threaded
from tests.served_app import served_app
from tests.waiting import until, wait_until
from torchrl_mt.envs import OpenEnvEnv, OpenEnvError, serve
from torchrl_mt.envs.remote import session as client_session

pytest.importorskip("openenv", reason="the openenv package is not installed")
pytest.importorskip("websockets")
pytestmark = pytest.mark.slow  # importing openenv takes seconds


@pytest.fixture(scope="module")
def openenv():
    """What the tests use of openenv; the places are the same in openenv and openenv-core."""
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server import types
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.generic_client import GenericEnvClient

    return SimpleNamespace(
        StepResult=StepResult, EnvClient=EnvClient, types=types, create_app=create_app,
        Environment=Environment, GenericEnvClient=GenericEnvClient,
    )  # fmt: skip


@pytest.fixture(scope="module")
def guessing(openenv):
    """An environment of openenv, with its action, its observation and its client."""
    types = openenv.types

    class Guess(types.Action):
        number: int

    class Hint(types.Observation):
        hint: str

    class Guessing(openenv.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        open: set[int] = set()  # noqa: RUF012 - of the class on purpose

        def __init__(self):
            super().__init__()
            self.open.add(id(self))

        def reset(self, seed=None, episode_id=None, secret=3, **kwargs):
            self.secret, self.more, self.steps = secret, kwargs, 0
            return Hint(hint=f"guess: {sorted(kwargs)}")

        def step(self, action, timeout_s=None, **kwargs):
            if action.number < 0:
                raise ValueError("no negative numbers")
            self.steps += 1
            right = action.number == self.secret
            hint = "yes" if right else "higher" if action.number < self.secret else "lower"
            return Hint(hint=hint, reward=float(right), done=right, metadata={"steps": self.steps})

        @property
        def state(self):
            return types.State(step_count=self.steps)

        def close(self):
            self.open.discard(id(self))

    @dataclass
    class Seen:
        hint: str

    class Client(openenv.EnvClient):
        def _step_payload(self, action):
            return action.model_dump()

        def _parse_result(self, payload):
            return openenv.StepResult(
                observation=Seen(payload["observation"]["hint"]),
                reward=payload.get("reward"),
                done=payload.get("done", False),
            )

        def _parse_state(self, payload):
            return types.State(**payload)

    return SimpleNamespace(Guess=Guess, Hint=Hint, Guessing=Guessing, Client=Client)


@pytest.fixture
def address(openenv, guessing):
    parts = (guessing.Guessing, guessing.Guess, guessing.Hint)
    with served_app(
        openenv.create_app(*parts, max_concurrent_envs=2), ws="websockets-sansio"
    ) as url:
        yield url
        wait_until(lambda: not guessing.Guessing.open)


def number(response):
    return {"number": int(response)}


# ---- their clients, our server ------------------------------------------------------------------


@pytest.mark.parametrize("env", [Echo, Threaded, Asynchronous])
def test_their_async_client_plays_in_our_server(openenv, env):
    async def play(url):
        async with openenv.GenericEnvClient(base_url=url) as client:
            first = await client.reset(word="hi")
            said = {"role": "user", "content": "item: {'word': 'hi'}"}
            assert first.observation == {"messages": [said]}
            assert first.reward is None
            assert first.done is False
            second = await client.step({"response": "so"})
            assert second.observation["messages"][0]["content"] == "so"
            assert (second.reward, second.done) == (0.5, False)
            assert (await client.state())["step_count"] == 1
            assert (await client.step({"response": END})).done
            assert "item: None" in str((await client.reset()).observation)  # the session goes on

    with serve(env) as server:
        asyncio.run(play(server.url))
        wait_until(lambda: server.sessions == 0)


def test_their_synchronous_client_plays_in_our_server(openenv):
    with serve(Echo) as server:
        with openenv.GenericEnvClient(base_url=server.url).sync() as client:
            assert "item: {'seed': 3}" in str(client.reset(seed=3).observation)
            assert client.step({"response": END}).done
        wait_until(lambda: server.sessions == 0)


def test_their_client_is_told_what_is_wrong(openenv):
    async def play(url):
        async with openenv.GenericEnvClient(base_url=url) as client:
            with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
                await client.step({"response": "too early"})
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                await client.step({"code": "1 + 1"})
            await client.reset()
            async with openenv.GenericEnvClient(base_url=url) as other:
                with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                    await other.reset()

    with serve(Echo, max_sessions=1) as server:
        asyncio.run(play(server.url))


def test_a_client_that_connects_again_does_not_step_on_a_fresh_session(openenv):
    """Newer clients of openenv connect again without a word."""

    async def play(url):
        client = openenv.GenericEnvClient(base_url=url)
        await client.reset()
        await client._ws.close()
        with pytest.raises(Exception, match=r"no episode|OK"):
            await client.step({"response": "so"})
        await client.close()

    with serve(Echo) as server:
        asyncio.run(play(server.url))


# ---- our client, their server -------------------------------------------------------------------


def test_our_client_plays_in_their_server(address, guessing):
    async def play():
        env = OpenEnvEnv(address, to_action=number)
        opening = await env.reset({"secret": 5, "color": "red"})
        assert opening == [{"role": "user", "content": "guess: ['color']"}]
        step = await env.step("4")
        assert step.messages == [{"role": "user", "content": "higher"}]
        assert (step.reward, step.done, step.truncated) == (0.0, False, False)
        assert step.info in (None, {"steps": 1})  # openenv-core 0.3 drops the metadata
        step = await env.step("5")
        assert (step.reward, step.done) == (1.0, True)
        await env.close()

    asyncio.run(play())
    wait_until(lambda: not guessing.Guessing.open)


@pytest.mark.parametrize("wrapped", [False, True])
def test_our_client_uses_the_types_of_their_client(address, guessing, wrapped):
    client = guessing.Client(base_url=address)
    client = client.sync() if wrapped else client

    async def play(env):
        assert await env.reset({"secret": 5}) == [{"role": "user", "content": "guess: []"}]
        return await env.step("5")

    def to_action(response):
        return guessing.Guess(number=int(response))

    step = asyncio.run(play(OpenEnvEnv(client, to_action=to_action)))
    assert step.messages == [{"role": "user", "content": "yes"}]
    assert (step.reward, step.done) == (1.0, True)
    seen = []
    to_messages = lambda observation: seen.append(observation.hint) or []  # noqa: E731
    env = OpenEnvEnv(client, to_action=to_action, to_messages=to_messages)
    asyncio.run(play_only(env, "5"))
    assert seen in (["guess: []", "higher"], ["guess: []", "lower"])
    with pytest.raises(TypeError, match="give to_action= that makes its action"):
        asyncio.run(play(OpenEnvEnv(client)))


async def play_only(env, *responses):
    await env.reset()
    try:
        return [await env.step(response) for response in responses]
    finally:
        await env.close()


def test_an_action_that_their_server_refuses_names_what_it_expects(address):
    with pytest.raises(OpenEnvError, match=r"VALIDATION_ERROR.*number.*give to_action=") as caught:
        asyncio.run(play_only(OpenEnvEnv(address), "5"))
    assert caught.value.code == "VALIDATION_ERROR"


async def test_episodes_wait_for_room_in_their_server(address, monkeypatch, caplog):
    monkeypatch.setattr(client_session, "_PATIENCE", 0.0)
    held = asyncio.Event()

    async def hold(env):
        await env.reset()
        await held.wait()
        await env.close()

    with caplog.at_level(logging.WARNING, "torchrl_mt"):
        holding = [asyncio.create_task(hold(OpenEnvEnv(address))) for _ in range(2)]
        envs = [OpenEnvEnv(address, to_action=number) for _ in range(3)]
        waiting = [asyncio.create_task(play_only(env, "3")) for env in envs]
        await until(lambda: "wait for a free session" in caplog.text)
        held.set()
        await asyncio.gather(*holding)
        assert [steps[0].reward for steps in await asyncio.gather(*waiting)] == [1.0] * 3
