"""The client: what it asks, what it makes of answers, and that an answer is never another question's."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
import socket
import sys
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from tests.envs.remote.served_envs import END, Asynchronous, Echo, Screen, Shop, Threaded
from tests.waiting import until, wait_until
from torchrl_mt.envs import (
    OpenEnvConnectionError,
    OpenEnvEnv,
    OpenEnvError,
    OpenEnvProtocolError,
    OpenEnvTimeoutError,
    TextEnv,
    TextStep,
    serve,
)
from torchrl_mt.envs.remote import session as session_module
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import with_stored_images

websockets = pytest.importorskip("websockets")
from websockets.asyncio.server import serve as serve_websockets  # noqa: E402

OPENING = {"observation": {"messages": [{"role": "user", "content": "begin"}]}, "done": False}


@pytest.fixture(autouse=True)
def fresh_servers(monkeypatch):
    """What a test finds out about servers is forgotten."""
    monkeypatch.setattr(session_module, "_servers", {})


class Fake:
    """A server that answers as it is told: text, a function of the connection, or silence (``None``)."""

    def __init__(self, *answers, resets=OPENING):
        self.answers, self.opening = list(answers), resets
        self.connections, self.requests, self.open = 0, [], 0

    async def _handle(self, connection):
        self.connections += 1
        self.open += 1
        try:
            async for raw in connection:
                request = json.loads(raw)
                self.requests.append(request)
                if request["type"] == "close":
                    continue
                answer = self.opening if request["type"] == "reset" else self.answers.pop(0)
                if callable(answer):
                    answer = await answer(connection)
                if isinstance(answer, dict):
                    answer = observed(**answer)
                if answer is not None:
                    await connection.send(answer)
        except websockets.exceptions.ConnectionClosed:
            pass
        finally:
            self.open -= 1

    @asynccontextmanager
    async def running(self, **options):
        """Serve; the value is the address."""
        async with serve_websockets(self._handle, "127.0.0.1", 0, **options) as server:
            yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def gone(self):
        await until(lambda: not self.open)


def observed(**data):
    return json.dumps({"type": "observation", "data": data})


def error(code, message="no"):
    return json.dumps({"type": "error", "data": {"code": code, "message": message}})


async def play(env, *responses, data=None):
    """The opening and the steps of an episode."""
    try:
        return [await env.reset(data)] + [await env.step(response) for response in responses]
    finally:
        await env.close()


@asynccontextmanager
async def at(fake, **options):
    """An environment at a fake server."""
    async with fake.running() as url:
        yield OpenEnvEnv(url, **options)


def run(fake, *responses, data=None, **options):
    """An episode in a fake server."""

    async def main():
        async with at(fake, **options) as env:
            return await play(env, *responses, data=data)

    return asyncio.run(main())


# ---- served text environments -------------------------------------------------------------------


@pytest.mark.parametrize("env", [Echo, Threaded, Asynchronous])
def test_a_served_environment_is_played_as_at_home(env):
    with serve(env) as server:
        opening, first, last = asyncio.run(play(OpenEnvEnv(server.url), "so", END, data={"n": 1}))
        assert opening == [{"role": "user", "content": "item: {'n': 1}"}]
        said = [{"role": "user", "content": "so"}]
        assert first == TextStep(said, reward=0.5, info={"heard": 1})
        assert last.done
        assert not last.truncated
        wait_until(lambda: server.sessions == 0)


async def test_tools_messages_and_whole_texts_arrive():
    with serve(Shop) as server:
        env = OpenEnvEnv(server.url)
        assert not env.whole_text
        await env.reset()
        assert env.tool_schemas[0]["function"]["name"] == "buy"
        assert env.whole_text
        said = {"role": "assistant", "content": "a", "tool_calls": [{}]}
        step = await env.step("all of it", said)
        await env.reset()
        assert (await env.step("alone")).messages[0]["content"] == "alone/alone/0"
    assert step.messages == [{"role": "tool", "content": "all of it/a/1"}]
    assert (step.done, step.truncated) == (True, True)


class Forgetful(TextEnv):
    def reset(self, data=None):
        return [{"role": "user", "content": "long"}]

    def step(self, response):
        return TextStep([], history=[{"role": "user", "content": "short"}])


def test_a_new_history_arrives():
    with serve(Forgetful) as server:
        _, step = asyncio.run(play(OpenEnvEnv(server.url), "a"))
    assert step.history == [{"role": "user", "content": "short"}]


def test_other_servers_are_told_no_step_ids():
    fake = Fake(OPENING, OPENING)
    run(fake, "a", "b")
    assert [set(request) for request in fake.requests[1:3]] == [{"type", "data"}] * 2


async def test_copies_share_no_session():
    class Mine(OpenEnvEnv):
        pass

    with serve(Echo) as server:
        env = Mine([server.url, server.url])
        env.more = [1]
        await env.reset(1)
        other = copy.deepcopy(env)
        assert type(other) is Mine
        assert other.more == [1]
        assert other.more is not env.more
        with pytest.raises(RuntimeError, match="reset first"):
            await other.step("a")
        await other.reset(2)
        assert (await env.step("a")).info == (await other.step("a")).info == {"heard": 1}
        await asyncio.gather(env.close(), other.close(), copy.deepcopy(env).close())
        wait_until(lambda: server.sessions == 0)


async def test_an_environment_may_be_reset_again():
    with serve(Echo, max_sessions=1) as server:
        env = OpenEnvEnv(server.url)
        for item in range(3):
            assert (await env.reset(item))[0]["content"] == f"item: {item}"
            await env.step("a")
        await env.close()
        wait_until(lambda: server.sessions == 0)


# ---- observations and actions of other servers --------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ({"text": "go on", "metadata": {}, "done": False}, "go on"),
        ({"text": "go on", "left": 3}, '{"text": "go on", "left": 3}'),
        ({"left": [1, "ä"]}, '{"left": [1, "ä"]}'),
        ({}, "{}"),
    ],
)
def test_an_observation_becomes_a_message(seen, text):
    opening, step = run(Fake({"observation": seen}, resets={"observation": seen}), "a")
    assert opening == step.messages == [{"role": "user", "content": text}]


def test_own_functions_make_messages_and_actions():
    numbered = [{"observation": {"n": n}} for n in (1, 2, 3)]
    fake = Fake(*numbered[1:], resets=numbered[0])
    to_messages = lambda seen: [{"role": "tool", "content": str(seen["n"])}]  # noqa: E731
    to_action = lambda response, message: {"code": response, "role": message["role"]}  # noqa: E731
    opening, first, last = run(fake, "a", "b", to_messages=to_messages, to_action=to_action)
    said = [messages[0]["content"] for messages in (opening, first.messages, last.messages)]
    assert said == ["1", "2", "3"]
    assert fake.requests[1]["data"] == {"code": "a", "role": "assistant"}


CUT = {"truncated": True}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"reward": None}, TextStep()),
        ({"reward": True, "done": True}, TextStep(reward=1.0, done=True)),
        ({"reward": 2, "metadata": {"a": 1}}, TextStep(reward=2.0, info={"a": 1})),
        ({"done": True, "truncated": True}, TextStep(done=True, truncated=True)),
        ({"done": True, "metadata": CUT}, TextStep(done=True, truncated=True, info=CUT)),
        ({"done": True, "truncated": "no"}, TextStep(done=True)),
        ({"done": False, "truncated": True}, TextStep()),
    ],
)  # fmt: skip
def test_rewards_ends_and_metadata(answer, expected):
    _, step = run(Fake({"observation": {"messages": []}, **answer}), "a")
    assert step == TextStep([], expected.reward, expected.done, expected.truncated, expected.info)


NOTHING = {"observation": {"messages": []}}
MALFORMED = [
    *("not json", "", b"\x00\x01", "[" * 100_000, "[]", "3", "{}"),
    '{"type": "state", "data": {}}',
    '{"type": "observation"}',
    '{"type": "observation", "data": []}',
    '{"type": "error", "data": "no"}',
    observed(),
    observed(observation="text"),
    observed(observation=None),
    observed(observation={"messages": "text"}),
    observed(observation={"messages": ["text"]}),
    *(
        observed(observation={"messages": [{"role": "user", "content": [image]}]})
        for image in (
            {"type": "image", "path": "/etc/hostname"},
            {"type": "image", "image": "secret.png"},
            {"type": "image_url", "image_url": {"url": "http://elsewhere/a.png"}},
            {"type": "image"},
        )
    ),
    *(
        observed(**NOTHING, reward=reward)
        for reward in ("1.0", [1.0], {}, float("nan"), float("inf"), 10**400)
    ),
    *(observed(**NOTHING, **wrong) for wrong in ({"done": "yes"}, {"done": None})),
    observed(**NOTHING, metadata=[1]),
]


@pytest.mark.parametrize("answer", MALFORMED)
async def test_an_answer_that_is_not_understood_ends_the_session(answer):
    fake = Fake(answer)
    async with at(fake) as env:
        await env.reset()
        with pytest.raises(OpenEnvProtocolError, match=r"^step at ws://127.0.0.1:\d+/ws failed: "):
            await env.step("a")
        with pytest.raises(OpenEnvConnectionError, match="the session has ended"):
            await env.step("b")
        await fake.gone()
        assert fake.connections == 1


def test_text_that_is_no_text_ends_the_session():
    async def garble(connection):
        await connection.send(b"\xff\xfe", text=True)

    with pytest.raises(OpenEnvProtocolError, match="the reply is no UTF-8"):
        run(Fake(garble), "a")


async def test_an_answer_that_comes_twice_is_not_that_of_the_next_question():
    async def twice(connection):
        await connection.send(observed(**NOTHING, reward=1.0))
        return observed(**NOTHING, reward=1.0)

    async with at(Fake(twice, NOTHING)) as env:
        await env.reset()
        assert (await env.step("a")).reward == 1.0
        await until(lambda: env._session._connection.recv_messages.frames)
        with pytest.raises(OpenEnvProtocolError, match="unasked"):
            await env.step("b")


def test_an_opening_that_is_not_understood_ends_the_session():
    for answer in (*MALFORMED[:16], observed(**NOTHING, done=True)):
        with pytest.raises(OpenEnvProtocolError, match=r"^reset at "):
            run(Fake(resets=answer))


def test_an_answer_that_is_too_large_is_named(monkeypatch):
    monkeypatch.setattr(session_module, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(OpenEnvProtocolError, match="larger than 1000 bytes"):
        run(Fake(observed(**NOTHING, more="a" * 1000)), "a")


def test_a_request_that_is_too_large_is_named():
    with serve(Echo) as server, pytest.raises(OpenEnvProtocolError, match="reads at most 16777216"):
        asyncio.run(play(OpenEnvEnv(server.url), "a" * 2**24))

    async def main():
        async with Fake().running(max_size=1000) as url:
            await play(OpenEnvEnv(url), "a" * 1001)

    with pytest.raises(OpenEnvConnectionError, match=r"1009.*too large"):
        asyncio.run(main())


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR", "FACTORY_ERROR", "other"])
def test_an_error_of_the_server_is_told_and_ends_the_session(code):
    with pytest.raises(OpenEnvError, match=f"{code}: the cat") as caught:
        run(Fake(error(code, "the cat ate it")), "a")
    assert type(caught.value) is OpenEnvError
    assert caught.value.code == code
    assert ("give to_action=" in str(caught.value)) == (code == "VALIDATION_ERROR")


# ---- sessions that are lost ---------------------------------------------------------------------


async def vanish(connection):
    connection.transport.abort()


async def leave(connection):
    await connection.close(4321, "good night")


@pytest.mark.parametrize(
    ("answer", "why"), [(vanish, "connection broke"), (leave, "4321 good night")]
)
async def test_a_lost_session_is_never_replaced(answer, why):
    fake = Fake(OPENING, answer)
    async with at(fake) as env:
        await env.reset()
        await env.step("a")
        with pytest.raises(OpenEnvConnectionError, match=why):
            await env.step("b")
        for _ in range(2):
            with pytest.raises(OpenEnvConnectionError, match="the session has ended"):
                await env.step("c")
        await env.close()
        assert fake.connections == 1
        await env.reset()  # another episode
        assert fake.connections == 2
        await env.close()


async def test_an_idle_session_is_lost_by_that_name():
    with serve(Echo, idle_timeout=0.01) as server:
        env = OpenEnvEnv(server.url)
        await env.reset()
        await env._session._connection.wait_closed()
        with pytest.raises(OpenEnvConnectionError, match=r"was lost.*4408 idle for 0.01 seconds"):
            await env.step("a")


async def test_a_late_answer_is_never_that_of_a_later_question():
    fake = Fake(None)
    async with at(fake, timeout=0.05) as env:
        await env.reset()
        with pytest.raises(OpenEnvTimeoutError, match=r"no reply within 0.05 seconds"):
            await env.step("a")
        with pytest.raises(OpenEnvConnectionError, match="step was not answered within"):
            await env.step("b")
        await fake.gone()
        assert len(fake.requests) == 2


@pytest.mark.parametrize("call", ["reset", "step"])
async def test_a_cancelled_call_ends_its_session(call):
    async def silent(connection):
        asked.set()

    asked, fake = asyncio.Event(), Fake(silent, resets=silent if call == "reset" else OPENING)
    async with at(fake) as env:
        if call == "step":
            await env.reset()
        task = asyncio.create_task(env.reset() if call == "reset" else env.step("a"))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake.gone()
        with pytest.raises((OpenEnvConnectionError, RuntimeError), match=r"cancelled|reset first"):
            await env.step("b")
        assert not any(each.running for each in session_module._servers.values())


async def test_a_server_that_does_not_take_leave_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(session_module, "_GOODBYE_SECONDS", 0.05)

    async def sleep(connection):
        connection.transport.pause_reading()
        return observed(**NOTHING, done=True)

    fake = Fake(sleep)
    async with fake.running(close_timeout=0.1) as url:
        assert (await play(OpenEnvEnv(url), "a"))[1].done


# ---- servers that are full or not there ---------------------------------------------------------


async def closes_as_full(connection):
    await connection.close(1013, "later")


@pytest.mark.parametrize("refusal", [error("CAPACITY_REACHED"), closes_as_full])
def test_an_episode_waits_for_room(refusal, monkeypatch, caplog):
    monkeypatch.setattr(session_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(session_module, "_PATIENCE", 0.0)
    caplog.set_level(logging.WARNING)
    resets = [refusal, refusal, refusal, observed(**OPENING)]

    async def refuse(connection):
        answer = resets.pop(0)
        return await answer(connection) if callable(answer) else answer

    opening, _ = run(Fake(OPENING, resets=refuse), "a")
    assert opening == OPENING["observation"]["messages"]
    assert caplog.text.count("wait for a free session") == 1


@pytest.mark.parametrize(
    ("status", "waits"), [(s, s in (429, 503)) for s in (429, 503, 401, 404, 502)]
)
async def test_the_status_of_a_refused_handshake(status, waits, monkeypatch):
    monkeypatch.setattr(session_module, "_FIRST_PAUSE", 0.001)
    refusals = [status] * 3

    def process_request(connection, request):
        return connection.respond(refusals.pop(), "because") if refusals else None

    async with Fake().running(process_request=process_request) as url:
        if waits:
            await play(OpenEnvEnv(url))
            assert not refusals
            return
        with pytest.raises(OpenEnvConnectionError, match=f"status {status}: because"):
            await OpenEnvEnv(url).reset()


def test_one_at_a_time_asks_a_full_server_again(monkeypatch):
    monkeypatch.setattr(session_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(session_module, "_LONGEST_PAUSE", 0.001)
    asking, most, room = 0, 0, asyncio.Event()

    async def refuse(connection):
        nonlocal asking, most
        if room.is_set():
            return observed(**OPENING)
        asking += 1
        most = max(most, asking) if fake.connections > 6 else 0
        await asyncio.sleep(0)
        asking -= 1
        if fake.connections > 12:
            room.set()
        return error("CAPACITY_REACHED")

    fake = Fake(resets=refuse)

    async def main():
        async with fake.running() as url:
            waiting = [asyncio.create_task(play(OpenEnvEnv(url))) for _ in range(6)]
            waiting[3].cancel()
            done = await asyncio.gather(*waiting, return_exceptions=True)
            assert sum(isinstance(each, asyncio.CancelledError) for each in done) == 1
            assert sum(isinstance(each, list) for each in done) == 5

    asyncio.run(main())
    assert most == 1
    assert fake.connections <= 5 + 13 + 5


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


async def test_a_session_goes_where_the_fewest_are():
    fakes = [Fake(), Fake(), Fake()]
    async with fakes[0].running() as a, fakes[1].running() as b, fakes[2].running() as c:
        urls = [f"http://127.0.0.1:{unused_port()}", a, b, c]
        envs = [OpenEnvEnv(urls) for _ in range(9)]
        await asyncio.gather(*(env.reset() for env in envs))
        assert [fake.open for fake in fakes] == [3, 3, 3]
        await asyncio.gather(*(env.close() for env in envs))
        assert not any(each.running for each in session_module._servers.values())


async def test_a_server_that_is_full_is_left_for_another():
    full, free = Fake(resets=error("CAPACITY_REACHED")), Fake()
    async with full.running() as a, free.running() as b:
        for _ in range(3):
            await play(OpenEnvEnv([a, b]))
        assert full.connections <= 1  # then it was asked last
        assert free.connections == 3


def test_a_server_that_is_not_there_rejects_the_episode():
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(OpenEnvConnectionError, match=r"^connect at ws://.*Connect"):
        asyncio.run(OpenEnvEnv([url, url]).reset())


def test_a_server_that_never_opens_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(OpenEnvConnectionError, match=r"not open within 0.05 seconds"):
            asyncio.run(OpenEnvEnv(url, timeout=0.05).reset())


def test_headers_open_the_door():
    with serve(Echo, token="secret") as server:
        with pytest.raises(OpenEnvConnectionError, match="status 401"):
            asyncio.run(OpenEnvEnv(server.url).reset())
        env = OpenEnvEnv(server.url, headers={"Authorization": "Bearer secret"})
        asyncio.run(play(env))


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"base_url": "localhost:8000"}, ValueError, "base_url must begin with"),
        ({"base_url": "http://"}, ValueError, "base_url must begin with"),
        ({"base_url": "http://a:99999"}, ValueError, "base_url must begin with"),
        ({"base_url": "http://a b"}, ValueError, "base_url must begin with"),
        ({"base_url": ["http://a", 3]}, ValueError, "base_url must begin with"),
        ({"base_url": []}, TypeError, "base_url must be an address"),
        ({"base_url": 3}, TypeError, "base_url must be an address"),
        ({"to_messages": 3}, TypeError, "to_messages must be a function"),
        ({"to_action": "a"}, TypeError, "to_action must be a function"),
        ({"headers": "a"}, TypeError, "headers must be a mapping"),
        ({"headers": {"a": 1}}, TypeError, "headers must be strings"),
        ({"headers": {"a": "b\r\nc: d"}}, ValueError, "headers must be printable"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
        ({"timeout": "1"}, TypeError, "timeout must be a number"),
    ],
)
def test_wrong_arguments_are_named(arguments, kind, match):
    with pytest.raises(kind, match=match):
        OpenEnvEnv(**{"base_url": "http://localhost:1", **arguments})


@pytest.mark.parametrize("wrong", [None, "text", 3])
def test_functions_that_return_something_else_are_named(wrong):
    with serve(Echo) as server:
        for text, options in {
            "to_action must return a mapping": {"to_action": lambda text: wrong},
            "to_messages must return a list": {"to_messages": lambda seen: wrong},
        }.items():
            with pytest.raises(TypeError, match=text):
                asyncio.run(play(OpenEnvEnv(server.url, **options), "a"))
        wait_until(lambda: server.sessions == 0)


@pytest.mark.parametrize("item", [{1: "a"}, {"x": object()}, float("nan"), {"x": {1, 2}}])
def test_an_item_that_json_cannot_hold_is_refused(item):
    with serve(Echo) as server, pytest.raises((TypeError, ValueError)):
        asyncio.run(play(OpenEnvEnv(server.url), data=item))


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    monkeypatch.setitem(sys.modules, "websockets.asyncio.server", None)
    for use in (lambda: OpenEnvEnv("http://localhost:1"), lambda: serve(Echo)):
        with pytest.raises(ImportError, match=r"pip install 'torchrl-mt\[remote\]'"):
            use()


def test_errors_can_be_pickled():
    for kind in (OpenEnvError, OpenEnvConnectionError, OpenEnvTimeoutError, OpenEnvProtocolError):
        error = kind("ws://a/ws", "step", "because", "CODE")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.code) == (kind, str(error), "CODE")


@pytest.mark.slow
def test_an_episode_on_two_event_loops_is_named():
    with serve(Echo) as server:
        env = OpenEnvEnv(server.url)
        asyncio.run(env.reset({"word": "a"}))
        with pytest.raises(RuntimeError, match="step was called on another event loop than reset"):
            asyncio.run(env.step("b"))
        asyncio.run(env.close())


@pytest.mark.parametrize("place", ["ws://127.0.0.1:9/ws", "http://elsewhere/ws", "http://["])
async def test_redirects_are_not_followed(place):
    """Headers may have secrets that are for this server alone."""

    def move(connection, request):
        response = connection.respond(HTTPStatus.FOUND, "")
        response.headers["Location"] = place
        return response

    async with serve_websockets(None, "127.0.0.1", 0, process_request=move) as made:
        port = made.sockets[0].getsockname()[1]
        env = OpenEnvEnv(f"http://127.0.0.1:{port}", headers={"X-Key": "secret"})
        with pytest.raises(OpenEnvConnectionError, match="give that address"):
            await env.reset({})


def test_images_of_served_environments_arrive_as_files():
    """As base64, they are above the megabyte that is the usual bound of a message."""
    expected = StoredImage.of(Screen.picture.data_uri())

    async def play(server, form):
        env = OpenEnvEnv(server.url)
        try:
            opening = await env.reset({"form": form})
            step = await env.step("go")
        finally:
            await env.close()
        return [*opening, *step.messages, *step.history]

    with serve(Screen) as server:
        for form in ("array", "PIL"):
            for message in with_stored_images(asyncio.run(play(server, form))):
                assert message["content"][1] == {"type": "image", "image": expected}
        with pytest.raises(OpenEnvError, match=r"no such\.png"):
            asyncio.run(play(server, "path"))
