"""OpenAI's client as a workflow's: what the model sampled is kept, token for token."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai", reason="openai_client needs the package openai")

from tests.chat.families import QWEN3  # noqa: E402
from tests.collectors.runs import failed_run, first_batch  # noqa: E402
from tests.collectors.scripted import ScriptedEngine  # noqa: E402
from tests.pages import code_of  # noqa: E402
from torchrl_mt.agents import openai_client  # noqa: E402
from torchrl_mt.collectors import Limits  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

from .helpers import LOOK, check_stream, user  # noqa: E402
from .test_conversation import calling  # noqa: E402


@pytest.fixture
def tokenizer(engine):
    return engine.tokenizer


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
    batch, _ = first_batch(Talks(), engine, [{"turns": 3}], n=2)
    assert len(batch) == 6
    rows = MergeTurns(pad_token_id=tokenizer.pad_token_id)(batch)
    assert len(rows) == 2
    prompt, answer = engine.calls[-1]
    row = rows["tokens", "full"][-1].tolist()
    assert row == [*prompt, *answer.token_ids]
    assert int(rows["masks", "all_assistant_mask"].sum()) == 2 * 3 * 2


def test_a_limit_that_is_let_through_truncates_the_episode(engine):
    batch, stats = first_batch(Talks(), engine, [{"turns": 5}], limits=Limits(max_turns=2))
    assert len(batch) == 2
    assert batch["next", "truncated"][-1].all()
    assert stats["stop/max_turns"] == 1


def test_another_error_of_the_client_rejects_the_episode(engine):
    class Asks:
        async def arun_episode(self, engine, data):
            await ask(openai_client(engine), [user("one")], presence_penalty=1)
            return 1.0

    match = r"BadRequestError.*presence_penalty=1 cannot be done here"
    failed_run(match, Asks(), engine, max_consecutive_failures=1)


async def test_what_a_completion_says(engine, tokenizer):
    completion = await ask(openai_client(engine), [user("one")], n=2, logprobs=True, max_tokens=9)
    (prompt, first), (_, second) = engine.calls
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == 4
    for choice, answer in zip(completion.choices, (first, second), strict=True):
        assert choice.finish_reason == "stop"
        assert choice.message.content == tokenizer.decode(answer.token_ids[:-1])
        assert [token.logprob for token in choice.logprobs.content] == answer.log_probs


async def test_a_stream_has_the_same_parts(engine):
    client = openai_client(engine)
    whole = await ask(client, [user("one")])
    await check_stream(client, [user("one")], whole)


async def test_a_request_with_other_template_variables_goes_on_from_no_other(engine, tokenizer):
    tokenizer.chat_template = "{% if loud %}four {% endif %}" + tokenizer.chat_template
    messages = [user("one")]

    client = openai_client(engine)
    for loud in (False, True):
        options = {"chat_template_kwargs": {"loud": loud}}
        completion = await ask(client, messages, extra_body=options)
        messages.extend([completion.choices[0].message, user("two")])
    (quiet, answer), (loud, _) = engine.calls
    (four,) = tokenizer("four")["input_ids"]
    assert loud[0] == four
    assert loud[: len(quiet) + 2] != [*quiet, *answer.token_ids]


async def test_of_equal_answers_a_request_goes_on_from_the_last(tokenizer):
    one, *ends = tokenizer("one four three")["input_ids"]
    answers = iter([[one, ends[0]], [one, ends[1]], [one, ends[0]]])
    engine = ScriptedEngine(tokenizer, lambda prompt: next(answers), stop_ids=ends)
    client = openai_client(engine)
    for _ in range(2):
        completion = await ask(client, [user("one")])
    said = completion.choices[0].message
    assert said.content == "one"
    await ask(client, [user("one"), said, user("two")])
    _, (prompt, last), (longer, _) = engine.calls
    assert longer[: len(prompt) + 2] == [*prompt, *last.token_ids]


async def test_tool_calls_go_out_and_their_answers_come_back():
    engine, ids = calling(QWEN3, "x")
    client, messages = openai_client(engine), [user("q")]
    completion = await ask(client, messages, tools=[LOOK])
    message = completion.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    assert (completion.choices[0].finish_reason, call.function.name) == ("tool_calls", "look")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "found"}]
    await ask(client, messages, tools=[LOOK])
    (prompt, answer), (longer, _) = engine.calls
    assert longer[: len(prompt) + len(ids)] == [*prompt, *answer.token_ids]
    assert "found" in engine.tokenizer.decode(longer)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"tool_choice": "required"}, 'tool_choice="required" cannot'),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 cannot"),
        ({"n": 0}, "n must be an integer in .1, 128., got 0"),
        ({"n": 10**9}, "n must be an integer in .1, 128., got 10"),
        ({"extra_body": {"tempreature": 1}}, "tempreature is not known here"),
        ({"messages": []}, "message"),
        ({"messages": [{"content": "x"}]}, "message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message"),
    ],
)
async def test_what_cannot_be_done_is_named(engine, options, match):
    with pytest.raises(openai.BadRequestError, match=match):
        await ask(openai_client(engine), **{"messages": [user("one")], **options})
    assert engine.calls == []


async def test_other_routes(engine):
    client = openai_client(engine)
    models = [model.id async for model in client.models.list()]
    assert (await client.models.retrieve("any")).id == "any"
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not answered"):
        await client.embeddings.create(model="any", input="x")
    assert models == ["policy"]


def test_the_workflow_of_the_page_on_environments(engine):
    names = {"openai_client": openai_client, "answer": lambda call: None}
    exec(code_of("environments.rst", "Workflows that use the OpenAI client"), names)
    data = [{"question": "one", "answer": answer, "tools": []} for answer in ("two", "x")]
    batch, _ = first_batch(names["Asks"](), engine, data, n=2)
    said = [engine.tokenizer.decode(call.token_ids[:-1]) for _, call in engine.calls]
    expected = [float(s == d["answer"]) for s, d in zip(said, batch["data"], strict=True)]
    assert batch["next", "reward"].flatten().tolist() == expected
