"""Requests that no sane client sends: each is understood or refused by name, and none does harm."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.chat.families import QWEN3
from tests.chat.families_in_play import stop_of, tokenizer_of
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import examples
from torchrl_mt.chat.replies import ParsedReply

from .helpers import counting_engine, failing, ledger_of, ledger_of_engine, post, session_of, user

MESSAGES = b'"messages":[{"role":"user","content":"one"}]'


def nested(depth):
    return b"[" * depth + b"]" * depth


def with_(field):
    return b"{" + MESSAGES + b"," + field + b"}"


def calling(function=None, **call):
    function = {"name": "f", "arguments": "{}", **(function or {})}
    call = {"id": "a", "type": "function", "function": function, **call}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return json.dumps({"messages": [user("one"), said, user("one")]}).encode()


def saying(**message):
    return json.dumps({"messages": [{"role": "user", "content": "one", **message}]}).encode()


REFUSED = {
    "NaN": (with_(b'"temperature":NaN'), None),
    "NaN below": (with_(b'"chat_template_kwargs":{"a":NaN}'), None),
    "too large a number": (with_(b'"temperature":1e999'), None),
    "a huge integer": (with_(b'"temperature":1' + b"0" * 400), "temperature"),
    "a huge seed": (with_(b'"seed":1' + b"0" * 300), "seed"),
    "a huge top_k": (with_(b'"top_k":1' + b"0" * 30), "top_k"),
    "a low top_k": (with_(b'"top_k":-2'), "top_k"),
    "a share above 1": (with_(b'"min_p":1.5'), "min_p"),
    "a huge length": (with_(b'"max_tokens":1' + b"0" * 30), "max_tokens"),
    "too many stop strings": (with_(b'"stop":[' + b'"x",' * 999 + b'"x"]'), "stop"),
    "too long a stop string": (with_(b'"stop":"' + b"x" * 9999 + b'"'), "stop"),
    "nested variables": (with_(b'"chat_template_kwargs":{"a":' + nested(970) + b"}"), None),
    "a nested message": (
        b'{"messages":[{"role":"user","content":"one","x":' + nested(970) + b"}]}",
        None,
    ),
    "half a character": (saying(content="\ud800"), None),
    "half a character as model": (with_(b'"model":"\\uD800"'), None),
    "half a character as field": (with_(b'"\\udfff":1'), None),
    "half a character in bytes": (with_(b'"model":"\xed\xa0\x80"'), None),
    "bytes of UTF-16": (("{" + MESSAGES.decode() + "}").encode("utf-16"), None),
    "stream as text": (with_(b'"stream":"yes"'), "stream"),
    "stream as number": (with_(b'"stream":1'), "stream"),
    "options of streams": (with_(b'"stream":true,"stream_options":3'), "stream_options"),
    "a list as model": (with_(b'"model":["x"]'), "model"),
    "n is true": (with_(b'"n":true'), "n"),
    "max_tokens is true": (with_(b'"max_tokens":true'), "max_tokens"),
    "a tool that is none": (with_(b'"tools":[{"type":"function","function":3}]'), "tools"),
    "a template": (
        with_(b'"chat_template_kwargs":{"chat_template":"{{ 1 }}"}'),
        "chat_template_kwargs",
    ),
    "no field": (with_(b'"":1'), ""),
    "a list as id of a call": (calling(id=["a"]), "messages"),
    "a list as id of a result": (saying(tool_call_id=["a"]), "messages"),
    "a list as name of a tool": (calling({"name": ["f"]}), "messages"),
    "no name of a tool": (calling({"name": None}), "messages"),
    "content in parts of two kinds": (saying(content=[{"text": "one"}, "two"]), "messages"),
    "a mapping as content": (saying(content={"text": "one"}), "messages"),
    "a number as role": (saying(role=3), "messages"),
    "a role that the template refuses": (saying(role="wizard"), "messages"),
    "several replies": (with_(b'"n":2'), "n"),
    "log-probs": (with_(b'"logprobs":true'), "logprobs"),
    "JSON mode": (with_(b'"response_format":{"type":"json_object"}'), "response_format"),
    "a penalty": (with_(b'"presence_penalty":0.5'), "presence_penalty"),
    "a misspelt field": (with_(b'"tempreature":1'), "tempreature"),
    "a forced call": (with_(b'"tool_choice":"required"'), "tool_choice"),
    "a temperature as text": (with_(b'"temperature":"hot"'), "temperature"),
    "no length": (with_(b'"max_tokens":0'), "max_tokens"),
    "a seed that is no integer": (with_(b'"seed":1.5'), "seed"),
    "a number as stop string": (with_(b'"stop":[3]'), "stop"),
    "a mapping as tools": (with_(b'"tools":{"a":1}'), "tools"),
    "a number as variables": (with_(b'"chat_template_kwargs":3'), "chat_template_kwargs"),
    "a number as effort": (with_(b'"reasoning_effort":3'), "reasoning_effort"),
    "no messages": (b'{"messages":[]}', "messages"),
    "no role": (b'{"messages":[{"content":"x"}]}', "messages"),
    "an image without its data": (saying(content=[{"type": "image"}]), "messages"),
    "a number as call": (saying(role="assistant", tool_calls=[3]), "messages"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(name):
    content, param = REFUSED[name]
    engine = counting_engine()

    async with session_of(engine) as session:
        reply = await session.http_client.post("/chat/completions", content=content)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == param
        assert error["message"].endswith(".")
        assert session.turns() == session.transcript == []
    assert engine.calls == []


ANSWERED = {
    "keys twice": b'{"messages":[],' + MESSAGES + b"}",
    "a whole character in halves": with_(b'"model":"\\ud83d\\ude00"'),
    "nested": with_(b'"chat_template_kwargs":{"a":' + nested(50) + b"}"),
    "nothing in many fields": with_(b'"stop":"","tools":[],"n":null,"stream":null,"model":null'),
    "content in parts": saying(content=[{"text": "one"}, {"text": " two"}]),
}


@pytest.mark.parametrize("name", ANSWERED)
async def test_what_is_answered(name):
    async with session_of(counting_engine()) as session:
        reply = await session.http_client.post("/chat/completions", content=ANSWERED[name])
        assert reply.status_code == 200, reply.text
        assert len(session.turns()) == 1


async def test_prompts_of_any_kind_of_tokens():
    async with session_of(counting_engine()) as session:
        for prompt in ([True], [1.0], [[1], [2]], [], "one", {}, [[]], [None], None):
            reply = await session.http_client.post("/completions", json={"prompt": prompt})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "prompt"
        assert session.turns() == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "one", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


def some(fields, **known):
    """Mappings with some of these fields; their values are anything, or what is known."""
    parts = {f: st.one_of(known[f], anything) if f in known else anything for f in fields}
    return st.fixed_dictionaries({}, optional=parts)


functions = some(["name", "arguments"], name=st.just("f"), arguments=st.just('{"a": 1}'))
calls = st.lists(some(["id", "type", "function"], id=st.just("a"), function=functions), max_size=2)
messages = st.lists(
    some(
        ["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name"],
        role=st.sampled_from(["user", "assistant", "tool", "system"]),
        content=st.just("one"),
        tool_calls=calls,
    ),
    max_size=3,
)
FIELDS = (
    "messages model tools stream stream_options stop max_tokens seed n temperature top_p "
    "chat_template_kwargs tool_choice prompt response_format"
)
tools = st.lists(some(["type", "function"], function=functions), max_size=2)
bodies = some(FIELDS.split(), messages=messages, tools=tools)


@examples(150, few=12)
@given(st.lists(bodies | anything, min_size=5, max_size=5), st.sampled_from(["", "/chat"]))
def test_any_request_is_a_turn_or_an_error_by_name(requests, kind):
    engine = counting_engine()

    async def main():
        async with session_of(engine) as session:
            for body in requests:
                before = len(session.turns())
                content = json.dumps(body).encode()
                reply = await session.http_client.post(f"{kind}/completions", content=content)
                assert reply.status_code in (200, 400), reply.text
                assert len(session.turns()) == before + (reply.status_code == 200)
                if reply.status_code == 400:
                    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert ledger_of(session) == ledger_of_engine(engine)

    asyncio.run(main())


@pytest.mark.parametrize("depth", [30, 150, 400, 3000])
async def test_a_reply_as_nested_as_one_likes(depth):
    """A model under training samples anything, also what no parser can go down into."""
    tokenizer = tokenizer_of(QWEN3)
    value = '{"a":' * depth + "1" + "}" * depth
    said = f'<tool_call>{{"name": "look", "arguments": {value}}}</tool_call>'
    text = said + stop_of(QWEN3, {"role": "assistant", "content": said})
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(tokenizer, lambda prompt: list(ids), stop_ids={ids[-1]})

    async with session_of(engine) as session:
        messages = [user("q")]
        for _ in range(2):
            body = await post(session, messages)
            messages += [body["choices"][0]["message"], user("on")]
        assert [turn.parent for turn in session.turns()] == [-1, 0]


@pytest.mark.parametrize("answer", [None, 3, ParsedReply(3), ParsedReply("", tool_calls=[{}])])
async def test_a_parser_that_returns_nonsense(answer):
    """It is named, the server goes on, and a call that was not answered is no turn."""

    async with session_of(counting_engine(), tool_parser=lambda text: answer) as session:
        request = {"messages": [user("one")]}
        reply = await session.http_client.post("/chat/completions", json=request)
        answered = reply.status_code == 200
        if not answered:
            assert reply.status_code == 500
            assert "error" in reply.json()
        await session.close()
        assert len(session.turns()) == answered


async def test_arguments_that_are_equal_in_python_only_are_a_fork():
    """``True == 1`` in Python; as JSON values they differ."""

    async with session_of(counting_engine()) as session:
        bodies = []
        for value in (1, True):
            bodies.append({"messages": [{**user("one"), "flag": value}]})
            reply = await session.http_client.post("/chat/completions", json=bodies[-1])
            assert reply.status_code == 200
        sent = [entry["request"] for entry in session.transcript]
        assert json.dumps(sent) == json.dumps(bodies)


async def test_an_error_says_which_field_the_engine_refused(engine):
    engine.generate = failing(ValueError("top_p must be in (0, 1], got 2."))

    async with session_of(engine) as session:
        body = {"messages": [user("one")], "top_p": 2}
        reply = await session.http_client.post("/chat/completions", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "top_p"
