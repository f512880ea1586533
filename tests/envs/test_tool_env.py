"""Tools in an environment: calls are answered in order, nothing that a tool does ends an episode."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import threading
from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.some_tools import add, look, says_seven
from tests.envs.speaking import call, says
from tests.idle_clock import LIMIT, Loop, hang
from tests.refusals import check_refused, refused
from tests.tiers import examples
from tests.waiting import until
from torchrl_mt.chat import ParsedReply
from torchrl_mt.collectors.event_loop.loop_thread import LoopThread
from torchrl_mt.envs import Tool, ToolEnv
from torchrl_mt.envs.tool_env import _MOST_AT_ONCE

OPENING = [{"role": "system", "content": "rules"}, {"role": "user", "content": "3 + 4?"}]
DATA = {"messages": OPENING, "answer": "7"}


def run(coroutine, loop=None):
    """Run a coroutine, in a loop whose clock jumps where something hangs."""
    loop = loop or Loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def steps(env, *messages, data=DATA, loop=None):
    """The steps of an episode with these responses."""

    async def play():
        await env.reset(data)
        return [await env.step(message["content"], message) for message in messages]

    return run(play(), loop)


def answers(env, *calls, loop=None):
    """What the calls of one response are answered with."""
    (step,) = steps(env, says("", *calls), loop=loop)
    assert [m["role"] for m in step.messages] == ["tool"] * len(calls)
    assert [m["tool_call_id"] for m in step.messages] == [c["id"] for c in calls]
    assert [m["name"] for m in step.messages] == [c["function"]["name"] for c in calls]
    return [m["content"] for m in step.messages]


def env_of(*tools, reward=says_seven, **settings):
    return ToolEnv(tools, reward=reward, **settings)


# ---- an episode ---------------------------------------------------------------------------------


def test_an_episode_goes_on_until_an_answer_without_a_call_which_is_rewarded():
    first, second, last = steps(
        env_of(add, look),
        says("Wait.", call("add", a=3, b=4)),
        says("", call("look", q="x", n=2)),
        says("7"),
    )
    tool = {"role": "tool", "tool_call_id": "1"}
    assert first.messages == [{**tool, "name": "add", "content": "7"}]
    assert second.messages == [{**tool, "name": "look", "content": '{"found": ["x", "x"]}'}]
    assert (first.reward, first.done, second.done) == (0.0, False, False)
    assert (tuple(last.messages), last.reward, last.terminated) == ((), 1.0, True)
    infos = [step.info for step in (first, second, last)]
    assert infos == [{"calls": n, "errors": 0} for n in (1, 2, 2)]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_reward_sees_the_whole_dialogue_and_the_data(is_async):
    seen = []

    def judge(messages, data):
        seen.append((messages, data, threading.current_thread()))
        return 0.25

    async def judge_async(messages, data):
        return judge(messages, data)

    env = env_of(add, reward=judge_async if is_async else judge)
    calls = [call("add", id="x", a=1, b=2), call("add", id="y", a=3, b=4)]
    *_, last = steps(env, says("hm", *calls), says("7"))
    assert last.reward == 0.25
    ((messages, data, thread),) = seen
    results = [
        {"role": "tool", "tool_call_id": id, "name": "add", "content": text}
        for id, text in (("x", "3"), ("y", "7"))
    ]
    assert messages == [*OPENING, says("hm", *calls), *results, says("7")]
    assert data is DATA
    assert (thread is threading.main_thread()) == is_async


def test_the_reward_may_change_its_messages():
    def vandal(messages, data):
        for message in messages:
            message["content"] = ""
        return 1

    data = copy.deepcopy(DATA)
    env = env_of(add, reward=vandal)
    said = [says("", call("add", a=3, b=4)), says("7")]
    first, last = steps(env, *said, data=data)
    assert data == DATA
    assert first.messages[0]["content"] == "7"
    assert said[1] == says("7")
    assert last.reward == 1


def test_an_environment_may_be_used_again():
    env = env_of(add, max_calls=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^ToolEnv\.step was called with no .*first\.$"):
            run(env.step("7"))
        first, last = steps(env, says("", call("add", a=1, b=2)), says("7"))
        assert first.messages[0]["content"] == "3"
        assert last.info == {"calls": 1, "errors": 0}
    steps(env, says("", call("add", a=1, b=2)))  # and no end
    (again,) = steps(env, says("7"))
    assert again.info == {"calls": 0, "errors": 0}


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain é", "plain é"),
        ("", ""),
        (7, "7"),
        (None, "null"),
        (["é", {"a": 1.5}], '["é", {"a": 1.5}]'),
        ("name\udc80", "name?"),
    ],
)
def test_a_result_is_text_or_json(result, text):
    assert answers(env_of(Tool(lambda: result, {"name": "f"})), call("f")) == [text]


class Unspeakable(Exception):
    def __str__(self):
        raise OSError


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


def exits(error):
    def fails():
        """Fail."""
        raise error

    return fails


def returns(value):
    def gives():
        """Give."""
        return value

    return gives


CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (call("find"), "there is no tool 'find'; the tools are add, look, fails, gives, far"),
        (call("add", a=1), "add(a, b) needs b"),
        (call("add"), "add(a, b) needs a, b"),
        (call("add", a=1, b=2, c=3), "add(a, b): got an unexpected keyword argument 'c'"),
        (call("add", a=1, b="2"), "add(a, b): b must be of type integer, got '2'"),
        (call("add", a=1, b=True), "add(a, b): b must be of type integer, got 'True'"),
        (call("look", q=None), "look(q, n): q must be of type string, got 'None'"),
        (call("far", unit="mile"), "far(unit): unit must be one of km, m, got 'mile'"),
        ({**call("add"), "function": {"name": "add", "arguments": "{"}}, "not valid JSON"),
        ({**call("add"), "function": {"name": "add", "arguments": [1]}}, "must be a JSON object"),
        (call("fails"), "fails raised ValueError: no such page"),
        (call("gives"), "gives returned no JSON: TypeError: Object of type set is not JSON"),
    ],
)
def test_an_error_is_told(asked, error):
    def far(unit: str = "km") -> int:
        """Tell the distance.

        Args:
            unit: the unit (choices: ["km", "m"])
        """
        return 3

    env = env_of(add, look, exits(ValueError("no such page")), returns({1}), far)
    fine = call("add", id="2", a=3, b=4)
    (step,) = steps(env, says("", asked, fine))
    told, result = (message["content"] for message in step.messages)
    assert told.startswith("error: ")
    assert error in told
    assert result == "7"
    assert step.info == {"calls": 2, "errors": 1}


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        (exits(ValueError()), "error: fails raised ValueError"),
        (exits(StopIteration()), "error: fails raised RuntimeError"),
        (exits(Unspeakable()), "error: fails raised Unspeakable"),
        (exits(TimeoutError("mine")), "error: fails raised TimeoutError: mine"),
        (exits(asyncio.CancelledError()), "error: fails was cancelled"),
        (exits(OSError("x" * 2000)), f"error: fails raised OSError: {'x' * 491}..."),
        (returns(CIRCULAR), "error: gives returned no JSON: ValueError: Circular reference"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_no_error_gets_out(tool, error, is_async):
    async def awaited():
        return tool()

    name = tool.__name__
    (told,) = answers(env_of(Tool(awaited if is_async else tool, {"name": name})), call(name))
    assert told.startswith(error)


def test_an_error_of_the_reward_gets_out():
    with pytest.raises(ZeroDivisionError):
        steps(env_of(add, reward=lambda messages, data: 1 / 0), says("7"))


# ---- calls at the same time ---------------------------------------------------------------------


@examples()
@given(st.permutations(range(6)), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_calls_are_answered_in_their_order_in_whatever_order_they_end(order, kinds):
    ended = []
    turn = {number: asyncio.Event() for number in range(6)}

    async def work(number: int, kind: int):
        """Wait for the one before it in the order."""
        place = order.index(number)
        if place:
            await turn[order[place - 1]].wait()
        ended.append(number)
        turn[number].set()
        return [number, 1 / (kind - 1)] if kind < 2 else {1}

    schema = {"name": "work", "parameters": {"properties": {"number": {}, "kind": {}}}}
    calls = [call("work", id=str(k), number=k, kind=kind) for k, kind in enumerate(kinds)]
    contents = answers(env_of(Tool(work, schema)), *calls)
    assert ended == order
    for number, (kind, content) in enumerate(zip(kinds, contents, strict=True)):
        if kind == 0:
            assert content == json.dumps([number, -1.0])
        else:
            assert content.startswith(f"error: work {('', 'raised Zero', 'returned no')[kind]}")


@pytest.mark.parametrize("end", ["cancel", "exit", "time"])
def test_calls_that_are_given_up_are_cancelled(end, monkeypatch):
    monkeypatch.setattr(asyncio, "new_event_loop", Loop)
    begun, ended = [], []

    async def wait():
        """Wait."""
        begun.append(1)
        try:
            await (hang() if end == "time" else asyncio.Event().wait())
        finally:
            ended.append(1)

    async def leave():
        """Leave."""
        await until(lambda: len(begun) == 2)
        sys.exit(3)

    env = env_of(wait, leave, tool_timeout=LIMIT / 2)
    calls = [call("wait", id=str(k)) for k in range(2)] + [call("leave")] * (end == "exit")

    async def play():
        await env.reset(DATA)
        step = asyncio.ensure_future(env.step("", says("", *calls)))
        await until(lambda: len(begun) == 2)
        if end == "cancel":
            step.cancel()
        await asyncio.wait([step])
        await until(lambda: len(ended) == 2)
        assert step.cancelled() == (end == "cancel")
        assert step.cancelled() or isinstance(step.exception(), SystemExit) == (end == "exit")

    thread = LoopThread("calls")
    thread.run(play())
    thread.close()


# ---- limits -------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_is_told_and_the_others_are_answered():
    loop, late = Loop(), threading.Event()

    async def stuck():
        """Never end."""
        await hang()

    def blocked():
        """End too late."""
        with loop.hangs():
            late.wait()

    env = env_of(stuck, blocked, add, tool_timeout=LIMIT / 2)
    calls = [call("stuck", id="1"), call("blocked", id="2"), call("add", id="3", a=3, b=4)]
    error = f"error: {{}} did not answer within {LIMIT / 2:g} seconds"
    assert answers(env, *calls, loop=loop) == [error.format("stuck"), error.format("blocked"), "7"]
    late.set()


def test_calls_of_a_response_run_in_few_threads_and_are_answered_in_order():
    gate, lock = threading.Event(), threading.Lock()
    running, most, number = 0, 0, 5 * _MOST_AT_ONCE

    def count(k: int) -> int:
        """Count.

        Args:
            k: the number of the call.
        """
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1
        return k

    env = env_of(count)
    calls = [call("count", id=str(k), k=k) for k in range(number)]

    async def play():
        await env.reset(DATA)
        step = asyncio.ensure_future(env.step("", says("", *calls)))
        while running < _MOST_AT_ONCE:
            await asyncio.sleep(0)
        for _ in range(100):  # Others would begin.
            await asyncio.sleep(0)
        gate.set()
        return await step

    step = run(play())
    assert [m["content"] for m in step.messages] == [str(k) for k in range(number)]
    assert most == _MOST_AT_ONCE


def test_a_tool_has_a_time_limit_of_its_own():
    async def stuck():
        """Never end."""
        await hang()

    quick = Tool(stuck, timeout=LIMIT / 2)
    assert answers(env_of(quick, tool_timeout=5 * LIMIT), call("stuck")) == [
        f"error: stuck did not answer within {LIMIT / 2:g} seconds"
    ]
    # The environment's limit is not for a tool that has its own.
    patient = Tool(partial(asyncio.sleep, LIMIT, "done"), {"name": "nap"}, timeout=3 * LIMIT)
    loop = Loop()
    with loop.hangs():
        assert answers(env_of(patient, tool_timeout=1.0), call("nap"), loop=loop) == ["done"]


@examples()
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 8))
def test_calls_beyond_the_maximum_are_told_so(sizes, most):
    turns = [[call("add", id=str(k), a=k, b=0) for k in range(size)] for size in sizes if size]
    sums = [*accumulate(map(len, turns)), most + 1]
    turns = turns[: 1 + next(k for k, total in enumerate(sums) if total > most)]
    out = steps(env_of(add, max_calls=most), *(says("", *calls) for calls in turns), says("7"))
    told = [message["content"] for step in out for message in step.messages]
    expected = [c["function"]["arguments"]["a"] for calls in turns for c in calls]
    assert told[:most] == list(map(str, expected[:most]))
    error = f"error: only {most} calls are allowed, and all are used; answer without tools"
    assert told[most:] == [error] * (len(expected) - min(most, len(expected)))
    assert out[-1].info == {"calls": len(expected), "errors": max(len(expected) - most, 0)}


@pytest.mark.parametrize("most", [0, 1])
def test_calling_on_after_the_error_of_the_maximum_ends_the_episode_which_is_judged(most):
    seen = []
    env = env_of(add, reward=lambda messages, data: seen.extend(messages) or 0.5, max_calls=most)
    said = [says("", call("add", id=str(k), a=k, b=0)) for k in range(most + 2)]
    *_, told, last = steps(env, *said)
    assert told.messages[0]["content"].startswith(f"error: only {most} calls are allowed")
    assert (told.done, last.terminated, last.reward, tuple(last.messages)) == (False, True, 0.5, ())
    assert last.info == {"calls": most + 1, "errors": 1}
    assert seen[-1] == said[-1]


# ---- tools --------------------------------------------------------------------------------------


def test_the_schemas_are_made_of_signature_and_docstring():
    given_schema = {"name": "find", "parameters": {"properties": {"q": {}}}}
    env = env_of(add, Tool(look, given_schema))
    ours, found = env.tool_schemas
    properties = {
        "a": {"type": "integer", "description": "the first number."},
        "b": {"type": "integer", "description": "the second number."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    described = {"name": "add", "description": "Add two numbers.", "parameters": parameters}
    assert ours == {"type": "function", "function": {**described, "return": {"type": "integer"}}}
    assert found == {"type": "function", "function": given_schema}
    whole = Tool(look, found)
    assert whole.schema == found
    assert answers(env, call("find", q="x")) == ['{"found": ["x"]}']


def undescribed(a: int):
    return a


def untyped(a):
    """Do.

    Args:
        a: what.
    """


def half_described(a: int, b: int):
    """Do.

    Args:
        a: what.
    """


def has(error, text, call, *args, **kwargs):
    """A row whose whole sentence ends the text."""
    return refused(f"{text}….", call, *args, error=error, **kwargs)


WITHOUT_SCHEMA = {
    "undescribed": undescribed,
    "untyped": untyped,
    "half_described": half_described,
    "<lambda>": lambda: 1,
    "partial": partial(add, b=1),
}
UNFIT = {"name": "f", "parameters": {"properties": {"x": {}}}}
NO_MESSAGES = (None, {}, [1], {"messages": "guess"}, {"messages": {"role": "user"}})
NO_CALLS = {
    "parser must return": (None, "add", {"name": "add"}),
    "calls must be such as": ([3], [{"arguments": {}}]),
}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        has(TypeError, "tools must be functions,… got int", env_of, 3),
        has(TypeError, "tools must be a list of functions", ToolEnv, add, reward=says_seven),
        has(ValueError, "different names… 'add'", lambda: env_of(add, Tool(add))),
        has(TypeError, "reward must be a function, got 1.0", env_of, add, reward=1.0),
        has(TypeError, "parser must be a function, got 'json'", env_of, add, parser="json"),
        has(ValueError, "max_calls must be at least 0, got -1", env_of, add, max_calls=-1),
        has(ValueError, "tool_timeout must be positive, got 0", env_of, add, tool_timeout=0),
        has(ValueError, "timeout must be positive, got -1.0", Tool, add, timeout=-1.0),
        has(TypeError, "schema must be a mapping such as", Tool, add, {"parameters": {}}),
        has(
            ValueError,
            "'f' must be a function that takes… got f(x): missing…'q'",
            Tool,
            look,
            UNFIT,
        ),
        *(
            has(ValueError, f"the tool '{name}' must be a function with", env_of, add, tool)
            for name, tool in WITHOUT_SCHEMA.items()
        ),
        *(
            has(
                TypeError,
                "data must be a mapping with the opening messages",
                steps,
                env_of(add),
                data=data,
            )
            for data in NO_MESSAGES
        ),
        *(
            has(TypeError, text, lambda x=x: steps(env_of(add, parser=lambda _: x), says("7")))
            for text, parsed in NO_CALLS.items()
            for x in parsed
        ),
    ],
)
def test_what_cannot_work_is_refused(make, error, text):
    check_refused(make, error, text)


def test_types_are_checked_where_the_schema_has_them():
    kinds = {
        "text": ({"type": "string"}, ["x"], [1, None]),
        "real": ({"type": "number"}, [1, 1.5], ["1", True]),
        "flag": ({"type": "boolean"}, [True], [0, "true"]),
        "many": ({"type": "array"}, [[1], []], ["[1]", {}]),
        "map": ({"type": "object"}, [{}], [[]]),
        "two": ({"type": ["integer", "null"]}, [1, None], [1.5, "x"]),
        "maybe": ({"type": "integer", "nullable": True}, [1, None], ["x"]),
        "strange": ({"type": "image"}, [1, "x", True], []),
        "any": ({}, [1, None, "x"], []),
    }

    def takes(**given):
        return "taken"

    for name, (schema, fits, misfits) in kinds.items():
        tool = Tool(takes, {"name": "takes", "parameters": {"properties": {name: schema}}})
        for value in fits:
            assert answers(env_of(tool), call("takes", **{name: value})) == ["taken"]
        for value in misfits:
            (told,) = answers(env_of(tool), call("takes", **{name: value}))
            assert told.startswith(f"error: takes({name}): {name} must be of type")


# ---- copies -------------------------------------------------------------------------------------


class Costly:
    """A tool with a state that is not to be copied."""

    def __init__(self):
        self.asked = []

    def ask(self, q: str) -> str:
        """Ask.

        Args:
            q: the question.
        """
        self.asked.append(q)
        return q.upper()

    def judge(self, messages, data):
        return len(self.asked)

    def __deepcopy__(self, memo):
        raise AssertionError("this is not copied")


class Parses(ToolEnv):
    def __init__(self):
        super().__init__([add], reward=says_seven, parser=self.parse)
        self.texts = []

    def parse(self, text):
        self.texts.append(text)
        return []


def test_a_parser_works_on_each_copy():
    env = Parses()
    copied = copy.deepcopy(env)
    steps(copied, says("7"))
    assert (env.texts, copied.texts) == ([], ["7"])


def test_copies_share_their_tools_and_have_episodes_of_their_own():
    costly = Costly()
    env = env_of(costly.ask, reward=costly.judge, max_calls=1)
    first, second = copy.deepcopy(env), copy.deepcopy(env)
    for one in (first, second):
        (step,) = steps(one, says("", call("ask", q="x")))
        assert step.messages[0]["content"] == "X"
    assert costly.asked == ["x", "x"]
    assert run(first.step("done")).reward == 2
    assert run(second.step("done")).info == {"calls": 1, "errors": 0}


class Shop(ToolEnv):
    """Every episode has a stock of its own."""

    def __init__(self):
        super().__init__([self.buy, Tool(self.left, timeout=5.0)], reward=self.judge)
        self.stock = {"apple": 0}

    async def reset(self, data=None):
        self.stock["apple"] = data["apples"]
        return await super().reset(data)

    def buy(self, thing: str) -> str:
        """Buy a thing.

        Args:
            thing: its name.
        """
        self.stock[thing] -= 1
        return "bought"

    def left(self) -> int:
        """Count the apples."""
        return self.stock["apple"]

    def judge(self, messages, data):
        return self.stock["apple"]


def test_methods_of_an_environment_work_on_each_copy():
    shop = Shop()
    for apples in (3, 5):
        data = {**DATA, "apples": apples}
        asked = [says("", call("buy", thing="apple")), says("", call("left")), says("")]
        out = steps(copy.deepcopy(shop), *asked, data=data)
        assert out[1].messages[0]["content"] == str(apples - 1)
        assert out[2].reward == apples - 1
    assert shop.stock == {"apple": 0}


# ---- the user's parser --------------------------------------------------------------------------


def parse_lines(text):
    """Calls such as ``add 3 4``, one a line."""
    found = [line.split() for line in text.splitlines() if line.startswith("add")]
    return [{"name": "add", "arguments": {"a": int(a), "b": int(b)}} for _, a, b in found]


def test_a_parser_reads_the_whole_text():
    env = env_of(add, parser=parse_lines)
    assert env.whole_text
    assert not env_of(add).whole_text
    # What the collector has parsed is not used.
    first, last = steps(env, says("add 1 2\nadd 3 4", call("find")), says("7"))
    assert [m["content"] for m in first.messages] == ["3", "7"]
    assert [m["tool_call_id"] for m in first.messages] == ["call00000", "call00001"]
    assert last.reward == 1.0


def test_a_parser_may_return_a_parsed_reply():
    seen = []

    def parse(text):
        calls = [call("add", a=1, b=2)] if "add" in text else []
        return ParsedReply(text.removesuffix(" add"), "thoughts", calls)

    env = env_of(add, reward=lambda messages, data: seen.extend(messages) or 0.0, parser=parse)
    steps(env, says("so add"), says("7"))
    assert seen[2] == {**says("so", call("add", a=1, b=2)), "reasoning_content": "thoughts"}
    assert seen[-1] == {**says("7"), "reasoning_content": "thoughts"}


def test_an_error_of_the_parser_is_told():
    first, second, last = steps(
        env_of(add, parser=parse_lines), says("add one 2"), says("add 3 4"), says("7")
    )
    assert first.messages == [
        {"role": "user", "content": "error: invalid literal for int() with base 10: 'one'"}
    ]
    assert second.messages[0]["content"] == "7"
    assert (last.reward, last.info) == (1.0, {"calls": 1, "errors": 1})
