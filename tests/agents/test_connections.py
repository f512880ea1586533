"""Clients that connect, ask, repeat and leave at bad moments; and what is left when they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from contextlib import asynccontextmanager

import psutil
import pytest

pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.waiting import until
from torchrl_mt.agents import AgentServer
from torchrl_mt.collectors import Limits
from torchrl_mt.engines import Completion

from .helpers import (
    WORDS,
    counting_engine,
    failing,
    gated_engine,
    ledger_of,
    ledger_of_engine,
    session_of,
    user,
)

BODY = json.dumps({"messages": [user("one")]}).encode()


def request_of(session, body=BODY, *headers, length=None):
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", *headers]
    lines.append(f"Authorization: Bearer {session.api_key}")
    if not any("Transfer-Encoding" in header for header in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@asynccontextmanager
async def connection_to(session):
    port = int(session.base_url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def response_of(reader):
    """Status and body of the next response of a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def status_of(session, connection):
    """Status of the response to a request on a connection."""
    reader, writer = connection
    writer.write(request_of(session))
    return (await response_of(reader))[0]


# ---- the wire -----------------------------------------------------------------------------------


async def test_requests_in_a_row_and_in_pieces(engine):
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"

    async with session_of(engine) as session, connection_to(session) as (reader, writer):
        writer.write(request_of(session) * 3)
        writer.write(request_of(session, pieces, "Transfer-Encoding: chunked"))
        ids = {json.loads((await response_of(reader))[1])["id"] for _ in range(4)}
        assert ids == set(session.completion_ids)
        assert ledger_of(session) == ledger_of_engine(engine)
    assert len(engine.calls) == 4


NO_HTTP = {
    "no HTTP": b"\x00\xff\r\n\r\n",
    "an endless header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000,
    "no length": b"POST /v1/models HTTP/1.1\r\nContent-Length: x\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=list(NO_HTTP))
async def test_what_is_no_http_ends_its_connection_only(sent):
    async with session_of(counting_engine()) as session:
        async with connection_to(session) as (reader, writer):
            writer.write(sent)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        async with connection_to(session) as connection:
            assert await status_of(session, connection) == 200


@pytest.mark.parametrize("leave", ["close", "half-close", "in the body", "no chunk"])
async def test_a_connection_that_ends_early_leaves_no_turn(leave):
    engine = gated_engine()

    async with AgentServer(engine) as server:
        session = server.open()
        async with connection_to(session) as (reader, writer):
            if leave in ("close", "half-close"):
                writer.write(request_of(session))
                await engine.asked.wait()
            elif leave == "in the body":
                writer.write(request_of(session, length=1000))
                await until(lambda: server._in_progress)
            else:
                writer.write(request_of(session, b"zz\r\n", "Transfer-Encoding: chunked"))
                await reader.read()
            if leave == "half-close":
                writer.write_eof()
                await reader.read()
        await until(lambda: not server._in_progress)
        assert engine.cancelled == engine.asked.is_set()
        await session.close()
        assert session.turns() == []
    assert engine.calls == []


@pytest.mark.parametrize("sent", ["", "POST /v1/chat", "letter by letter"])
async def test_a_connection_without_a_request_is_closed(sent):
    async with (
        session_of(counting_engine(), idle_timeout=0.1) as session,
        connection_to(session) as (reader, writer),
    ):
        writer.write(sent.encode())
        end = asyncio.ensure_future(reader.read())
        while not end.done():
            if sent == "letter by letter":
                writer.write(b"a")
            await asyncio.sleep(0.01)


STRANGE = {
    "nothing": b"",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nAuth",
    "no key": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a wrong key": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-1-2\r\n\r\n",
}


@pytest.mark.parametrize("sent", STRANGE.values(), ids=list(STRANGE))
async def test_a_strangers_connection_ends_though_others_may_be_idle_for_long(sent, monkeypatch):
    monkeypatch.setattr("torchrl_mt.agents.server._STRANGER_SECONDS", 0.02)

    async with session_of(counting_engine()) as session, connection_to(session) as known:
        assert await status_of(session, known) == 200
        async with connection_to(session) as (reader, writer):
            writer.write(sent)
            await reader.read()  # to its end
        assert await status_of(session, known) == 200


async def test_strangers_do_not_take_the_place_of_those_who_have_a_key():
    async with (
        session_of(counting_engine(), max_requests=3) as session,
        contextlib.AsyncExitStack() as stack,
    ):
        known = await stack.enter_async_context(connection_to(session))
        assert await status_of(session, known) == 200
        strangers = [await stack.enter_async_context(connection_to(session)) for _ in range(6)]
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in strangers]
        await until(lambda: sum(end.done() for end in ends) == 4)
        for each in (known, await stack.enter_async_context(connection_to(session))):
            assert await status_of(session, each) == 200
        for end in ends:
            end.cancel()


async def test_a_body_that_does_not_come_is_status_408():
    async with AgentServer(counting_engine(), idle_timeout=0.3) as server:
        session = server.open()
        async with connection_to(session) as (reader, writer):
            writer.write(request_of(session, b"{", length=1000))
            status, body = await response_of(reader)
            # The session may have ended first: nothing was asked in it.
            assert status in (408, 409)
            assert "error" in json.loads(body)
            await reader.read()


async def test_a_call_that_takes_long_is_not_idle():
    engine = gated_engine()
    async with (
        session_of(engine, idle_timeout=0.05) as session,
        connection_to(session) as (reader, writer),
    ):
        writer.write(request_of(session))
        await asyncio.sleep(0.2)
        engine.gate.set()
        assert (await response_of(reader))[0] == 200


# ---- calls that cross ---------------------------------------------------------------------------


async def ask(session, *, retry="0", body=BODY):
    headers = [("x-stainless-retry-count", retry.encode("latin-1"))]
    return await session.http_client.post("/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize("retry", ["\xb2", "9" * 5000, "-1", "1.5", ""])
async def test_a_count_of_retries_that_is_none(retry):
    async with session_of(counting_engine()) as session:
        assert (await ask(session, retry=retry)).status_code == 200


async def test_a_retry_while_its_call_is_being_cancelled_is_a_new_call():
    engine = gated_engine()
    generate, may_end = engine.generate, asyncio.Event()

    async def ends_slowly(*args, **kwargs):
        try:
            return await generate(*args, **kwargs)
        except asyncio.CancelledError:
            await may_end.wait()
            raise

    engine.generate = ends_slowly
    async with session_of(engine) as session:
        first = asyncio.ensure_future(ask(session))
        await engine.asked.wait()
        first.cancel()
        await until(lambda: engine.cancelled)
        second = asyncio.ensure_future(ask(session, retry="1"))
        await until(lambda: session.num_calls == 2)
        engine.gate.set()
        assert (await second).status_code == 200
        may_end.set()
        await asyncio.wait([first])
        assert len(session.turns()) == len(engine.calls) == 1


async def test_a_retry_repeats_its_own_question_and_not_another_like_it(engine):
    """Two samples of one question, the second of which failed at first."""
    generate = engine.generate
    async with session_of(engine) as session:
        first = await ask(session)
        engine.generate = failing(OSError("the cable is out"))
        assert (await ask(session)).status_code == 500
        engine.generate = generate
        second = await ask(session, retry="1")
        assert first.json()["id"] != second.json()["id"]
        again = await ask(session, retry="1")
        assert again.json()["id"] in session.completion_ids
        assert session.error is None
        assert len(session.turns()) == len(engine.calls) == 2


async def test_an_engine_that_cancels_its_call_has_failed(engine):
    engine.generate = failing(asyncio.CancelledError())

    async with session_of(engine) as session:
        reply = await ask(session)
        assert reply.status_code == 500
        assert "the engine cancelled the call" in reply.json()["error"]["message"]
        assert session.error is not None


async def test_calls_that_are_given_one_object_as_answer_are_turns_of_their_own(engine):
    """The calls end in the opposite order of their beginnings."""
    answer = Completion([engine.tokenizer.eos_token_id], [-1.0], [0], "stop")

    asked, gates = [], [asyncio.Event() for _ in WORDS]

    async def generate(prompt_ids, **sampling):
        asked.append(list(prompt_ids))
        await gates[len(asked) - 1].wait()
        return answer

    engine.generate = generate
    async with session_of(engine) as session:
        asking = []
        for k, word in enumerate(WORDS):
            body = json.dumps({"messages": [user(word)]}).encode()
            asking.append(asyncio.ensure_future(ask(session, body=body)))
            await until(lambda k=k: len(asked) == k + 1)
        for gate, reply in zip(reversed(gates), reversed(asking), strict=True):
            gate.set()
            assert (await reply).status_code == 200
        assert [list(turn.prompt_ids) for turn in session.turns()] == asked
        said = [turn.messages[0]["content"] for turn in session.turns()]
        assert said == list(WORDS)
        assert session.completion_ids == [(await reply).json()["id"] for reply in asking]


async def test_a_lost_reply_like_one_that_was_gone_on_from_is_no_turn(engine):
    async with AgentServer(engine) as server:
        session = server.open()
        first = (await ask(session)).json()
        lost = session.call("chat", BODY)  # Nobody gets its answer.
        await lost.wait()
        said = first["choices"][0]["message"]
        body = json.dumps({"messages": [user("one"), said, user("two")]}).encode()
        last = (await ask(session, body=body)).json()
        assert len(session.turns()) == 3
        await session.close()
        assert session.completion_ids == [first["id"], last["id"]]
        assert [turn.parent for turn in session.turns()] == [-1, 0]


async def test_a_session_that_ends_answers_those_who_wait():
    engine = gated_engine()
    async with session_of(engine) as session:
        asking = [asyncio.ensure_future(ask(session)) for _ in range(3)]
        async with connection_to(session) as (reader, writer):
            writer.write(request_of(session))
            await until(lambda: session.num_waiting == 4)
            await session.close()
            assert (await response_of(reader))[0] == 409
        assert [(await reply).status_code for reply in asking] == [409] * 3
        assert session.turns() == []


# ---- what is left -------------------------------------------------------------------------------


def listening():
    return [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]


@pytest.mark.parametrize("what", ["nothing", "half a body", "a call", "a stream", "new variables"])
async def test_a_server_that_stops_leaves_nothing(what):
    before, engine = listening(), gated_engine()
    server = AgentServer(engine)
    await server.start()
    port, asking = server.port, None
    if what != "nothing":
        session = server.open()
        body = {"messages": [user("one")]}
        if what == "a stream":
            body["stream"] = True
            engine.gate.set()
        if what == "new variables":
            body["chat_template_kwargs"] = {"a": 1}
        reader, asking = await asyncio.open_connection("127.0.0.1", port)
        length = 1000 if what == "half a body" else None
        asking.write(request_of(session, json.dumps(body).encode(), length=length))
        await until(lambda: server._in_progress)
        if what == "a call":
            await engine.asked.wait()
        if what == "a stream":
            await reader.readuntil(b"[DONE]\n\n")
    await server.stop()
    if asking is not None:
        asking.close()
        assert session.is_closed
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises(RuntimeError, match="not running"):
        server.open()
    assert server._in_progress == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    assert listening() == before


async def test_a_closed_session_is_forgotten():
    async with AgentServer(counting_engine(), limits=Limits(max_turns=3)) as server:
        session = server.open()
        await ask(session)
        await session.close()
        found = weakref.ref(session)
        del session
        gc.collect()
        assert found() is None
