"""Which requests go on from which replies, and with which tokens."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("httpx", reason="agents need the extra [agents]")

from tests.chat.families import FAMILIES, KIMI_K2, QWEN3
from tests.chat.families_in_play import call, stop_of, tokenizer_of
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import examples, few_or_many
from torchrl_mt.agents import export_interactions
from torchrl_mt.agents.conversation import ChatTokensCache, Conversation
from torchrl_mt.agents.messages import canonical, identities
from torchrl_mt.agents.requests import read_chat
from torchrl_mt.chat.replies import ParsedReply
from torchrl_mt.collectors import ChatOptions
from torchrl_mt.engines import Completion
from torchrl_mt.testing import tiny_chat_tokenizer

from .helpers import LOOK, WORDS, ask, client_of, counting_engine, ledger_of, post, session_of, user

leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def rewritten(value, draw):
    """The same JSON value with other spacing, key order and forms of numbers."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: rewritten(value[key], draw) for key in keys}
    if isinstance(value, list):
        return [rewritten(entry, draw) for entry in value]
    if type(value) is int and draw(st.booleans()):
        return float(value)
    return value


def plain(value):
    """Values as text, where numbers are floats and keys are in order."""
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


@examples(50)
@given(json_values, st.data())
def test_arguments_are_the_same_whatever_their_notation_and_only_then(value, data):
    same = json.loads(json.dumps(rewritten(value, data.draw)))
    assert canonical(value) == canonical(same)
    other = data.draw(json_values)
    assert (canonical(value) == canonical(other)) == (plain(value) == plain(other))


class Reference:
    """Finds what a request goes on from by comparing it with every dialogue so far."""

    def __init__(self) -> None:
        self.known = []

    def longest(self, messages):
        plain = [(m["role"], m["content"]) for m in messages]
        found = [
            (len(dialogue), k)
            for k, (dialogue, _) in enumerate(self.known)
            if plain[: len(dialogue)] == dialogue
        ]
        return self.known[max(found)[1]][1] if found else []

    def add(self, messages, answer, tokens):
        dialogue = [(m["role"], m["content"]) for m in [*messages, answer]]
        self.known.append((dialogue, tokens))


@few_or_many(4, 50)
def test_prompts_begin_with_the_tokens_of_the_longest_dialogue_they_go_on_from(examples):
    settings(max_examples=examples, deadline=None)(given(st.data())(check_dialogues))()


def check_dialogues(data):
    tokenizer = tiny_chat_tokenizer(" ".join(WORDS))
    conversation = Conversation(ChatTokensCache(tokenizer, ChatOptions()))
    reference, dialogues = Reference(), [[]]
    words = st.sampled_from(WORDS)

    async def play():
        for _ in range(data.draw(st.integers(1, 8))):
            messages = list(data.draw(st.sampled_from(dialogues)))
            if messages and data.draw(st.integers(0, 4)) == 0:
                place = data.draw(st.integers(0, len(messages) - 1))
                messages[place] = {**messages[place], "content": data.draw(words)}
            messages.append(user(data.draw(words)))
            prompt = await conversation.prompt(read_chat({"messages": copy.deepcopy(messages)}))
            expected = reference.longest(messages)
            assert list(prompt.token_ids[: len(expected)]) == expected
            if not expected:
                options = {"add_generation_prompt": True, "tokenize": False}
                whole = tokenizer.apply_chat_template(messages, **options)
                assert list(prompt.token_ids) == tokenizer(whole)["input_ids"]
            said = data.draw(st.lists(words, max_size=2))
            ids = tokenizer("".join(f"{word} " for word in said) + "<end>")["input_ids"]
            completion = Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")
            reply = conversation.read(prompt, completion)
            reference.add(messages, reply.message, [*prompt.token_ids, *ids])
            said = {"role": "assistant", "content": reply.message["content"]}
            dialogues.append([*messages, said])

    asyncio.run(play())


def calling(family, *questions):
    """An engine of a family whose model calls a tool, once per question; and what it samples."""
    tokenizer = tokenizer_of(family)
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("look", q=q, n=[1, {"b": 2}]) for q in questions],
        # A prompt that opens the thoughts has them.
        **({"reasoning_content": "so"} if family.opens else {}),
    }
    return saying(tokenizer, family.say(said) + stop_of(family, said))


def saying(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ScriptedEngine(tokenizer, lambda prompt: list(ids), stop_ids={ids[-1]}), ids


WITH_CALLS = [pytest.param(f, id=f.name) for f in FAMILIES if f.calls]
WITH_PARALLEL_CALLS = [pytest.param(f, id=f.name) for f in FAMILIES if f.calls and f.several]


@pytest.mark.parametrize("family", WITH_CALLS)
@pytest.mark.parametrize("echo", ["same", "rewritten", "another value"])
async def test_echoed_calls_are_one_row_and_another_value_is_a_fork(family, echo):
    engine, _ = calling(family, "x")
    tokenizer = engine.tokenizer

    async with session_of(engine) as session:
        client = client_of(session)
        messages = [user("q")]
        completion = await ask(client, messages, tools=[LOOK])
        message = completion.choices[0].message.model_dump(exclude_none=True)
        assert "content" not in message
        assert completion.choices[0].finish_reason == "tool_calls"
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        if echo == "rewritten":
            message.pop("reasoning_content", None)
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=3)
            call["id"] = "id-of-the-client"
        elif echo == "another value":
            call["function"]["arguments"] = json.dumps({**arguments, "q": "y"})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        await ask(client, [*messages, message, result], tools=[LOOK])
        parents = [turn.parent for turn in session.turns()]
        (prompt, answer, _), (longer, _, _) = ledger_of(session)
    if echo == "another value":
        assert parents == [-1, -1]
    else:
        assert parents == [-1, 0]
        assert longer[: len(prompt) + len(answer)] == [*prompt, *answer]
        assert "found" in tokenizer.decode(longer[len(prompt) + len(answer) :])
        assert "id-of-the-client" not in tokenizer.decode(longer)


@pytest.mark.parametrize("family", WITH_PARALLEL_CALLS)
async def test_parallel_calls_stay_several(family):
    engine, _ = calling(family, "x", "y")

    async with session_of(engine) as session:
        completion = await ask(client_of(session), [user("q")], tools=[LOOK])
        calls = completion.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["q"] for call in calls] == ["x", "y"]
    assert len({call.id for call in calls}) == 2


async def test_tools_that_the_template_does_not_read_are_told_once(caplog):
    async with session_of(counting_engine()) as session:
        await ask(client_of(session), [user(WORDS[0])])
        assert "reads no tools" not in caplog.text
        for _ in range(2):
            await ask(client_of(session), [user(WORDS[0])], tools=[LOOK])
    told = "reads no tools, so the model is not told of those of the request"
    assert caplog.text.count(told) == 1


async def test_a_streamed_message_is_the_message():
    """Content, calls, finish reason and usage, for a family with thoughts and calls."""
    engine, _ = calling(QWEN3, "x", "y")

    async with session_of(engine) as session:
        client = client_of(session)
        whole = await ask(client, [user("q")], tools=[LOOK])
        options = {"tools": [LOOK], "stream_options": {"include_usage": True}}
        parts = [part async for part in await ask(client, [user("q")], stream=True, **options)]
    message = whole.choices[0].message
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    streamed = {}
    for delta in deltas:
        for part in delta.tool_calls or ():
            entry = streamed.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            entry["id"] += part.id or ""
            entry["name"] += part.function.name or ""
            entry["arguments"] += part.function.arguments or ""
    whole_calls = [c.function.model_dump() | {"id": c.id} for c in message.tool_calls]
    assert whole_calls == [streamed[k] for k in sorted(streamed)]
    reasons = [part.choices[0].finish_reason for part in parts if part.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert parts[-1].usage == whole.usage


@pytest.mark.parametrize(
    "said", ["<tool_call>{", "[1]", "{x:1}", '<tool_call>{"name": 3}</tool_call>']
)
async def test_what_does_not_parse_is_plain_content(said):
    tokenizer = tokenizer_of(QWEN3)
    engine, _ = saying(tokenizer, said + tokenizer.eos_token)

    async with session_of(engine) as session:
        completion = await ask(client_of(session), [user("q")], tools=[LOOK])
        choice = completion.choices[0]
    assert choice.message.content == said
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"


async def test_a_parser_of_ones_own(engine):
    def parse(text):
        if text == "one":
            raise ValueError("no")
        call = {"type": "function", "function": {"name": "f", "arguments": {"word": text}}}
        return ParsedReply("", tool_calls=[call])

    async with session_of(engine, tool_parser=parse) as session:
        client, found = client_of(session), []
        for text in ("one", "one two", "one two three", "one two three four"):
            choice = (await ask(client, [user(text)])).choices[0]
            calls = choice.message.tool_calls
            found.append(calls[0].function.arguments if calls else choice.message.content)
    others = [f'{{"word": "{word}"}}' for word in ("four", "three", "two")]
    assert sorted(found) == ["one", *others]


def test_content_in_any_form_is_the_same():
    forms = [{"content": ""}, {"content": None}, {"content": [{"type": "text", "text": ""}]}, {}]
    found = {tuple(identities([{"role": "assistant", **form}])) for form in forms}
    assert len(found) == 1
    system = {"role": "system", "content": [{"type": "text", "text": "x"}]}
    assert identities([{"role": "developer", "content": "x"}]) == identities([system])


async def test_parallel_calls_of_one_session_are_branches(engine):
    async with session_of(engine) as session:
        client = client_of(session)
        first = (await ask(client, [user("one")])).choices[0].message
        await asyncio.gather(
            *(ask(client, [user("one"), first, user(word)]) for word in WORDS),
            ask(client, [user("two")]),
        )
        assert [turn.parent for turn in session.turns()] == [-1, 0, 0, 0, 0, -1]


async def test_a_question_asked_again_takes_no_credit_from_the_line_that_goes_on(engine):
    """The same answer twice; the agent goes on with the line that it had begun before."""
    async with session_of(engine) as session:
        messages = [user("one")]
        for _ in range(2):
            messages += [(await post(session, messages))["choices"][0]["message"], user("two")]
        await post(session, messages[:1])
        last = await post(session, messages)
        calls = export_interactions(session)
        assert [turn.parent for turn in session.turns()] == [-1, 0, -1, 1]
        assert calls[last["id"]].parent_id == [*calls][1]


async def test_a_tokenizer_that_does_not_give_back_its_ids_makes_one_row():
    """Sampled tokens that spell a word in two ways stay as they were sampled."""
    engine, whole = calling(QWEN3, "abcabc")
    tokenizer = engine.tokenizer
    text = tokenizer.decode(whole[:-1])
    split = [i for letter in text for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    ids = [*split, whole[-1]]
    if tokenizer(text, add_special_tokens=False)["input_ids"] == split:
        pytest.skip("this tokenizer knows letters only")
    engine.rule = lambda prompt: list(ids)

    async with session_of(engine) as session:
        client, messages = client_of(session), [user("q")]
        for _ in range(4):
            message = (await ask(client, messages, tools=[LOOK])).choices[0].message
            (call,) = message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
            messages += [message, result]
        assert [turn.parent for turn in session.turns()] == [-1, 0, 1, 2]
        ledger, line = ledger_of(session), []
    for prompt, answer, _ in ledger:
        assert prompt[: len(line)] == line
        assert answer == ids
        line = [*prompt, *answer]


async def test_tokens_encoded_grow_with_the_episode_and_not_with_its_square(monkeypatch):
    from torchrl_mt.chat.encoding import RenderedTextEncoder

    encoded = [0]
    for name in ("beginning", "middle"):
        plain = getattr(RenderedTextEncoder, name)

        def count(self, text, *args, plain=plain, **kwargs):
            ids = plain(self, text, *args, **kwargs)
            encoded[0] += len(ids)
            return ids

        monkeypatch.setattr(RenderedTextEncoder, name, count)
    engine = counting_engine()

    async with session_of(engine) as session:
        messages = [user("one")]
        await post(session, messages)
        encoded[0] = 0
        for _ in range(128):
            body = await post(session, messages)
            messages += [body["choices"][0]["message"], user("two one three")]
        prompt, answer, _ = ledger_of(session)[-1]
    assert encoded[0] <= 1.1 * (len(prompt) + len(answer))


def test_the_effort_of_reasoning_is_a_variable_of_the_template():
    body = {"messages": [user("one")], "reasoning_effort": "low"}
    assert read_chat(body).template_kwargs == {"reasoning_effort": "low"}
    body["chat_template_kwargs"] = {"reasoning_effort": "high", "x": 1}
    assert read_chat(body).template_kwargs == {"reasoning_effort": "high", "x": 1}


async def test_an_id_that_the_model_uses_again_is_a_new_one_for_the_client():
    """Kimi writes ids itself; the Agents SDK refuses one that it has seen."""
    engine, _ = calling(KIMI_K2, "x")

    async with session_of(engine) as session:
        messages, given = [user("q")], []
        for k in range(3):
            reply = await post(session, messages, tools=[LOOK])
            message = reply["choices"][0]["message"]
            given.append(message["tool_calls"][0]["id"])
            result = {"role": "tool", "tool_call_id": given[-1], "content": f"found {k}"}
            messages += [message, result]
        assert [turn.parent for turn in session.turns()] == [-1, 0, 1]
    assert given[0] == "functions.look:0"
    assert len(set(given)) == 3
    last = engine.tokenizer.decode(engine.calls[-1][0])
    assert last.count("functions.look:0") == 4  # Two calls as sampled, and their results.
    assert given[1] not in last


async def test_the_cost_of_messages_that_are_new_is_linear():
    """A client may come with thousands: they must not hold up the others."""
    chats = ChatTokensCache(tokenizer_of(QWEN3), ChatOptions())

    def messages(number):
        for k in range(number):
            said = {"role": "assistant", "content": "", "tool_calls": [call("look", q="x")]}
            said["tool_calls"][0]["id"] = f"c{k}"
            yield from (said, {"role": "tool", "tool_call_id": f"c{k}", "content": "found"})

    async def cost_of(number):
        request = read_chat({"messages": [user("q"), *messages(number)]})
        events = itertools.count()
        sys.setprofile(lambda *args: next(events))
        try:
            prompt = await Conversation(chats).prompt(request)
        finally:
            sys.setprofile(None)
        calls = [m["tool_calls"][0]["id"] for m in prompt.dialogue if m.get("tool_calls")]
        results = [m["tool_call_id"] for m in prompt.dialogue if m["role"] == "tool"]
        assert results == calls == [f"call{k:05}" for k in range(number)]
        return next(events)

    await cost_of(1)  # What is made once.
    few, more, many = [await cost_of(number) for number in (50, 100, 200)]
    assert many - more < 2.5 * (more - few)
