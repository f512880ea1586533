"""The arithmetic task: grading and calls by hand, drawn expressions against what was asked for."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import check_refused, refused
from torchrl_mt.envs import Arithmetic, TextStep, calculate
from torchrl_mt.envs.games.arithmetic import play_arithmetic
from torchrl_mt.envs.games.calculator import Operation, parse

OPERATORS = ["+", "-", "*", "/", "//", "%", "**"]


def started(data=None, **settings):
    env = Arithmetic(**settings)
    env.reset({"expression": "(3 + 4) * 12"} if data is None else data)
    return env


def said(step):
    (message,) = step.messages
    return message["content"]


def shape(tree):
    """Numbers, operators and depth of an expression."""
    if not isinstance(tree, Operation):
        return [tree], [], 0
    parts = [shape(operand) for operand in tree.operands]
    numbers = [number for part in parts for number in part[0]]
    operators = [symbol for part in parts for symbol in part[1]]
    return numbers, [tree.symbol, *operators], 1 + max(part[2] for part in parts)


def test_the_prompt_poses_the_expression_and_says_how_to_write():
    (message,) = Arithmetic().reset({"expression": "(3 + 4) * 12"})
    assert message["role"] == "user"
    assert "Compute (3 + 4) * 12\n" in message["content"]
    assert "<calc>" in message["content"]
    assert "<answer>" in message["content"]
    (message,) = Arithmetic(prompt="{what} is {expression}?").reset({"expression": "1 + 1"})
    assert message["content"] == "{what} is 1 + 1?"


NO_NUMBERS = ("168/2", "84/1", "84/0", "7 * 12", "٨٤", "", "9" * 9999)
GRADED = {
    1.0: [
        *("<answer>84</answer>", "so it is <answer> +84\n</answer>.", "<answer>84.0</answer>"),
        *("<answer>7</answer> no, <answer>84</answer>", "<calc>1 + 1</calc><answer>84</answer>"),
    ],
    -0.1: ["<answer>84</answer><answer>7</answer>", "<answer>-84</answer>"],
    -0.5: [f"<answer>{wrong}</answer>" for wrong in NO_NUMBERS],
}


@pytest.mark.parametrize(
    ("response", "reward"), [(response, reward) for reward in GRADED for response in GRADED[reward]]
)
def test_an_answer_is_graded_and_ends_the_episode(response, reward):
    step = started(wrong_reward=-0.1, format_penalty=0.5, call_cost=7.0).step(response)
    assert step.reward == reward
    assert step.terminated
    assert step.messages == ()
    assert step.info["correct"] == (reward == 1.0)
    assert step.info["expected"] == "84"
    assert step.info["calls"] == 0


def test_by_default_nothing_is_paid_but_for_the_right_answer():
    for response in ["<answer>83</answer>", "<answer>x</answer>", "<calc>1</calc>", "hm"]:
        assert str(started().step(response).reward) == "0.0"


@pytest.mark.parametrize(
    ("expression", "right", "wrong"),
    [
        ("6 / 4", ["3/2", "1.5", "+1.50", "\t3/2 "], ["6/4", "15/10", "1", "-3/2"]),
        ("1 / 3", ["1/3"], ["0.333", "2/6"]),
        ("-7 // 2", ["-4", "-4.0"], ["-3", "4"]),
        ("3 - 5", ["-2"], ["2", "--2", "- 2"]),
    ],
)
def test_answers_are_exact_numbers(expression, right, wrong):
    for texts, reward in ((right, 1.0), (wrong, 0.0)):
        for text in texts:
            env = started({"expression": expression})
            assert env.step(f"<answer>{text}</answer>").reward == reward, text


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("<calc>3 + 4</calc>", "7"),
        ("I call <calc>6 / 4</calc> now", "3/2"),
        (
            "<calc>1</calc> and <calc>1 / 0</calc> and <calc>2</calc>",
            "1\nerror: division by zero\n2",
        ),
        ("<calc>three</calc>", "error: unexpected 't'"),
        ("<calc></calc>", "error: a number is missing at the end"),
        ("<calc><calc>5</calc>", "5"),
        ("<calc>2</calc><answer>84", "2"),
    ],
)
def test_calls_are_answered_in_one_message(response, content):
    step = started(tool_role="tool", call_cost=0.25).step(response)
    assert step.messages == ({"role": "tool", "content": content},)
    assert step.reward == -0.25 * (content.count("\n") + 1)
    assert not step.done


@pytest.mark.parametrize(
    "response", ["", "84", "<calc>3 + 4", "3 + 4</calc>", "<answer>84", "< answer>"]
)
def test_a_response_with_neither_gets_a_hint(response):
    step = started(tool_role="tool", format_penalty=0.5).step(response)
    assert "<calc>" in said(step)
    assert step.messages[0]["role"] == "user"
    assert (step.reward, step.done) == (-0.5, False)


def test_sixteen_calls_of_a_response_are_run():
    step = started(call_cost=1.0).step("<calc>1</calc>" * 40)
    assert said(step) == "\n".join("1" * 16)
    assert step.reward == -16.0


def test_a_call_may_be_held_to_few_operators():
    env = started(call_operators=1)
    assert "at most 1 operator" in said(env.step("<calc>(3 + 4) * 12</calc>"))
    assert said(env.step("<calc>-3 + (4)</calc>")) == "1"


def test_the_episode_is_truncated_when_its_turns_are_used_up():
    env = started(turns=2)
    assert not env.step("hm").done
    step = env.step("<calc>3 + 4</calc>")
    assert (step.done, step.truncated, said(step)) == (True, True, "7")
    assert step.info == {"correct": False, "answer": None, "expected": "84", "calls": 1}
    env = started(turns=1)
    assert env.step("<answer>84</answer>").terminated


def test_data_may_bring_its_answer():
    for answer in ("3/2", Fraction(3, 2), 1.5):
        env = started({"expression": "half of three", "answer": answer})
        assert env.step("<answer>3/2</answer>").reward == 1.0
    assert started({"expression": "1 + 1", "answer": 3}).step("<answer>2</answer>").reward == 0.0


@given(
    operands=st.integers(1, 8),
    operators=st.lists(st.sampled_from(OPERATORS), min_size=1, max_size=4),
    digits=st.integers(1, 4),
    extra=st.one_of(st.none(), st.integers(0, 2)),
    seed=st.integers(0, 10**9),
)
def test_drawn_expressions_have_the_difficulty_asked_for(operands, operators, digits, extra, seed):
    only_powers = set(operators) == {"**"}
    least = operands - 1 if only_powers else (operands - 1).bit_length()
    depth = None if extra is None else max(1, least + extra)
    try:
        env = Arithmetic(operands, operators, depth=depth, digits=digits)
    except ValueError as error:
        assert "**" in operators
        assert "must make expressions" in str(error)  # noqa: PT017
        return
    try:
        (item,) = env.data(1, seed=seed)
    except ValueError:
        assert "**" in operators
        return
    assert item["answer"] == str(calculate(item["expression"]))
    numbers, symbols, height = shape(parse(item["expression"]))
    assert len(numbers) == operands
    assert len(symbols) == operands - 1
    assert set(symbols) <= set(operators)
    assert depth is None or height <= depth
    assert all(0 <= number < 10**digits for number in numbers)
    assert item == next(iter(env.data(seed=seed)))
    env.reset(item)
    assert env.step(f"<answer>{item['answer']}</answer>").reward == 1.0


def test_drawn_expressions_vary():
    env = Arithmetic(4, OPERATORS)
    items = list(env.data(300))
    shapes = [shape(parse(item["expression"])) for item in items]
    assert {symbol for _, symbols, _ in shapes for symbol in symbols} == set(OPERATORS)
    assert {height for _, _, height in shapes} == {2, 3}
    assert len({item["expression"] for item in items}) > 290


TAGS = st.sampled_from(["<calc>", "</calc>", "<answer>", "</answer>", "3 +", "4"])


@given(st.recursive(st.text() | TAGS, lambda parts: st.lists(parts, max_size=6).map("".join)))
def test_no_response_raises(response):
    step = started(format_penalty=0.5, call_cost=0.1).step(response)
    assert isinstance(step, TextStep)
    assert step.reward <= 1.0
    assert step.done == (re.search("<answer>.*</answer>", response, re.DOTALL) is not None)


def test_a_long_response_is_read_in_linear_time():
    for part in ("<calc>", "<answer>", "</calc>", "<calc>" + "(" * 50, "<answer>1/"):
        started().step(part * 50_000)
        started().step(part * 50_000 + "</calc></answer>")


@pytest.mark.parametrize("call_operators", [None, 1])
@pytest.mark.parametrize("seed", range(8))
def test_the_player_gets_the_best_return_on_every_expression(seed, call_operators):
    operators = ["+", "-", "*", "//", "%", "**"] if call_operators else OPERATORS
    settings = {"call_operators": call_operators, "call_cost": 0.125, "tool_role": "tool"}
    game = play_arithmetic(Arithmetic(5, operators, turns=8, **settings), {"seed": seed})
    calls = 4 if call_operators else 1
    assert game.rewards == [-0.125] * calls + [1.0]
    roles = ["user"] + ["assistant", "tool"] * calls + ["assistant"]
    assert [m["role"] for m in game.messages] == roles


def test_the_player_computes_signs_itself():
    game = play_arithmetic(Arithmetic(call_operators=1), {"expression": "-(3 - 5) * -(-2)"})
    said = [m["content"] for m in game.messages[1::2]]
    assert said == ["<calc>3 - 5</calc>", "<calc>2 * 2</calc>", "<answer>4</answer>"]
    assert game.rewards[-1] == 1.0


def no_value(name, **data):
    return refused(f'data["{name}"] must have a value, got', Arithmetic().reset, data)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("operands must be at least 1, got 0", Arithmetic, operands=0),
        refused("turns must be at least 1, got 0", Arithmetic, turns=0),
        refused("digits must be at least 1", Arithmetic, digits=0),
        refused("depth must be at least 1", Arithmetic, depth=0),
        refused("call_operators must be at least 1", Arithmetic, call_operators=0),
        refused("operators must be some of", Arithmetic, operators=[]),
        refused("operators must be some of", Arithmetic, operators=["+", "^"]),
        refused("depth=2 must leave room for operands=5, got room for 4", Arithmetic, 5, depth=2),
        refused("got room for 3", Arithmetic, 4, depth=2, operators=["**"]),
        refused("call_operators must be None", Arithmetic, operators=["/"], call_operators=1),
        refused("must make expressions", Arithmetic, operands=130),
        refused("must make expressions", Arithmetic, digits=400),
        refused("prompt must contain", Arithmetic, prompt="compute"),
        no_value("expression", expression="1 +"),
        no_value("expression", expression="1 / 0"),
        no_value("answer", expression="1 + 1", answer="two"),
        no_value("answer", expression="1 + 1", answer="2/0"),
        refused(
            "must let",
            lambda: play_arithmetic(Arithmetic(5, turns=3, call_operators=1), {"seed": 0}),
        ),
    ],
)
def test_what_makes_no_task_is_refused(call, error, text):
    check_refused(call, error, text)
