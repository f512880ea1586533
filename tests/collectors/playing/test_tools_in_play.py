"""Environments of tools in a collector: schemas, calls and results in every family's template."""

from __future__ import annotations

import json
import os
import threading

import pytest

from tests.chat import families as f
from tests.chat.families_in_play import call, stop_of, tokenizer_of
from tests.collectors.runs import first_batch, run_of, said
from tests.collectors.scripted import ScriptedEngine
from tests.envs.some_tools import Sums, add, look, says_seven
from tests.idle_clock import LIMIT, hang
from tests.pages import code_of
from tests.tiers import first_fast
from torchrl_mt.collectors import AgentOptions, ChatOptions, Limits, MultiTurnCollector, context
from torchrl_mt.collectors.playing import episode_player
from torchrl_mt.envs import Arithmetic, TextEnv, TextStep, Tool, ToolEnv, calculate
from torchrl_mt.testing import tiny_chat_tokenizer

ITEM = {"messages": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}


def says(family, content="", *calls):
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {**message, **({"reasoning_content": "so"} if family.opens else {})}


def play(family, env, messages, data=ITEM, **options):
    """An episode in which a model of a family answers so: the batch, the prompts, the stats."""
    tokenizer = tokenizer_of(family)
    texts = iter([family.say(message) + stop_of(family, message) for message in messages])
    stops = tokenizer.convert_tokens_to_ids([family.stop, family.call_stop or family.stop])

    def answer(prompt):
        return tokenizer(next(texts), add_special_tokens=False)["input_ids"]

    engine = ScriptedEngine(tokenizer, answer, stops)
    options = {"total_episodes": 1, "max_consecutive_failures": 1, **options}
    (batch,), stats = run_of(env, engine, [data], **options)
    return batch, [tokenizer.decode(prompt) for prompt, _ in engine.calls], stats


def play_calls(env, *calls, data=ITEM, **options):
    """The same of a model that makes these calls, and says 7 when it has the results."""
    messages = [says(f.QWEN25, "", *calls), says(f.QWEN25, "7")]
    return play(f.QWEN25, env, messages, data, **options)


def engine_that_repeats_results(family, calls):
    """A model that calls ``calls(prompt)``, and then says what the tool has returned."""
    tokenizer = tokenizer_of(family)

    def rule(prompt):
        text = tokenizer.decode(prompt)
        _, *results = text.split("<tool_response>\n")
        if results:
            said = says(family, results[0].split("\n</tool_response>")[0])
        else:
            said = says(family, "", calls(text))
        return tokenizer(family.say(said) + family.stop, add_special_tokens=False)["input_ids"]

    return ScriptedEngine(tokenizer, rule)


def rewards(batch):
    return batch["next", "reward"].flatten().tolist()


FAMILIES = [f.QWEN25, f.LLAMA31, f.MISTRAL, f.GPT_OSS, f.DEEPSEEK_R1]
FAMILIES = list(dict.fromkeys([*FAMILIES, *(each for each in f.FAMILIES if each.calls)]))


@pytest.mark.parametrize("family", first_fast(FAMILIES, 5), ids=lambda family: family.name)
def test_an_episode_of_tools(family):
    dialogues = []

    def judge(messages, data):
        dialogues.append(messages)
        return float(messages[-1]["content"] == data["answer"])

    several = [call("add", a=3, b=4), call("look", q="é b", n=2)][: 2 if family.several else 1]
    messages = [says(family, "", *several), says(family, "", call("find", q="x"))]
    env = ToolEnv([add, look], reward=judge)
    batch, prompts, stats = play(family, env, [*messages, says(family, "7")])
    assert rewards(batch) == [0.0, 0.0, 1.0]
    assert stats["accepted"] == stats["started"] == 1
    assert batch["info"][-1] == {"calls": len(several) + 1, "errors": 1}
    results = ["7", '{"found": ["é b", "é b"]}'][: len(several)]
    error = "error: there is no tool 'find'; the tools are add, look"
    (dialogue,) = dialogues
    assert [m["content"] for m in dialogue if m["role"] == "tool"] == [*results, error]
    roles = ["user", "assistant", *["tool"] * len(several), "assistant", "tool", "assistant"]
    assert [m["role"] for m in dialogue] == roles
    # What the template writes of a result: as it is, or as JSON.
    for prompt, shown in ((prompts[1], results), (prompts[2], [error])):
        behind = prompt[len(prompts[0]) :]
        forms = [(text, json.dumps(text, ensure_ascii=False)) for text in shown]
        places = [max(map(behind.find, texts)) for texts in forms]
        assert min(places) >= 0
        assert places == sorted(places)


def test_the_schemas_reach_the_prompt():
    env = ToolEnv([add, look], reward=says_seven)
    for made in (env, lambda: env, Sums):
        _, (prompt,), _ = play(f.QWEN25, made, [says(f.QWEN25, "7")])
        told = prompt.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
        assert list(map(json.loads, told))[:2] == env.tool_schemas
    # Arguments without quotes have the types that the schemas declare.
    coder = f.QWEN3_CODER
    messages = [says(coder, "", call("look", q="3", n=2)), says(coder, "7")]
    _, prompts, _ = play(coder, env, messages)
    assert '{"found": ["3", "3"]}' in prompts[1]


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        (Sums(max_calls=1), None),
        (Sums, {"max_calls": 1}),
        ("tests.envs.some_tools.Sums", {"max_calls": 1}),
        (lambda: Sums(max_calls=1), None),
    ],
    ids=["instance", "class", "name", "callable"],
)
def test_every_form_of_an_environment(env, kwargs):
    calls = call("add", a=3, b=4), call("add", a=1, b=2)
    batch, prompts, _ = play_calls(env, *calls, workflow_kwargs=kwargs)
    assert rewards(batch) == [0.0, 1.0]
    assert batch["info"][-1] == {"calls": 2, "errors": 1}
    assert "only 1 calls are allowed" in prompts[1]


def test_copies_of_an_environment_do_not_mix_up_their_episodes():
    def calls(prompt):
        asked = prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        return call("add", a=int(asked), b=1)

    env, engine = ToolEnv([add], reward=says_seven), engine_that_repeats_results(f.QWEN25, calls)
    asked = [[{"role": "user", "content": str(k)}] for k in range(8)]
    data = [{"messages": messages, "answer": str(k + 1)} for k, messages in enumerate(asked)]
    batch, _ = first_batch(env, engine, data, n=16, group_size=2, cycle=False)
    assert rewards(batch) == [0.0, 1.0] * 16
    assert list(batch["info"]) == [{"calls": 1, "errors": 0}] * 32


def test_a_tool_that_hangs_is_told_and_the_episode_goes_on(idle_clock):
    async def stuck():
        """Never end."""
        await hang()

    env = ToolEnv([stuck], reward=says_seven, tool_timeout=LIMIT / 2)
    batch, prompts, _ = play_calls(env, call("stuck"), limits=Limits(tool_timeout=5 * LIMIT))
    assert rewards(batch) == [0.0, 1.0]
    assert f"error: stuck did not answer within {LIMIT / 2:g} seconds" in prompts[1]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
@pytest.mark.parametrize("is_async", first_fast([False, True]))
def test_an_exit_of_a_tool_rejects_the_episode(error, is_async):
    tries = []

    def leave():
        """Leave, the first time."""
        tries.append(1)
        if len(tries) == 1:
            raise error
        return "stayed"

    async def leave_async():
        return leave()

    tool = Tool(leave_async, {"name": "leave"}) if is_async else leave
    env, options = ToolEnv([tool], reward=says_seven), {"max_consecutive_failures": 2}
    messages = [says(f.QWEN25, "", call("leave"))] * 2 + [says(f.QWEN25, "7")]
    batch, _, stats = play(f.QWEN25, env, messages, max_retries=1, **options)
    assert rewards(batch) == [0.0, 1.0]
    assert stats["rejected"] == stats[f"rejected/{type(error).__name__}"] == 1


def test_tools_know_their_episode():
    seen = []

    def who():
        """Tell the episode."""
        seen.append((context.get().task_id, threading.current_thread() is threading.main_thread()))

    async def who_async():
        """Tell the episode."""
        seen.append((context.get().task_id, False))

    env = ToolEnv([who, who_async], reward=says_seven)
    play_calls(env, call("who"), call("who_async"), data={**ITEM, "task_id": "t-7"})
    assert seen == [("t-7", False)] * 2


def test_the_page_on_environments_has_a_task_that_can_be_solved():
    def calls(prompt):
        return call("compute", expression=prompt.split("What is ")[1].split("?")[0])

    names = {each.__name__: each for each in (Arithmetic, MultiTurnCollector, ToolEnv, calculate)}
    names["engine"] = engine_that_repeats_results(f.QWEN25, calls)
    exec(code_of("environments.rst", "Tools"), names)
    with names["collector"] as collector:
        batch = next(iter(collector))
    assert rewards(batch) == [0.0, 1.0] * 64


# ---- the schemas and the chat template ----------------------------------------------------------


@pytest.mark.parametrize(("late", "error"), [(False, ValueError), (True, RuntimeError)])
def test_tools_may_not_be_given_twice(late, error):
    env = ToolEnv([add], reward=says_seven)
    match = r'template_kwargs\["tools"\] must not be given with an environment that has tools .*\.$'
    chat = ChatOptions(template_kwargs={"tools": [look]})
    with pytest.raises(error, match=match):
        play(f.QWEN25, (lambda: env) if late else env, [says(f.QWEN25, "7")], chat=chat)


def test_other_variables_of_the_template_stay():
    env = ToolEnv([add], reward=says_seven)
    for enable in (True, False):
        chat = ChatOptions(template_kwargs={"tools": None, "enable_thinking": enable})
        _, (prompt,), _ = play(f.QWEN3, env, [says(f.QWEN3, "7")], chat=chat)
        assert '"name": "add"' in prompt
        assert prompt.endswith("<think>\n\n</think>\n\n") == (not enable)


class Offers(TextEnv):
    """Every item says what the model may call."""

    def reset(self, data=None):
        self.tool_schemas = data["tools"]
        return data["messages"]

    def step(self, response):
        return TextStep(done=True)


def test_every_episode_may_have_tools_of_its_own():
    tokenizer = tokenizer_of(f.QWEN25)
    engine = ScriptedEngine(tokenizer, lambda prompt: tokenizer("7<|im_end|>")["input_ids"])
    named = [[], [Tool(add).schema], [Tool(look).schema, Tool(add).schema]]
    batch, _ = first_batch(Offers(), engine, [{**ITEM, "tools": tools} for tools in named], n=6)
    prompts = [tokenizer.decode(row["tokens", "prompt"]) for row in batch.unbind(0)]
    assert len(prompts) == 6
    for k, prompt in enumerate(prompts):
        for tool in ("add", "look"):
            offered = tool in [schema["function"]["name"] for schema in named[k % 3]]
            assert (f'"name": "{tool}"' in prompt) == offered


def test_the_last_tokens_of_many_tools_are_kept(monkeypatch):
    monkeypatch.setattr(episode_player, "_CHATS_KEPT", 2)
    made = []

    class Counted(ChatOptions):
        def tokens(self, tokenizer, **options):
            made.append(self.template_kwargs["tools"][0]["function"]["name"])
            return super().tokens(tokenizer, **options)

    engine, options = ScriptedEngine(tokenizer_of(f.QWEN25), list), {"agents": AgentOptions()}
    options |= {"limits": Limits(), "chat": Counted()}
    player = episode_player.EpisodePlayer(lambda: None, engine, **options)
    for name in "abbacab":
        player._get_chat([Tool(lambda: None, {"name": name}).schema])
    assert made == ["a", "b", "c", "b"]


@pytest.mark.parametrize("own", [False, True])
def test_it_is_said_if_the_template_reads_no_tools_unless_the_environment_parses(caplog, own):
    tokenizer = tiny_chat_tokenizer("add 3 4 7", extra_roles="tool")
    answers = iter(["add 3 4<end>", "7<end>"])
    engine = ScriptedEngine(tokenizer, lambda prompt: tokenizer(next(answers))["input_ids"])

    def parse(text):
        name, *numbers = text.split()
        if name != "add":
            return []
        return [{"name": "add", "arguments": dict(zip("ab", map(int, numbers), strict=True))}]

    env = ToolEnv([add], reward=says_seven, parser=parse if own else None)
    item = {"messages": [{"role": "user", "content": "3 4"}]}
    batch, _ = first_batch(env, engine, [item])
    assert len(said(caplog, "reads no tools")) == (not own)
    if not own:  # A call in a notation that no family has.
        assert rewards(batch) == [0.0]
        return
    assert rewards(batch) == [0.0, 1.0]
    assert tokenizer.decode(engine.calls[1][0]) == (
        "<user> 3 4 <end> <assistant> add 3 4 <end> <tool> 7 <end> <assistant>"
    )


@pytest.mark.slow
@pytest.mark.parametrize("env", [Sums, Sums()], ids=["class", "instance"])
def test_tools_run_in_other_processes(env):
    calls = call("add", a=3, b=4), call("whereabouts"), call("find")
    batch, prompts, _ = play_calls(env, *calls, env_workers=1)
    assert rewards(batch) == [0.0, 1.0]
    assert batch["info"][-1] == {"calls": 3, "errors": 1}
    assert '"name": "whereabouts"' in prompts[0]
    told = prompts[1].split("<tool_response>\n")[1:]
    shown = [part.split("\n</tool_response>")[0] for part in told]
    assert shown[0] == "7"
    assert int(shown[1]) != os.getpid()
    assert shown[2].startswith("error: there is no tool 'find'")
