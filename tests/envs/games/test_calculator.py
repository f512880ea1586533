"""The calculator against Python's own operators on fractions, and on text of every kind."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.envs.games.calculator import MAX_LENGTH, CalculatorError, calculate


def numbers():
    whole = st.integers(0, 999).map(str)
    return st.one_of(whole, st.tuples(whole, whole).map(".".join))


def grow(parts):
    space = st.sampled_from(["", " ", "  "])
    symbol = st.sampled_from(["+", "-", "*", "/", "//", "%"])
    return st.one_of(
        st.tuples(parts, space, symbol, space, parts).map("".join),
        st.tuples(parts, space, st.just("**"), space, st.sampled_from("0123")).map("".join),
        parts.map(lambda part: f"({part})"),
        parts.map(lambda part: f"-{part}"),
        parts.map(lambda part: f"+ {part}"),
    )


def python_value(expression):
    """What Python makes of the expression once its numbers are fractions."""
    source = re.sub(r"[0-9]+(?:\.[0-9]+)?", lambda m: f"F('{m.group()}')", expression)
    return Fraction(eval(source, {"F": Fraction}))


@given(st.recursive(numbers(), grow, max_leaves=8))
def test_the_value_is_pythons_on_fractions(expression):
    if len(expression) > MAX_LENGTH:
        return
    try:
        expected = python_value(expression)
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match=r"division by zero|too large"):
            calculate(expression)
        return
    except (OverflowError, TypeError):
        return
    try:
        assert calculate(expression) == expected
    except CalculatorError as error:
        # Refused values are large, or come of one that is.
        assert "too large" in str(error) or "integers" in str(error)  # noqa: PT017


BY_HAND = (
    "-2 ** 2 = -4; 2 ** 3 ** 2 = 512; 2 ** -1 = 1/2; (-8) ** 3 = -512; 2--3 = 5; 10 - 4 - 3 = 3; "
    "12 / 4 / 3 = 1; -7 // 2 = -4; -7 % 3 = 2; 7.5 % 2 = 3/2; 0.1 + 0.2 = 3/10; \t((7))\n = 7; "
    "1 ** 99999999999999999999 = 1; (0 - 1) ** 99999999999999999999 = -1; 0 ** 0 = 1; 007 = 7"
)


@pytest.mark.parametrize(
    ("expression", "value"), [each.split(" = ") for each in BY_HAND.split("; ")]
)
def test_by_hand(expression, value):
    assert calculate(expression) == Fraction(value)


REASONS = {
    "missing at the end": ["", "3 +"],
    "missing ')'": ["(3"],
    "unexpected '*'": ["* 3"],
    "unexpected '4'": ["3 4"],
    "unexpected ')'": ["3)", "()"],
    "unexpected 'x'": ["x + 1"],
    "unexpected '_'": ["1_000", "__import__('os')"],
    "unexpected 'e'": ["1e5"],
    "unexpected '٧'": ["٧ + 1"],
    "unexpected '.'": [".5"],
    "unexpected '^'": ["2 ^ 3"],
    "division by zero": ["1 / 0", "1 // (2 - 2)", "1 % 0", "0 ** -1"],
    "integers": ["2 ** 0.5"],
    "too large": ["9 ** 9 ** 9", "2 ** -99999"],
    "too long": ["9" * MAX_LENGTH + "9"],
    "too deep": ["(" * 40 + "1" + ")" * 40, "-" * 100 + "1", "2 ** " * 40 + "1"],
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_has_no_value_says_why(reason):
    for expression in REASONS[reason]:
        with pytest.raises(CalculatorError, match=re.escape(reason)):
            calculate(expression)


PIECES = ["(", ")", "**", "9" * 30, "//", "-", "0", " ", "%"]


@given(
    st.text()
    | st.text(alphabet="0123456789.+-*/%() ")
    | st.lists(st.sampled_from(PIECES)).map("".join)
)
def test_any_text_has_a_value_or_an_error(text):
    try:
        value = calculate(text)
    except CalculatorError as error:
        assert str(error)  # noqa: PT017
    else:
        assert isinstance(value, Fraction)
        assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= 1024


AGES = ["*".join(["9" * 9] * 25), "+".join("1" * 128), "(9**300)%" * 25 + "7"]
AGES += ["7**363", "7**364", "3**(2**1000)", "1**(2**1000)", "(2**1000)//(3**600)*(7**300)"]


@pytest.mark.parametrize("expression", AGES)
def test_what_would_take_ages_is_refused(expression):
    assert len(expression) <= MAX_LENGTH
    try:
        assert abs(calculate(expression)) < 2**1024
    except CalculatorError as error:
        assert "too large" in str(error)  # noqa: PT017


def test_operators_are_counted():
    assert calculate("3 + 4", max_operators=1) == 7
    assert calculate("-(-3)", max_operators=0) == 3
    with pytest.raises(CalculatorError, match="at most 1 operator"):
        calculate("3 + 4 * 5", max_operators=1)
