"""What an environment and a template see of an answer, for each family of models."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectors.scripted import ScriptedEngine
from tests.pages import DOCS, code_of
from tests.tiers import few_or_many
from torchrl_mt.chat import ChatTokens
from torchrl_mt.chat.assistant_messages import name_tool_results
from torchrl_mt.chat.replies import ReplyParser, parse_tool_calls
from torchrl_mt.chat.replies.scanner import Scanner
from torchrl_mt.chat.replies.tool_calls import python_calls
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.envs import TextEnv, TextStep

from .families import FAMILIES
from .families_in_play import (
    Records,
    call,
    chat_of,
    kinds,
    lines,
    play,
    play_episode,
    result_of,
    stop_of,
    tokenizer_of,
    without_ids,
)
from .families_table import table
from .messages import said as answered
from .messages import system, tool, user
from .templates import ROUNDS, byte_level
from .worst_replies import replies, written

PROPERTIES = {"q": {"type": "string"}, "n": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "d", "parameters": PARAMETERS}}
    for n in ("look", "find")
]
IN_THE_FAST_TIER = ("Qwen3", "gpt-oss", "DeepSeek-R1")
"""Families that between them strip, move and open thoughts, and write calls as JSON and by marks."""


def marks(family):
    return () if family.name in IN_THE_FAST_TIER else pytest.mark.slow


def each_kind(of=lambda message: True):
    """Every kind of message of every family."""
    return pytest.mark.parametrize(
        ("family", "kind"),
        [
            pytest.param(family, kind, id=f"{family.name}: {kind}", marks=marks(family))
            for family in FAMILIES
            for kind, message in kinds(family).items()
            if of(message)
        ],
    )


each_family = pytest.mark.parametrize(
    "family", [pytest.param(family, id=family.name, marks=marks(family)) for family in FAMILIES]
)
NAMED = {family.name: family for family in FAMILIES}


@each_kind()
def test_an_answer_is_parsed_into_what_was_said(family, kind):
    message, tokenizer = kinds(family)[kind], tokenizer_of(family)
    text = family.say(message)
    for said in (text, text + stop_of(family, message)):
        for answer in (said, tokenizer(said, add_special_tokens=False)["input_ids"]):
            assert without_ids(parse_tool_calls(answer, tokenizer).message()) == message


TOOL_KINDS = {kind for family in FAMILIES for kind in kinds(family) if "call" in kind}
STILL_FORK = {
    # It never writes the thoughts of an answer that calls no tool.
    "Command R7B": {"thoughts, plain"},
    # They write the end of tools' answers only if no other call follows.
    "DeepSeek-V3": TOOL_KINDS,
    "DeepSeek-R1": TOOL_KINDS,
}
"""What is no row of its own under ``template="training"`` either."""


@pytest.mark.parametrize("policy", ["fork", "append", "training"])
@each_kind()
def test_in_play(family, kind, policy):
    message = kinds(family)[kind]
    plain = kinds(family)["plain"]
    asked = [message, plain, plain] if message.get("tool_calls") else [message] * 3
    policies = {"training": {"template": "training"}}
    seen, rows, calls, stats = play(family, asked, **policies.get(policy, {"on_break": policy}))
    for (response, whole), said in zip(seen, asked, strict=True):
        assert response == said["content"]
        assert without_ids(whole) == said
        assert all(
            len(c["id"]) >= 9 or family.name == "Command R7B" for c in whole.get("tool_calls", ())
        )
    # Every token is trained once, as it was sampled.
    assert int(rows["masks", "all_assistant_mask"].sum()) == sum(len(a.token_ids) for _, a in calls)
    said = [[*prompt, *answer.token_ids] for prompt, answer in calls]
    forks = [k for k in range(1, 3) if said[k][: len(said[k - 1])] != said[k - 1]]
    assert stats["forks"] == len(forks)
    assert sorted(lines(rows)) == sorted(said[k - 1] for k in [*forks, 3])
    if policy == "append" or (policy == "training" and kind not in STILL_FORK.get(family.name, ())):
        assert forks == []


@each_family
def test_it_is_found_out_whether_a_template_is_stable(family):
    chat = chat_of(family)
    assert chat.stable == (chat.breaks is None) == family.stable


@each_family
def test_a_training_template_shows_the_same_opening_and_extends_from_then_on(family):
    """Rendered by itself, each dialogue begins with the text of the dialogue that it goes on from."""
    tokenizer = tokenizer_of(family)
    chat = ChatTokens(tokenizer, template="training")
    assert (chat.source == chat_of(family).source) == (
        family.stable or family.name == "DeepSeek-V3"
    )

    def text(messages, source, answered=False):
        return tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=not answered
        )

    for kind, message in kinds(family).items():
        dialogue = [system("rules"), user("guess")]
        assert text(dialogue, chat.source) == text(dialogue, chat_of(family).source)
        if kind in STILL_FORK.get(family.name, ()):
            continue
        for _ in range(3):
            prompt = tokenizer(text(dialogue, chat.source), add_special_tokens=False)["input_ids"]
            said = family.say(message) + stop_of(family, message)
            answer = tokenizer(said, add_special_tokens=False)["input_ids"]
            before = text(dialogue, chat.source)
            dialogue.append(chat.read(answer, prompt_ids=prompt, messages=dialogue).in_dialogue)
            calls = dialogue[-1].get("tool_calls", ())
            dialogue += [result_of(c, "8") for c in calls] or [user("more")]
            assert text(dialogue, chat.source).startswith(before), kind


def test_what_cannot_be_kept_from_rewriting_is_refused():
    tokenizer = ROUNDS.on(byte_level())
    with pytest.raises(ValueError, match=r'template="training" must .* Use on_break="append"'):
        ChatTokens(tokenizer, template="training")
    with pytest.raises(ValueError, match=r"template must be one of .* got 'other'"):
        ChatTokens(tokenizer, template="other")


def test_a_run_says_once_what_its_template_costs(caplog):
    family = FAMILIES[1]
    plain, thought = kinds(family)["plain"], kinds(family)["thoughts, plain"]
    for policy, level in (
        ({"on_break": "fork"}, "WARNING"),
        ({"on_break": "append"}, "WARNING"),
        ({"template": "training"}, "INFO"),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "torchrl_mt"):
            play(family, [plain, thought, thought], **policy)
        (record,) = [r for r in caplog.records if "prefix-stable" in r.getMessage()]
        assert record.levelname == level


@pytest.mark.slow
def test_the_table_of_the_page_on_chat_templates():
    assert (DOCS / "families.inc").read_text(encoding="utf-8") == table(), (
        "python -m tests.chat.families_table docs/families.inc"
    )


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5", "GLM-4.5"])
def test_a_training_template_keeps_thoughts_that_are_switched_off_too(name):
    tokenizer, off = tokenizer_of(NAMED[name]), {"enable_thinking": False}
    assert ChatTokens(tokenizer, template="training", template_kwargs=off).stable


@each_kind(of=lambda message: message.get("tool_calls"))
def test_another_notation_of_the_same_is_no_reason_to_fork(family, kind, monkeypatch):
    message, plain = kinds(family)[kind], kinds(family)["plain"]
    forks = play(family, [message, plain])[3]["forks"]
    dumps = json.dumps
    tight = {"separators": (",", ":"), "ensure_ascii": False}
    monkeypatch.setattr(json, "dumps", lambda value, **kwargs: dumps(value, **{**tight, **kwargs}))
    assert play(family, [message, plain])[3]["forks"] == forks


@each_kind()
def test_a_reply_that_breaks_off_loses_nothing(family, kind):
    """Whatever is left of it is a call as it was meant, or plain content as a whole."""
    message, tokenizer = kinds(family)[kind], tokenizer_of(family)
    whole, text = message.get("tool_calls", []), family.say(message)
    for end in range(len(text)):
        reply = parse_tool_calls(text[:end], tokenizer, prefix="<think>" if family.opens else None)
        found = without_ids({"tool_calls": reply.tool_calls}).get("tool_calls", [])
        assert found == whole[: len(found)]
        if not reply.tool_calls and reply.reasoning is None:
            assert reply.content.strip() in text[:end]


ONE_EPISODE = ("episodes_per_batch", "total_episodes", "max_consecutive_failures")
CALLING = [family for family in FAMILIES if family.calls]


@few_or_many(50, 100)
def test_any_arguments_come_back(examples):
    settings(max_examples=examples)(given(st.data())(check_that_arguments_come_back))()


def check_that_arguments_come_back(data):
    family = data.draw(st.sampled_from(CALLING))
    texts = st.text("ab \"'{}[]<>,:=\\é界\n", max_size=8).map(str.strip)
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | texts,
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("kl"), inner, max_size=2)
        ),
        max_leaves=4,
    )
    # "q" is text and "n" a number by the tool's schema; "x" has none, so that its type must show.
    shown = values.filter(lambda value: not isinstance(value, str) or value.isalpha())
    arguments = {"q": data.draw(texts), "n": data.draw(st.integers(-9, 9)), "x": data.draw(shown)}
    message = answered("", tool_calls=[call("look", **arguments)])
    reply = parse_tool_calls(family.say(message), tokenizer_of(family), TOOLS)
    assert without_ids(reply.message()) == message


@few_or_many(50, 100)
def test_whatever_is_sampled_is_parsed(examples):
    settings(max_examples=examples)(given(st.data())(check_that_it_is_parsed))()


def check_that_it_is_parsed(data):
    family = data.draw(st.sampled_from(FAMILIES))
    message = data.draw(st.sampled_from([*kinds(family).values()]))
    text = family.say(message)
    marks = [*family.special, family.stop, "<think>", "</think>", "{", "}", '"', "\n", "8", " "]
    pieces = [text[: len(text) // 2], text[len(text) // 2 :], text, *marks]
    said = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6)))
    reply = parse_tool_calls(said, tokenizer_of(family), TOOLS)
    if not reply.tool_calls and reply.reasoning is None:
        assert reply.content in said
        assert said.startswith(reply.content) or family.name in ("gpt-oss", "Command R7B")


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>\n{"name": "look", "arguments": {"q": }}\n</tool_call>',
        '<tool_call>\n{"name": "look"',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {}} and\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n<tool_call>oh</tool_call>',
        "done</tool_call>",
    ],
)
def test_a_reply_of_which_a_part_cannot_be_read_is_plain_content(broken):
    for text in (f"Wait. {broken}", f"<think>\nhm\n</think>\n\nWait. {broken}"):
        reply = parse_tool_calls(text + "<|im_end|>", tokenizer_of(FAMILIES[1]))
        assert reply.message() == answered(text)


NO_JSON = ("NaN", "-Infinity", "1e999", "-1E999", '"\\ud83d"', "[" * 70 + "]" * 70, "[" * 9999)


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: value[:9])
@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
def test_what_no_program_can_read_is_never_an_argument(family, value):
    """Such a reply is plain content, unless the notation takes the value for text."""
    said = family.say(answered("", tool_calls=[call("look", n=7771)]))
    text = said.replace("7771", value)
    reply = parse_tool_calls(text, tokenizer_of(family), TOOLS)
    json.dumps(reply.message(), allow_nan=False, ensure_ascii=False).encode()
    if reply.tool_calls:
        assert reply.tool_calls[0]["function"]["arguments"] == {"n": value}
    else:
        assert reply.content == text


@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
def test_the_deepest_call_goes_into_the_next_prompt(family):
    tokenizer, chat = tokenizer_of(family), ChatTokens(tokenizer_of(family))
    dialogue = [user("guess")]
    prompt = chat.open(dialogue)
    for depth in range(70, 0, -1):
        x = json.loads("[" * depth + "]" * depth)
        message = {**kinds(family)["call"], "tool_calls": [call("look", x=x)]}
        text = family.say(message)
        ids = tokenizer(text + family.stop, add_special_tokens=False)["input_ids"]
        answer = chat.read(ids, prompt_ids=prompt, messages=dialogue)
        if answer.message.get("tool_calls"):
            break
    assert depth > 50
    dialogue.append(answer.in_dialogue)
    new = name_tool_results(answer.in_dialogue, [tool("8")])
    assert chat.next_prompt(dialogue, new, prompt, ids, last_token=ids[-1])


@pytest.mark.parametrize(
    "id", ["0", "look", "functions.look", "look:", "functions.:0", "look:a", ":0"]
)
def test_an_id_without_name_and_number_is_no_call_of_kimi(id):
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    text = f"{begin}<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>{end}"
    reply = parse_tool_calls(text, tokenizer_of(NAMED["Kimi K2"]))
    assert (reply.content, reply.tool_calls) == (text, [])
    named = parse_tool_calls(
        text.replace(f">{id}<", ">functions.a.b:1<"), tokenizer_of(NAMED["Kimi K2"])
    )
    assert named.tool_calls == [{**call("a.b"), "id": "functions.a.b:1"}]


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("Qwen3", "</tool_call>"),
        ("Phi-4-mini", "<|/tool_call|>"),
        ("Command R7B", "<|END_ACTION|>"),
    ],
)
def test_a_complete_call_may_lack_its_last_mark(name, closing):
    """As vLLM reads it: a stop string may have taken it."""
    family = NAMED[name]
    message = kinds(family)["calls"]
    text = family.say(message).rstrip()
    assert text.endswith(closing)
    for end in ("", "\n"):
        reply = parse_tool_calls(text.removesuffix(closing) + end, tokenizer_of(family))
        assert without_ids(reply.message()) == message
    for end in (closing[:-1], " and", text):
        reply = parse_tool_calls(text.removesuffix(closing) + end, tokenizer_of(family))
        assert not reply.tool_calls


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (r'''a='\'\\\n\x41\u00e9\d', b="it's"''', {"a": "'\\\nA\u00e9\\d", "b": "it's"}),
        (
            "a = '''one\ntwo's''', b = {'k': [None, true, -1.5e-3,]},",
            {"a": "one\ntwo's", "b": {"k": [None, True, -1.5e-3]}},
        ),
        ("", {}),
    ],
)
def test_calls_in_pythons_notation(given, arguments):
    for text in (f"[look({given})]", f"look({given})", f"[look(\n{given}\n)]"):
        assert python_calls(text) == [call("look", **arguments)]
    assert python_calls(f"find(a=1)\nlook({given})") == [
        call("find", a=1),
        call("look", **arguments),
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("f(1)", "f('a')", "f('a', 1)", "f(a)", "f(a=b)", "f(a=g())", "f(a=1, a=1)", "f(a={b=1})"),
        *("f(a=[b=1])", "f(a=1", "f)", "[f(a=1)", "f(a='1)", "f(a='\n')", "f(a=(1))", "f(**{})"),
        *("f(a==1)", '[["a", 1]]', "1f()", "f.1()", "f()()", "f(a=1 b=2)", "f(a=1e999)"),
        *(r"f(a='\ud83d')", "f(a=''b'')"),
    ],
)
def test_what_is_no_call_in_pythons_notation(text):
    with pytest.raises(ValueError):
        python_calls(text)


@few_or_many(20, 50)
def test_no_character_is_read_many_times(examples):
    """What the scanner reads of a reply is bounded by its length, whatever is repeated in it."""
    read = 0
    names = ("is_done", "before", "rest", "json")
    plain = {name: getattr(Scanner, name) for name in names}

    def counting(name):
        def counted(self, *args):
            nonlocal read
            before, found = self.at, None
            try:
                found = plain[name](self, *args)
                return found
            finally:
                read += (len(self.text) if found is None else self.at) - before + 1

        return counted

    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(Scanner, name, counting(name))
        for family in CALLING:
            parser = ReplyParser(tokenizer_of(family))
            for reply in replies(family, examples, lambda: None):
                read, text = 0, written(reply, 2000)
                parser.parse(text, None)
                assert read <= 8 * len(text) + 100


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of processes")
def test_the_slowest_replies_that_a_search_finds_take_linear_time():
    """For each notation, 1 MB of the worst reply: the pattern of a call would take hours."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (400, 400));"
        "from tests.chat.worst_replies import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(FAMILIES) + 1


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


@pytest.mark.skipif(
    not hasattr(byte_level(), "response_template"), reason="transformers has no response templates"
)
def test_a_tokenizers_own_response_template_comes_first():
    tokenizer = FAMILIES[0].on(byte_level())
    tokenizer.response_template = RESPONSE_TEMPLATE
    call_text = '<tool_call>{"name": "look", "arguments": {"n": "3"}}</tool_call>'
    reply = parse_tool_calls(f"<think>hm</think>Wait.{call_text}", tokenizer, TOOLS)
    assert (reply.reasoning, reply.content) == ("hm", "Wait.")
    assert reply.tool_calls == [call("look", n=3)]
    broken = "<think>hm</think>Wait.<tool_call>{</tool_call>"
    assert parse_tool_calls(broken, tokenizer).message() == answered(broken)


def test_a_step_of_one_argument_gets_the_content_and_the_record_cannot_be_spoiled():
    family = FAMILIES[1]
    message = kinds(family)["thoughts, content and call"]

    class Spoils(Records):
        def step(self, response, message):
            message["tool_calls"].clear()
            return super().step(response, message)

    class Content(Records):
        def step(self, response, verbose=False):
            assert verbose is False
            self.seen.append(response)
            return TextStep([user("more")], 1.0, len(self.seen) == 2)

    class Whole(Content):
        whole_text = True

    for env in (Spoils, Content, Whole):
        tokenizer, seen = tokenizer_of(family), []
        ids = tokenizer(family.say(message) + family.stop)["input_ids"]
        engine = ScriptedEngine(tokenizer, lambda prompt, ids=ids: ids)
        settings = dict.fromkeys(ONE_EPISODE, 1)
        with MultiTurnCollector(partial(env, 2, seen), engine, **settings) as collector:
            (batch,) = collector
        said = [turn for turn in batch["text"][0] if turn["role"] == "assistant"]
        assert [without_ids(each) for each in said] == [message]
        expected = {Content: ["Wait."] * 2, Whole: [family.say(message)] * 2}
        assert seen == expected.get(env, seen)


def test_a_message_that_the_dialogue_refuses_rejects_its_episode():
    class Tool(Records):
        def step(self, response, message):
            return TextStep([tool("nobody asked")])

    family = NAMED["gpt-oss"]
    tokenizer = tokenizer_of(family)
    said = tokenizer(family.say(kinds(family)["plain"]) + family.stop)["input_ids"]
    stops = [tokenizer.convert_tokens_to_ids(family.stop)]
    with pytest.raises(Exception, match="no previous assistant message with a tool call"):
        play_episode(tokenizer, lambda: Tool(2, []), [said], stops)


def test_calls_are_numbered_and_answers_name_them():
    family = NAMED["Mistral Small 3.1"]
    calls = kinds(family)["calls"]
    seen, _, engine_calls, _ = play(family, [calls, calls, kinds(family)["plain"]])
    ids = [c["id"] for _, message in seen for c in message.get("tool_calls", ())]
    assert ids == [f"call{k:05}" for k in range(4)]
    text = tokenizer_of(family).decode(engine_calls[-1][0])
    assert [f'"call_id": "{id}"' in text for id in ids] == [True] * 4


def test_the_shop_of_the_page_on_environments():
    names = {"TextEnv": TextEnv, "TextStep": TextStep}
    exec(code_of("environments.rst", "Responses and tool calls"), names)
    family = FAMILIES[0]
    asked = {"content": "", "tool_calls": [call("price", of="tea"), call("price", of="jam")]}
    texts = iter([family.say(asked), "5"])
    tokenizer = tokenizer_of(family)
    engine = ScriptedEngine(
        tokenizer, lambda prompt: tokenizer(next(texts) + family.stop)["input_ids"]
    )
    prices = {"tea": "2", "jam": "3"}
    item = {"question": "?", "answer": "5", "tools": {"price": lambda of: prices[of]}}
    with MultiTurnCollector(
        names["Shop"], engine, [item], episodes_per_batch=1, total_episodes=1
    ) as collector:
        (batch,) = collector
    assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0]
    shown = tokenizer.decode(engine.calls[1][0])
    assert "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>" in shown
