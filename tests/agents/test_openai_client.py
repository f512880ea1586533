"""OpenAI's client as a workflow's: what the model sampled is kept, token for token."""

from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai", reason="openai_client needs the package openai")

from tests.chat.families import FAMILIES  # noqa: E402
from tests.chat.families_in_play import stop_of, tokenizer_of  # noqa: E402
from tests.collectors.scripted import ScriptedEngine  # noqa: E402
from tests.collectors.test_pages import code_of  # noqa: E402
from torchrl_mt.agents import openai_client  # noqa: E402
from torchrl_mt.collectors import Limits, MultiTurnCollector  # noqa: E402
from torchrl_mt.testing import tiny_chat_tokenizer  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

from .helpers import LOOK, user  # noqa: E402


@pytest.fixture
def tokenizer():
    return tiny_chat_tokenizer("one two three four")


@pytest.fixture
def engine(tokenizer):
    words = [tokenizer(word)["input_ids"][0] for word in ("one", "two", "three", "four")]

    def rule(prompt):
        return [words[len(prompt) % 4], tokenizer.eos_token_id]

    return ScriptedEngine(tokenizer, rule)


def ask(client, messages, **options):
    return client.chat.completions.create(model="any", messages=messages, **options)


class Talks:
    """Asks ``data["turns"]`` times, and gives the client's own messages back."""

    async def arun_episode(self, engine, data):
        client = openai_client(engine)
        messages = [user("one")]
        for _ in range(data["turns"]):
            completion = await ask(client, messages)
            messages.append(completion.choices[0].message)
            messages.append(user("two"))
        return 1.0


def test_a_conversation_is_one_row_of_the_sampled_tokens(engine, tokenizer):
    with MultiTurnCollector(Talks(), engine, [{"turns": 3}], episodes_per_batch=2) as collector:
        batch = next(iter(collector))
    assert len(batch) == 6
    rows = MergeTurns(pad_token_id=tokenizer.pad_token_id)(batch)
    assert len(rows) == 2
    prompt, answer = engine.calls[-1]
    row = rows["tokens", "full"][-1].tolist()
    assert row == [*prompt, *answer.token_ids]
    assert int(rows["masks", "all_assistant_mask"].sum()) == 2 * 3 * 2


def test_a_limit_that_is_let_through_truncates_the_episode(engine):
    limits = Limits(max_turns=2)
    with MultiTurnCollector(
        Talks(), engine, [{"turns": 5}], episodes_per_batch=1, limits=limits
    ) as collector:
        batch = next(iter(collector))
        stats = collector.stats()
    assert len(batch) == 2
    assert batch["next", "truncated"][-1].all()
    assert stats["stop/max_turns"] == 1


def test_another_error_of_the_client_rejects_the_episode(engine):
    class Asks:
        async def arun_episode(self, engine, data):
            await ask(openai_client(engine), [user("one")], presence_penalty=1)
            return 1.0

    with (
        MultiTurnCollector(
            Asks(), engine, episodes_per_batch=1, max_consecutive_failures=1
        ) as collector,
        pytest.raises(
            RuntimeError, match=r"BadRequestError.*presence_penalty=1 cannot be done here"
        ),
    ):
        next(iter(collector))


def run(function):
    return asyncio.run(function())


def test_what_a_completion_says(engine, tokenizer):
    async def main():
        return await ask(openai_client(engine), [user("one")], n=2, logprobs=True, max_tokens=9)

    completion = run(main)
    (prompt, first), (_, second) = engine.calls
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 4
    for choice, answer in zip(completion.choices, (first, second), strict=True):
        assert choice.finish_reason == "stop"
        assert choice.message.content == tokenizer.decode(answer.token_ids[:-1])
        assert [token.logprob for token in choice.logprobs.content] == answer.log_probs


def test_a_stream_has_the_same_parts(engine):
    async def main():
        client = openai_client(engine)
        whole = await ask(client, [user("one")])
        stream = await ask(
            client, [user("one")], stream=True, stream_options={"include_usage": True}
        )
        return whole, [chunk async for chunk in stream]

    whole, parts = run(main)
    assert parts[-1].usage == whole.usage
    text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
    assert text == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None, "stop"]


def test_answers_are_found_by_their_messages(engine):
    """Branches, another order of questions, and what clients make of messages."""

    async def main():
        client = openai_client(engine)
        first = (await ask(client, [user("one")])).choices[0].message
        other = (await ask(client, [user("two")])).choices[0].message
        as_parts = {"role": "assistant", "content": [{"type": "text", "text": first.content}]}
        await ask(client, [user("one"), as_parts, user("three")])
        await ask(client, [user("two"), other, user("four")])
        await ask(client, [user("one"), {"role": "assistant", "content": "four"}, user("one")])

    run(main)
    (one, a), (two, b), (third, _), (fourth, _), (fresh, _) = engine.calls
    assert third[: len(one) + 2] == [*one, *a.token_ids]
    assert fourth[: len(two) + 2] == [*two, *b.token_ids]
    assert fresh[: len(one)] == one


def test_a_request_with_other_template_variables_goes_on_from_no_other(engine, tokenizer):
    tokenizer.chat_template = "{% if loud %}four {% endif %}" + tokenizer.chat_template
    messages = [user("one")]

    async def main():
        client = openai_client(engine)
        for loud in (False, True):
            options = {"chat_template_kwargs": {"loud": loud}}
            completion = await ask(client, messages, extra_body=options)
            messages.extend([completion.choices[0].message, user("two")])

    run(main)
    (quiet, answer), (loud, _) = engine.calls
    (four,) = tokenizer("four")["input_ids"]
    assert loud[0] == four
    assert loud[: len(quiet) + 2] != [*quiet, *answer.token_ids]


def test_of_equal_answers_a_request_goes_on_from_the_last(tokenizer):
    one, *ends = tokenizer("one four three")["input_ids"]
    answers = iter([[one, ends[0]], [one, ends[1]], [one, ends[0]]])
    engine = ScriptedEngine(tokenizer, lambda prompt: next(answers), stop_ids=ends)

    async def main():
        client = openai_client(engine)
        for _ in range(2):
            completion = await ask(client, [user("one")])
        said = completion.choices[0].message
        assert said.content == "one"
        await ask(client, [user("one"), said, user("two")])

    run(main)
    _, (prompt, last), (longer, _) = engine.calls
    assert longer[: len(prompt) + 2] == [*prompt, *last.token_ids]


@pytest.mark.parametrize("family", FAMILIES[:6], ids=lambda family: family.name)
def test_tool_calls_go_out_and_their_answers_come_back(family):
    tokenizer = tokenizer_of(family)
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}],
    }
    try:
        text = family.say(said) + stop_of(family, said)
    except (KeyError, TypeError, ValueError, AssertionError):
        pytest.skip("this family calls no tools")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(tokenizer, lambda prompt: list(ids), stop_ids={ids[-1]})

    async def main():
        client = openai_client(engine)
        messages = [user("q")]
        completion = await ask(client, messages, tools=[LOOK])
        message = completion.choices[0].message
        if not message.tool_calls:
            return None
        assert message.content is None
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "found"}]
        await ask(client, messages, tools=[LOOK])
        return completion.choices[0].finish_reason, call.function

    found = run(main)
    if found is None:
        pytest.skip("this family calls no tools")
    reason, function = found
    assert (reason, function.name, json.loads(function.arguments)) == (
        "tool_calls",
        "look",
        {"q": "x"},
    )
    (prompt, answer), (longer, _) = engine.calls
    assert longer[: len(prompt) + len(ids)] == [*prompt, *answer.token_ids]
    assert "found" in tokenizer.decode(longer)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"tool_choice": "required"}, 'tool_choice="required" cannot'),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 cannot"),
        ({"n": 0}, "n must be an integer in .1, 128., got 0"),
        ({"n": 10**9}, "n must be an integer in .1, 128., got 10"),
        ({"extra_body": {"tempreature": 1}}, "tempreature is not known here"),
    ],
)
def test_what_cannot_be_done_is_named(engine, options, match):
    async def main():
        await ask(openai_client(engine), [user("one")], **options)

    with pytest.raises(openai.BadRequestError, match=match):
        run(main)
    assert engine.calls == []


def test_messages_that_are_none_are_named(engine):
    async def main(messages):
        await ask(openai_client(engine), messages)

    for messages in ([], [{"content": "x"}], [{"role": "user", "content": [{"type": "image"}]}]):
        with pytest.raises(openai.BadRequestError, match=r"message|content"):
            asyncio.run(main(messages))


def test_other_routes(engine):
    async def main():
        client = openai_client(engine)
        models = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve("any")).id == "any"
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not answered"):
            await client.embeddings.create(model="any", input="x")
        return models

    assert run(main) == ["policy"]


def test_the_workflow_of_the_page_on_environments(engine):
    names = {"openai_client": openai_client, "answer": lambda call: None}
    exec(code_of("environments.rst", "Workflows that use the OpenAI client"), names)
    data = [{"question": "one", "answer": answer, "tools": []} for answer in ("two", "x")]
    with MultiTurnCollector(names["Asks"](), engine, data, episodes_per_batch=2) as collector:
        batch = next(iter(collector))
    said = [engine.tokenizer.decode(call.token_ids[:-1]) for _, call in engine.calls]
    expected = [float(s == d["answer"]) for s, d in zip(said, batch["data"], strict=True)]
    assert batch["next", "reward"].flatten().tolist() == expected
