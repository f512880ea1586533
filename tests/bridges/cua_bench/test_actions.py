"""Any text is actions or an ActionError, and what is printed is parsed as the same action."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bridges.cua_bench.fake_worker import TAGS, acting
from tests.refusals import check_refused, refused
from tests.tiers import examples, first_fast
from torchrl_mt.bridges.cua_bench import Action, ActionError, parse_actions
from torchrl_mt.bridges.cua_bench.actions import describe_actions

fractions = st.floats(0, 1, allow_subnormal=False)
keys = st.sampled_from(["ctrl", "c", "+", "<", "=", '"', "'", "\\", ",)", "page_down", "é", "a-b"])


def made(name, **arguments):
    return st.builds(Action, st.just(name), st.fixed_dictionaries(arguments))


actions = st.one_of(
    made("click", x=fractions, y=fractions),
    made("left_double", x=fractions, y=fractions),
    made("right_single", x=fractions, y=fractions),
    made("drag", x=fractions, y=fractions, x2=fractions, y2=fractions),
    made("hotkey", keys=st.lists(keys, min_size=1, max_size=3)),
    made("key", key=keys),
    made("type", text=st.text()),
    made("type", text=st.text(alphabet="\"'\\\n,()<>|/ action_startendk", max_size=30)),
    made("scroll", direction=st.sampled_from(["up", "down"])),
    made("scroll", direction=st.sampled_from(["up", "down"]), amount=st.integers(1, 10_000)),
    made("scroll", x=fractions, y=fractions, direction=st.just("up"), amount=st.just(3)),
    made("wait"),
    made("wait", seconds=st.floats(0, 5)),  # At most 60 seconds in all.
    made("call_user"),
    made("done"),
)
formats = st.sampled_from(sorted(TAGS))


def parsed(*written, action_format="tagged"):
    return parse_actions(acting(*written, action_format=action_format), action_format)


@given(st.lists(st.lists(actions, min_size=1, max_size=3), min_size=1, max_size=3), formats)
@examples(60, few=25)
def test_what_is_printed_is_parsed_as_the_same_actions(parts, action_format):
    text = "so: ".join(acting(*map(str, part), action_format=action_format) for part in parts)
    expected = [action for part in parts for action in part]
    assert parse_actions(text, action_format) == expected
    thought = f"<think>first {acting('done()', 'oh', action_format=action_format)}</think>"
    assert parse_actions(thought + text, action_format) == expected


# Pieces that meet in any order: most are no action, some nearly are.
PIECES = [
    *(tag for pair in TAGS.values() for tag in pair),
    *("<think>", "</think>", "<|think_start|>", "<|think_end|>", "click(", "hotkey(", "type("),
    *("scroll(", "drag(", "wait(", "done(", "start_box=", "x=", "keys=", "down", "ctrl"),
    *('"', "'", "\\", "\n", "(", ")", "[", "]", ",", "+", ";", " ", "0.5", "500", "1e999"),
    *("-1", "nan", "'(1, 2)'", "\ud800", "٣", "9" * 400),
]


@given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text()), formats)
@examples(1000, few=100)
def test_any_text_is_actions_or_an_error(text, action_format):
    begin, end = TAGS[action_format]
    for said in (text, f"{begin}{text}{end}", f"{begin}click({text}){end}"):
        try:
            found = parse_actions(said, action_format)
        except ActionError as error:
            assert str(error).endswith(".")  # noqa: PT017
            continue
        assert found
        for action in found:
            assert begin in said
            assert action.name in said
            assert all(0 <= action.arguments.get(name, 0) <= 1 for name in ("x", "y", "x2", "y2"))
            assert parsed(str(action)) == [action]


def line(x, y, x2, y2):
    return {"x": x, "y": y, "x2": x2, "y2": y2}


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ("click(500, 250)", "click", {"x": 0.5, "y": 0.25}),
        ("click(0, 1000)", "click", {"x": 0.0, "y": 1.0}),
        ("click(1, 1)", "click", {"x": 1.0, "y": 1.0}),
        ("click(1, 500)", "click", {"x": 1.0, "y": 0.5}),
        ("click(1.5, 1)", "click", {"x": 0.0015, "y": 1.0}),
        ("click( y = .5 , x = 1.0 )", "click", {"x": 1.0, "y": 0.5}),
        ("click(start_box='(500,250)')", "click", {"x": 0.5, "y": 0.25}),
        ("click(start_box='<|box_start|>(500,250)<|box_end|>')", "click", {"x": 0.5, "y": 0.25}),
        ("click(point='<point>500 250</point>')", "click", {"x": 0.5, "y": 0.25}),
        ("click(start_box=[0.25, 0.25, 0.75, 1])", "click", {"x": 0.5, "y": 0.625}),
        ("drag(start_box='(1,2)', end_box='(300, 400)')", "drag", line(1.0, 0.002, 0.3, 0.4)),
        ("drag(x1=0, y1=0, x2=0, y2=1)", "drag", line(0.0, 0.0, 0.0, 1.0)),
        ("hotkey(ctrl, c)", "hotkey", {"keys": ["ctrl", "c"]}),
        ("hotkey('ctrl+c')", "hotkey", {"keys": ["ctrl", "c"]}),
        ("hotkey(key='ctrl c')", "hotkey", {"keys": ["ctrl", "c"]}),
        ("hotkey(keys=['ctrl', \"c\"])", "hotkey", {"keys": ["ctrl", "c"]}),
        ("hotkey(['ctrl+c'])", "hotkey", {"keys": ["ctrl", "c"]}),
        ("hotkey([ctrl], '+')", "hotkey", {"keys": ["ctrl", "+"]}),
        ("hotkey(ctrl++)", "hotkey", {"keys": ["ctrl", "+"]}),
        ("key(enter)", "key", {"key": "enter"}),
        ("key(key='1')", "key", {"key": "1"}),
        (r'type("a, b\n\"c\"")', "type", {"text": 'a, b\n"c"'}),
        ("type('a)\nb\\\\ (\"c\"')", "type", {"text": 'a)\nb\\ ("c"'}),
        ("type(content='')", "type", {"text": ""}),
        ("type('<|action_end|></think>')", "type", {"text": "<|action_end|></think>"}),
        ("scroll(0.5, 0.25, down)", "scroll", {"x": 0.5, "y": 0.25, "direction": "down"}),
        ("scroll('up', 3)", "scroll", {"direction": "up", "amount": 3}),
        ("scroll(direction=up)", "scroll", {"direction": "up"}),
        ("wait(2)", "wait", {"seconds": 2.0}),
        ("wait(60)", "wait", {"seconds": 60.0}),
        ("wait()", "wait", {}),
    ],
)
def test_spellings(written, name, arguments):
    for action_format in TAGS:
        assert parsed(written, action_format=action_format) == [Action(name, arguments)]


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("click 0.5 0.5", "expected an action"),
        ("clik(0.5, 0.5)", "there is no action 'clik'; the actions are click, left_double"),
        ("finished()", "there is no action 'finished'"),
        ("click(0.5)", "click needs y: write click(0.5, 0.5)."),
        ("click()", "click needs x and y"),
        ("click(0.5, 0.5, 0.5)", "click got too many arguments"),
        ("click(0.5, x=0.5)", "click got x twice"),
        ("click(z=0.5)", "click takes no 'z'"),
        ("click(0.5, 1001)", "thousandths up to 1000, got 1001"),
        ("click(-0.1, 0.5)", "x must be a fraction from 0 to 1"),
        ("click('0.5', 0.5)", "x must be a fraction"),
        ("click(nan, 0.5)", "x must be a fraction"),
        ("click(x=[1, 2], y=3)", "x must be a fraction"),
        ("click(start_box='(1, 2, 3)')", "start_box must be a point"),
        ("click(start_box='here')", "start_box must be a point"),
        ("click(0.5, 0.5", "expected ',' or ')'"),
        ("click(0.5,, 0.5)", "expected an argument"),
        ("click(0.5, 0.5) and", "expected an action"),
        ("drag(0.1, 0.2, 0.3)", "drag needs y2"),
        ("hotkey()", "hotkey needs keys"),
        ("hotkey('ctrl+')", "hotkey needs the names of keys"),
        ("hotkey(' ')", "hotkey needs the names of keys"),
        ("hotkey('ctrl', 'page down')", 'name without spaces, such as "enter", got "page down"'),
        ("hotkey(keys=[ctrl, 'page down'])", "a key is one name"),
        ("hotkey('ctrl', '')", "a key is one name"),
        ("hotkey(shift, 'ctrl+c')", "a key is one name"),
        ("key('ctrl+c')", "hotkey presses several"),
        ("key('page down')", "hotkey presses several"),
        ("key([a, b])", "a key is one name"),
        ("type(hello)", "text must be in quotes"),
        ("type(hello, world)", "type got too many arguments"),
        ("type('hello", "the string never ends"),
        (r"type('C:\dir')", r"write \\ for a backslash"),
        ("type('\ud800')", "half a character"),
        ("scroll(left)", "direction must be up or down, got left"),
        ("scroll(0.5, down)", "scroll needs direction"),
        ("scroll(-1, 0.5, down)", "x must be a fraction"),
        ("scroll(x=0.5, direction=down)", "scroll needs y"),
        ("scroll(down, 0)", "amount must be a whole number from 1"),
        ("scroll(down, 1.5)", "amount must be a whole number from 1"),
        ("scroll(down, 1e999)", "amount must be a whole number from 1"),
        ("wait(61)", "seconds must be from 0 to 60, got 61"),
        ("wait(-1)", "seconds must be from 0 to 60"),
        ("done(0)", "done got too many arguments"),
    ],
)
def test_errors_say_what_is_wrong(written, reason):
    with pytest.raises(ActionError, match=re.escape(reason)):
        parsed("wait()", written)


@pytest.mark.parametrize(
    "text",
    [
        "",
        acting(),
        "click(0.5, 0.5)",
        "<|action_start|>click(0.5, 0.5",
        "<|action_start|>wait() click",
        "<|action_start|>wait() type('a",
        "<|action_start|>wait() <|action_end",
        "<|action_start|>wait() and so on",
        "<|action_start|>wait() <|action_start|>wait()",
        "<|action_start|>",
        "<action>click(0.5, 0.5)</action>",
        acting("done()") + "<|action_start|>",
        "<think>" + acting("done()"),
        acting("done()") + "</think>",
        "<think>" + acting("done()") + "</think>",
        acting("done()") + "<think>and",
    ],
)
def test_text_without_whole_actions_is_an_error(text):
    with pytest.raises(ActionError):
        parse_actions(text)


def test_thoughts_between_actions_are_skipped():
    text = f"{acting('wait()')}<think>{acting('oh')}</think>{acting('done()')}"
    assert [action.name for action in parse_actions(text)] == ["wait", "done"]
    text = f"{acting('oh')}</think>{acting('done()')}"
    assert [action.name for action in parse_actions(text)] == ["done"]


@given(st.lists(actions, min_size=1, max_size=3), formats, st.sampled_from(["", " ", "\n", ";"]))
@examples(50, few=10)
def test_the_last_end_tag_may_be_missing(expected, action_format, rest):
    """An engine that stops at the end tag leaves it out."""
    end = TAGS[action_format][1]
    text = acting(*map(str, expected), action_format=action_format).removesuffix(end) + rest
    assert parse_actions(text, action_format) == expected
    before = acting("call_user()", action_format=action_format)
    assert parse_actions(before + text, action_format)[1:] == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[click(0.5, 0.5), type("</think>")]', "expected an action"),
        ('[click(0.5 0.5), type("</think>")]', "expected ',' or ')'"),
        ("[write('</think>')]", "there is no action 'write'"),
        ("[write('</think>') ", "there is no action 'write'"),
        ("[please type('</think>')]", "expected an action"),
        ("[clik(), type(']</think>')]", "there is no action 'clik'"),
        ("[write('<think>')] [type('</think>')]", "there is no action 'write'"),
        ("[write('<think>')]", "there is no action 'write'"),
        ("[write('<|think_start|>')]", "there is no action 'write'"),
    ],
)
@pytest.mark.parametrize("action_format", TAGS)
def test_a_broken_part_is_an_error_whatever_it_quotes(text, reason, action_format):
    begin, end = TAGS[action_format]
    for following in ("", "[key(enter)]", " so [key(enter)] [done()]"):
        said = (text + following).replace("[", begin).replace("]", end)
        with pytest.raises(ActionError, match=re.escape(reason)):
            parse_actions(said, action_format)


@pytest.mark.parametrize("thought", ["I use [ and ].", "Use [.", "[oh] or [clik(].", "[...]", "[["])
@pytest.mark.parametrize("action_format", TAGS)
def test_thoughts_that_the_prompt_began_may_mention_tags(thought, action_format):
    begin, end = TAGS[action_format]
    said = f"{thought}</think>[done()]".replace("[", begin).replace("]", end)
    assert [action.name for action in parse_actions(said, action_format)] == ["done"]


LONG = [
    *("a,", "9", "a+", "'<' , ", "</think>", " ", '"', "<think>", "[", "\n;", "wait() "),
    *('<|action_start|>hotkey("<|action_start|>hotkey(",', '<|action_start|>type("'),
    *("<|action_start|>type(\\'", "<|action_start|>", "<|action_end|>", "<think></think>"),
    *("<|action_start|>write(", "<|action_start|>oh<|action_end|>"),
    "<|action_start|>wait()<|action_end|>",
]


@pytest.mark.parametrize("piece", first_fast(LONG, 4))
def test_long_responses_are_parsed_in_one_go(piece):
    """A parser whose time grows with the square of the length would not come back."""
    for text in (piece * 10_000, f"<|action_start|>hotkey({piece * 10_000}"):
        try:
            assert {action.name for action in parse_actions(text)} == {"wait"}
        except ActionError as error:
            assert len(str(error)) < 300  # noqa: PT017


def test_the_waits_of_a_response_have_one_limit():
    assert len(parsed(*["wait(0.1)"] * 600)) == 600
    assert len(parse_actions(acting("wait(30)", "wait(29)") + acting("wait()"))) == 3
    for written in (["wait(60)", "wait(0.5)"], ["wait()"] * 61):
        with pytest.raises(ActionError, match=r"may wait for 60 seconds in all, got 6[01]"):
            parsed(*written)
    thought = f"<think>{acting('wait(60)')}</think>"
    assert len(parse_actions(thought + acting("wait(60)"))) == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("text must be a string, got NoneType", parse_actions, None, error=TypeError),
        refused("text must be a string, got bytes", parse_actions, b"done()", error=TypeError),
        refused("action_format … one of 'tagged', 'think', got 'json'", parse_actions, "", "json"),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize("action_format", TAGS)
def test_the_model_is_shown_forms_that_parse(action_format):
    begin, end = TAGS[action_format]
    lines = describe_actions(action_format).splitlines()
    assert begin in lines[0]
    assert end in lines[0]
    forms = [line.partition("): ")[0] + ")" for line in lines[1:-1]]
    names = [parsed(form, action_format=action_format)[0].name for form in forms]
    assert len(names) == len(set(names)) == 11
