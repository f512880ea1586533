"""Answers that a data set would evaluate: no text of a model is run as a program.

Only literals reach ``eval``, and only formulas of elementary functions reach sympy's parser, which
evaluates, too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

__all__ = ["harmless"]

_UNPARSABLE = "("
"""An answer that every parser refuses."""


def harmless(answer: str | None, score: Callable[..., Any], oracle: Any) -> str | None:
    """Replace an answer that a scoring function would run as a program.

    Args:
        answer: the answer of a model.
        score: the scoring function. What it evaluates with is read from its code.
        oracle: the right answer of the data set, which may be anything.

    Returns:
        The answer, or one that no parser takes.

    Examples:
        >>> def score(answer):
        ...     return eval(answer) == [1, 2]
        >>> harmless("[1, 2]", score, "[2, 1]"), harmless("__import__('os')", score, "[2, 1]")
        ('[1, 2]', '(')
    """
    if answer is None or answer == oracle:
        return answer
    names = set(_names(score.__code__))
    if "eval" in names and not _is_literal(answer):
        return _UNPARSABLE
    if names & {"parse_expr", "sympify"} and not _is_formula(answer):
        return _UNPARSABLE
    return answer


def _names(code: CodeType) -> Iterator[str]:
    """The global names and attributes that a function uses, with its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _parsed(text: str) -> ast.expr | None:
    """The expression of a text; ``None`` if it is no Python."""
    try:
        return ast.parse(text.strip(" \t"), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _is_literal(text: str) -> bool:
    """Whether ``eval`` of a text raises ``SyntaxError`` or gives a literal."""
    parsed = _parsed(text)
    if parsed is None:
        return True
    try:
        ast.literal_eval(parsed)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_formula(text: str) -> bool:
    """Whether a text is arithmetic of numbers, variables and elementary functions."""
    parsed = _parsed(text)
    try:
        return parsed is not None and _computes(parsed, 1)
    except RecursionError:
        return False


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_FUNCTIONS = frozenset(
    [
        *("Abs", "Integer", "Rational", "abs", "erf", "exp", "ln", "log", "sqrt"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    ]
)
_MAX_POWER = 1000
"""Maximum exponent of a number: the integer 9 ** 9 ** 9 alone would stop the process for hours."""


def _computes(node: ast.expr, power: float) -> bool:
    """Whether an expression is a formula that may be raised to a power."""
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.UAdd, ast.USub)) and _computes(node.operand, power)
    if isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return is_known and not node.keywords and all(_computes(x, power) for x in node.args)
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Pow):
        return _is_power(node.left, node.right, power)
    return isinstance(node.op, _OPERATORS) and all(
        _computes(x, power) for x in (node.left, node.right)
    )


def _is_power(base: ast.expr, exponent: ast.expr, power: float) -> bool:
    """Whether a power is a formula whose numbers stay small."""
    if any(isinstance(node, ast.Name) for node in ast.walk(exponent)):
        return _computes(base, power) and _computes(exponent, 1)
    number = exponent.operand if isinstance(exponent, ast.UnaryOp) else exponent
    value = number.value if isinstance(number, ast.Constant) else None
    if not isinstance(value, (int, float)) or not _computes(exponent, 1):
        return False
    power *= max(1, abs(value))
    return power <= _MAX_POWER and _computes(base, power)
