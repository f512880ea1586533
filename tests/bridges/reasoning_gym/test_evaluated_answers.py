"""Answers that would be run as programs never are; answers that compute something stay as they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from torchrl_mt.bridges.reasoning_gym.evaluated_answers import harmless

UNPARSABLE = "("


def by_eval(answer):
    return [eval(part) for part in [answer]]


def by_sympy(answer):
    return (lambda text: parse_expr(text))(answer)  # noqa: F821 - it is not called


def by_comparing(answer):
    return answer == "7"


PROGRAMS = [
    "__import__('os').system('exit')",
    " \t__import__('os').system('exit')",
    "\n__import__('os').system('exit')",
    "\x0c__import__('os')",
    "open('/tmp/x', 'w')",
    "[x for x in (1, 2)]",
    "(lambda: 1)()",
    "exit()",
    "().__class__",
    "f'{1}'",
    "a if b else c",
    "(x := 3)",
    "preview(x)",
    "'a' * 9",
    "sin(x).func('y')",
    "sin('__import__')",
    "sin(x, evaluate=exit)",
    "9 ** 9 ** 9 ** 9",
    "(9 ** 900) ** 900",
    "((9 ** 99) ** 99) ** 99",
    "2 ** (3 + 10 ** 9)",
    "9 ** 1e999",
    "~1",
    "x[0]",
    "not x",
    "1 < 2",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_are_replaced(program):
    assert harmless(program, by_eval, "7") == UNPARSABLE
    assert harmless(program, by_sympy, "7") == UNPARSABLE
    assert harmless(program, by_comparing, "7") == program


FORMULAS = [
    "3*(4 + 5) - 2/7",
    "x**2 + 3*x - C",
    "-x**3/3 + sin(2*x)*exp(-x**2) + log(Abs(x))",
    "2**x",
    "(x + 1)**0.5",
    "x**-2",
    " 8 // 3 % 2",
    "sqrt(x)**1000",
]
LITERALS = ["[1, 2]", "[['a', 'b'], ('c',)]", "{'a': -1.5, 2: None}", " 7", "'so'", "True"]


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_stay(formula):
    assert harmless(formula, by_sympy, "7") == formula


@pytest.mark.parametrize("literal", LITERALS)
def test_literals_stay(literal):
    assert harmless(literal, by_eval, "7") == literal


@pytest.mark.parametrize("text", ["1 2 3\n4 5 6", "_ Q _ _", "a b", "", "x = 3", "(" * 999])
def test_what_eval_cannot_parse_stays_and_sympy_does_not_get_it(text):
    """Data sets compare such an answer before they evaluate it."""
    with pytest.raises((SyntaxError, MemoryError)):
        eval(text)
    assert harmless(text, by_eval, "7") == text
    assert harmless(text, by_sympy, "7") == UNPARSABLE


def test_factorials_hide_no_program_from_sympy():
    """Sympy takes a notation that Python does not."""
    assert harmless("exit() + 3!", by_sympy, "7") == UNPARSABLE


def test_the_right_answer_stays_whatever_it_is():
    assert harmless("ABCD", by_eval, "ABCD") == "ABCD"
    assert harmless("ABCE", by_eval, "ABCD") == UNPARSABLE
    assert harmless(None, by_eval, None) is None


@examples(few=20)
@given(text=st.text("x19+-*/()[]{},.:'\" _=^!lambda\0\n\té", max_size=30))
def test_any_text_is_judged(text):
    for score in (by_eval, by_sympy):
        assert harmless(text, score, "7") in (text, UNPARSABLE)
