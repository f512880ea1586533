"""Agent frameworks as agents: their requests are understood, and what was sampled stays as it was."""

from __future__ import annotations

import importlib

import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")
pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.chat.families import (  # noqa: E402
    DEEPSEEK_V31,
    GLM45,
    GPT_OSS,
    KIMI_K2,
    MISTRAL,
    QWEN3,
    QWEN3_CODER,
    QWEN25,
)
from tests.chat.families_in_play import call, lines, stop_of, tokenizer_of  # noqa: E402
from tests.collectors.runs import first_batch, lists  # noqa: E402
from tests.collectors.scripted import ScriptedEngine  # noqa: E402
from tests.tiers import first_fast  # noqa: E402
from torchrl_mt.transforms import MergeTurns  # noqa: E402

from .test_page import code  # noqa: E402

EACH_FAMILY = pytest.mark.parametrize(
    "family",
    first_fast([QWEN25, QWEN3, MISTRAL, GPT_OSS, GLM45, QWEN3_CODER, KIMI_K2, DEEPSEEK_V31]),
    ids=lambda family: family.name,
)
OTHERS = pytest.mark.slow
"""Importing a framework takes seconds; one is enough for the fast tier."""
DATA = {"question": "What is it?", "answer": "It is 8."}


def framework(name, package):
    return pytest.importorskip(
        name, reason=f"this framework is not installed: pip install {package}"
    )


def look(q: str, n: int) -> str:
    """Look something up.

    Args:
        q: what to look up
        n: how many times
    """
    return f"found {q} {n} times"


def find(x: int) -> str:
    """Find a number.

    Args:
        x: its place
    """
    return f"the {x}nd is 7"


def spoken(family, *, beside="Wait.", calls_answer=False):
    """What the model says: a call, calls beside text or thoughts, and the answer."""
    two = [call("look", q='é "b"', n=1), call("find", x=2)]
    said = [
        {"content": "", "tool_calls": [call("look", q="a b", n=3)]},
        {"content": beside if family.says_and_calls else "", "tool_calls": two},
        {"content": DATA["answer"]},
    ]
    if not family.several:
        said[1]["tool_calls"] = two[1:]
    if calls_answer:
        last = call("final_answer", answer=DATA["answer"])
        said[2] = {"content": "", "tool_calls": [last]}
    if family.thinks:
        said = [{**message, "reasoning_content": "hm, so"} for message in said]
    return [{"role": "assistant", **message} for message in said]


def played(agent, family, messages):
    """An episode in which a model of this family says these messages."""
    tokenizer = tokenizer_of(family)
    texts = [family.say(message) + stop_of(family, message) for message in messages]
    answers = iter([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    stops = tokenizer.convert_tokens_to_ids([family.stop, family.call_stop or family.stop])
    engine = ScriptedEngine(tokenizer, lambda prompt: next(answers), stops)
    batch, _ = first_batch(agent, engine, [DATA], max_consecutive_failures=1)
    assert next(answers, None) is None
    prompts, sampled = zip(*engine.calls, strict=True)
    assert lists(batch, "tokens", "prompt") == list(prompts)
    assert lists(batch, "tokens", "response") == [list(each.token_ids) for each in sampled]
    log_probs = [pytest.approx(each.log_probs) for each in sampled]
    assert lists(batch, "log_probs", "response") == log_probs
    assert batch["next", "reward"].flatten().tolist() == [0.0, 0.0, 1.0]
    return batch, engine


def check_results(engine, family):
    """The model has seen what the tools returned; return the places in its last prompt."""
    last = engine.tokenizer.decode(engine.calls[-1][0])
    found = [look("a b", 3), *([look('é "b"', 1)] if family.several else []), find(2)]
    places = [last.find(text) for text in found]
    assert -1 not in places
    return places


def check_one_row(batch, engine, family):
    """All that the model said is one row, and the last prompt has all of it."""
    prompt, answer = engine.calls[-1]
    assert lines(MergeTurns()(batch)) == [[*prompt, *answer.token_ids]]
    assert batch["turn", "parent"].tolist() == [-1, 0, 1]
    places = check_results(engine, family)
    assert places == sorted(places)


# ---- OpenAI's Agents SDK --------------------------------------------------------------------------


def researcher():
    """The agent of the page."""
    agents = framework("agents", "openai-agents")
    tools = {each.__name__: agents.function_tool(each) for each in (look, find)}
    run = {"agents": agents, "openai": openai, **tools}
    exec(code("Frameworks", 0), run)
    return run


@EACH_FAMILY
@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(family, stream, monkeypatch):
    run = researcher()
    runner = run["agents"].Runner

    class Streams(runner):
        @classmethod
        async def run(cls, *args, **kwargs):
            result = cls.run_streamed(*args, **kwargs)
            async for _ in result.stream_events():
                pass
            return result

    monkeypatch.setattr(run["agents"], "Runner", Streams if stream else runner)
    batch, engine = played(run["Researcher"](), family, spoken(family))
    check_one_row(batch, engine, family)


def test_a_second_question_of_openai_agents_goes_on_from_the_first():
    agents = framework("agents", "openai-agents")

    class Asks:
        async def run(self, data, *, base_url, api_key, http_client):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
            agent = agents.Agent(
                name="a",
                tools=[agents.function_tool(look)],
                model=agents.OpenAIChatCompletionsModel(model="any", openai_client=client),
            )
            config = agents.RunConfig(tracing_disabled=True)
            first = await agents.Runner.run(agent, data["question"], run_config=config)
            dialogue = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
            second = await agents.Runner.run(agent, dialogue, run_config=config)
            return float(second.final_output == data["answer"])

    called, _, answered = spoken(QWEN25)
    batch, engine = played(Asks(), QWEN25, [called, answered, answered])
    assert len(lines(MergeTurns()(batch))) == 1
    assert "Are you sure?" in engine.tokenizer.decode(engine.calls[-1][0])


# ---- smolagents -----------------------------------------------------------------------------------


def smol_researcher():
    """The agent of the page, and how it forces calls by default."""
    smolagents = framework("smolagents", "smolagents")
    tools = {each.__name__: smolagents.tool(each) for each in (look, find)}
    return {"smolagents": smolagents, **tools}


@OTHERS
@EACH_FAMILY
def test_smolagents(family):
    run = smol_researcher()
    exec(code("Frameworks", 1), run)
    batch, engine = played(run["SmolResearcher"](), family, spoken(family, calls_answer=True))
    check_results(engine, family)
    # As the page says, each call is a row of its own, with the whole prompt.
    rows = MergeTurns()(batch)
    assert lines(rows) == [[*prompt, *answer.token_ids] for prompt, answer in engine.calls]


@OTHERS
def test_the_call_that_smolagents_forces_is_refused_with_what_to_do():
    run = smol_researcher()
    exec(code("Frameworks", 1).replace(', tool_choice="auto"', ""), run)
    refusal = r'tool_choice="required" cannot be done.*or give "auto"'
    with pytest.raises(RuntimeError, match=refusal):
        played(run["SmolResearcher"](), QWEN25, [])


# ---- others ---------------------------------------------------------------------------------------


@OTHERS
@EACH_FAMILY
@pytest.mark.parametrize("stream", [False, True])
def test_pydantic_ai(family, stream):
    pydantic_ai = framework("pydantic_ai", "'pydantic-ai-slim[openai]'")
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")

    class Asks:
        async def run(self, data, *, base_url, api_key, http_client):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
            model = models.OpenAIChatModel(
                "policy", provider=providers.OpenAIProvider(openai_client=client)
            )
            agent = pydantic_ai.Agent(model, instructions="Use the tools.", tools=[look, find])
            if not stream:
                return float((await agent.run(data["question"])).output == data["answer"])
            async with agent.run_stream(data["question"]) as result:
                return float(await result.get_output() == data["answer"])

    # Its streams end with the first text.
    batch, engine = played(Asks(), family, spoken(family, beside="" if stream else "Wait."))
    check_one_row(batch, engine, family)


@OTHERS
@EACH_FAMILY
def test_langchain(family):
    langchain = framework("langchain_openai", "langchain-openai")
    core = importlib.import_module("langchain_core.tools")
    tools = {each.__name__: core.tool(each) for each in (look, find)}

    class Asks:
        async def run(self, data, *, base_url, api_key, http_client):
            model = langchain.ChatOpenAI(
                model="policy", base_url=base_url, api_key=api_key, http_async_client=http_client
            ).bind_tools([*tools.values()])
            messages = [("system", "Use the tools."), ("user", data["question"])]
            while True:
                messages.append(await model.ainvoke(messages))
                if not messages[-1].tool_calls:
                    return float(messages[-1].content == data["answer"])
                for each in messages[-1].tool_calls:
                    messages.append(tools[each["name"]].invoke(each))

    batch, engine = played(Asks(), family, spoken(family))
    check_one_row(batch, engine, family)
