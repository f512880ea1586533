"""The server as OpenAI's own client meets it: keys, errors, streams, retries, clients that go away."""

from __future__ import annotations

import asyncio
from contextlib import closing
from itertools import pairwise

import httpx
import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")
pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.idle_clock import LIMIT, Loop  # noqa: E402
from tests.tiers import slow  # noqa: E402
from tests.waiting import until  # noqa: E402
from torchrl_mt.agents import AgentServer  # noqa: E402
from torchrl_mt.collectors import Limits  # noqa: E402
from torchrl_mt.engines import Completion  # noqa: E402

from .helpers import (  # noqa: E402
    WORDS,
    ask,
    check_stream,
    client_of,
    counting_engine,
    failing,
    gated_engine,
    ledger_of,
    ledger_of_engine,
    session_of,
    user,
)

SOCKETS = pytest.mark.parametrize("socket", [False, True], ids=["in-process", "socket"])


@SOCKETS
async def test_a_call_is_a_turn_with_exactly_what_the_engine_gave(engine, socket):
    async with session_of(engine) as session:
        client = client_of(session, socket=socket)
        messages = [user("one")]
        for _ in range(3):
            completion = await ask(client, messages)
            messages += [completion.choices[0].message, user("two")]
        assert session.completion_ids[-1] == completion.id
        ledger = ledger_of(session)
        assert [turn.parent for turn in session.turns()] == [-1, 0, 1]
    assert ledger == ledger_of_engine(engine)
    for (prompt, answer, _), (longer, _, _) in pairwise(ledger):
        assert longer[: len(prompt) + len(answer)] == [*prompt, *answer]


@pytest.mark.parametrize("number_of_sessions", [8, slow(64)])
async def test_sessions_at_once_do_not_mix(engine, number_of_sessions):
    async def play(server, number):
        session = server.open(number)
        client = client_of(session, socket=number % 2 == 0)
        messages = [user(WORDS[number % 4])]
        for _ in range(8):
            completion = await ask(client, messages)
            messages += [completion.choices[0].message, user("three")]
        found = ledger_of(session)
        await session.close()
        return found

    async with AgentServer(engine) as server:
        sessions = (play(server, number) for number in range(number_of_sessions))
        ledgers = await asyncio.gather(*sessions)
    assert [len(ledger) for ledger in ledgers] == [8] * number_of_sessions
    assert sorted(turn for ledger in ledgers for turn in ledger) == sorted(ledger_of_engine(engine))
    for ledger in ledgers:
        line = []
        for prompt, answer, _ in ledger:
            assert prompt[: len(line)] == line
            line = [*prompt, *answer]


async def test_keys():
    async with AgentServer(counting_engine()) as server:
        session, other = server.open(), server.open()
        assert session.api_key != other.api_key
        client = client_of(session)
        await ask(client, [user("one")])
        transport = httpx.AsyncHTTPTransport()
        async with httpx.AsyncClient(transport=transport) as plain:
            url = f"{session.base_url}/chat/completions"
            basic = f"Basic {session.api_key}".encode()  # another scheme
            for key in (b"", b"Bearer x", "Bearer sk-1-é".encode(), basic):
                reply = await plain.post(url, json={}, headers={"Authorization": key})
                assert reply.status_code == 401
                assert set(reply.json()["error"]) >= {"message", "type", "param"}
            await session.close()
            key = {"Authorization": f"Bearer {session.api_key}"}
            reply = await plain.post(url, json={}, headers=key)
            assert reply.status_code == 409
            assert (await plain.get(server.origin + "/health")).status_code == 200
        assert len(session.turns()) == 1
        await ask(client_of(other), [user("one")])


@SOCKETS
@pytest.mark.parametrize("stream", [False, True])
async def test_limits_are_named_with_status_400(socket, stream):
    async with session_of(counting_engine(), limits=Limits(max_turns=1)) as session:
        client = client_of(session, socket=socket)
        await ask(client, [user("one")])
        with pytest.raises(openai.BadRequestError, match="max_turns") as found:
            await ask(client, [user("one")], stream=stream)
        assert found.value.code == "limit_reached"
        assert len(session.turns()) == 1


async def test_fields_that_change_nothing_are_accepted_and_the_others_reach_the_engine(engine):
    generate, asked = engine.generate, []

    async def note(prompt_ids, **sampling):
        asked.append(sampling)
        return await generate(prompt_ids, **sampling)

    engine.generate = note
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}
    ignored |= {"tools": [], "n": 1, "presence_penalty": 0.0}
    used = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
    async with session_of(engine) as session:
        more = {"stop": "two", "max_completion_tokens": 5}
        await ask(client_of(session), [user("one")], **ignored, **used, **more)
    assert asked == [{**used, "max_new_tokens": 5, "stop": ["two"]}]


@SOCKETS
async def test_a_stream_has_the_parts_of_the_whole(socket):
    async with session_of(counting_engine()) as session:
        client = client_of(session, socket=socket)
        whole = await ask(client, [user("one")])
        await check_stream(client, [user("one")], whole)
        assert len(session.turns()) == 2


async def test_tokens_in_tokens_out(engine):
    async with session_of(engine) as session:
        client = client_of(session)
        done = await client.completions.create(model="any", prompt=[3, 4, 5], max_tokens=7)
        with pytest.raises(openai.BadRequestError, match="token ids"):
            await client.completions.create(model="any", prompt="one")
        assert session.completion_ids == [done.id]
        ((prompt, answer, _),) = ledger_of(session)
    assert (prompt, answer) == ([3, 4, 5], done.choices[0].model_extra["token_ids"])


async def test_models_beside_the_policy_make_no_turns():
    engine, judge = counting_engine(), counting_engine()

    async with session_of(engine, models={"policy": engine, "judge": judge}) as session:
        client = client_of(session)
        assert [model.id async for model in client.models.list()] == ["policy", "judge"]
        for name in ("judge", "any/name"):
            assert (await client.models.retrieve(name)).id == name
        for model in ("judge", "gpt-4o", "policy"):
            await client.chat.completions.create(model=model, messages=[user("one")])
        assert len(session.turns()) == 2
        asked = [entry["request"]["model"] for entry in session.transcript]
        assert asked == ["judge", "gpt-4o", "policy"]
    assert (len(engine.calls), len(judge.calls)) == (2, 1)


@SOCKETS
async def test_a_client_that_goes_away_cancels_its_call_and_leaves_no_turn(socket):
    engine = gated_engine()
    async with session_of(engine) as session:
        client = client_of(session, socket=socket, max_retries=0)
        asking = asyncio.ensure_future(ask(client, [user("one")]))
        await engine.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await client.close()
        await until(lambda: engine.cancelled)
        assert session.turns() == []
        assert session.transcript == []


def retried(number):
    return {"x-stainless-retry-count": str(number)}


async def test_a_retry_is_answered_from_the_record_and_the_same_question_is_not(engine):
    async with session_of(engine) as session:
        client = client_of(session)
        first = await ask(client, [user("one")])
        again = await ask(client, [user("one")], extra_headers=retried(1))
        new = await ask(client, [user("one")])
        assert first.id == again.id != new.id
        assert first == again
        assert len(session.turns()) == 2
    assert len(engine.calls) == 2


async def test_a_retry_joins_the_call_in_progress():
    engine = gated_engine()
    async with session_of(engine) as session:
        client = client_of(session)
        first = asyncio.ensure_future(ask(client, [user("one")]))
        await engine.asked.wait()
        second = asyncio.ensure_future(
            ask(client_of(session, socket=True), [user("one")], extra_headers=retried(1))
        )
        await until(lambda: session.num_waiting == 2)
        first.cancel()  # The other still waits.
        engine.gate.set()
        await second
        assert engine.cancelled == 0
        assert len(engine.calls) == len(session.turns()) == 1


async def test_an_engine_that_fails_is_status_500_with_its_name(engine):
    engine.generate = failing(OSError("the cable is out"))

    async with session_of(engine) as session:
        with pytest.raises(openai.InternalServerError, match="OSError: the cable is out"):
            await ask(client_of(session), [user("one")])
        assert isinstance(session.error, OSError)


async def test_sizes_and_numbers_are_bounded():
    engine = gated_engine()
    async with session_of(engine, max_body_bytes=1000, max_requests=1) as session:
        client = client_of(session, max_retries=0)
        with pytest.raises(openai.APIStatusError, match="max_body_bytes=1000") as found:
            await ask(client, [user("one " * 500)])
        assert found.value.status_code == 413
        first = asyncio.ensure_future(ask(client, [user("one")]))
        await engine.asked.wait()
        with pytest.raises(openai.APIStatusError, match="max_requests=1") as found:
            await ask(client, [user("one")])
        assert found.value.status_code == 503
        engine.gate.set()
        await first


async def test_what_is_no_json_and_what_is_no_route():
    async with session_of(counting_engine()) as session:
        post = session.http_client.post
        for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
            reply = await post("/chat/completions", content=content)
            assert reply.status_code == 400
            assert "JSON" in reply.json()["error"]["message"]
        reply = await post("/embeddings", json={})
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == "POST /v1/embeddings is not answered here."
        assert (await session.http_client.get("/chat/completions")).status_code == 405


def test_an_idle_session_ends_by_itself():
    async def main():
        async with AgentServer(counting_engine(), idle_timeout=LIMIT) as server:
            session = server.open()
            await ask(client_of(session), [user("one")])
            while not session.is_closed:
                asyncio.get_running_loop().jump()
                await asyncio.sleep(0.005)
            assert len(session.turns()) == 1

    with closing(Loop()) as loop:
        loop.run_until_complete(main())


@pytest.mark.parametrize("name", ["max_body_bytes", "max_requests", "idle_timeout"])
def test_options_out_of_range_are_named(engine, name):
    with pytest.raises(ValueError, match=name):
        AgentServer(engine, **{name: 0})


async def test_a_stop_string_ends_the_text_and_the_next_prompt_ends_the_turn(engine):
    tokenizer = engine.tokenizer
    sampled = tokenizer("one four two")["input_ids"]

    async def generate(prompt_ids, **sampling):
        engine.calls.append((list(prompt_ids), sampling))
        return Completion(sampled, [-1.0] * 3, [0] * 3, "stop", stop_string="two")

    engine.generate = generate

    async with session_of(engine) as session:
        client = client_of(session)
        choice = (await ask(client, [user("one")], stop=["three", "two"])).choices[0]
        await ask(client, [user("one"), choice.message, user("four")])
        done = await client.completions.create(model="any", prompt=[3], stop="two")
        (prompt, answer, _), (longer, _, _), _ = ledger_of(session)
        text = done.choices[0]
    assert engine.calls[0][1]["stop"] == ["three", "two"]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text.text == "one four "
    assert answer == text.model_extra["token_ids"] == sampled
    assert longer[:-1][: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert longer[len(prompt) + len(sampled)] == tokenizer.eos_token_id
