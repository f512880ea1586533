"""Exact arithmetic on text that may hold anything.

Whatever it is given, it returns the exact rational value or raises :class:`CalculatorError`, in time
and memory that are bounded beforehand; nothing is ever executed. Operators bind as in Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

__all__ = ["MAX_LENGTH", "CalculatorError", "Expression", "Operation", "calculate", "parse"]

MAX_LENGTH = 256
"""How many characters an expression may have."""
_MAX_DEPTH = 32
_MAX_BITS = 1024

_SPACE = " \t\r\n"
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\*\*|//|[-+*/%()]")
_EXACT: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


class CalculatorError(ValueError):
    """The text has no value: its message says why, in words fit for the model that wrote it."""


@dataclass(frozen=True)
class Operation:
    """An operator applied to one operand (a sign) or two."""

    symbol: str
    """One of ``+ - * / // % **``."""
    operands: tuple[Expression, ...]
    """One or two."""


Expression: TypeAlias = "Fraction | Operation"
"""A parsed expression: a number, or an operation on expressions."""


def calculate(expression: str, *, max_operators: int | None = None) -> Fraction:
    """Compute the exact value of an expression.

    Numbers are decimal, with or without a fractional part; operators are ``+ - * / // % **``,
    parentheses and signs. ``/`` is exact, ``//`` and ``%`` round down, exponents are integers.

    Args:
        expression: at most ``MAX_LENGTH`` characters, nested at most 32 deep.
        max_operators: how many operators with two operands it may have; any number if ``None``.

    Returns:
        The value: ``str()`` of it is an integer or a fraction in lowest terms.

    Raises:
        CalculatorError: if the text is no such expression, divides by zero, has too many operators,
            or a value on the way would have more than 1024 bits.

    Examples:
        >>> str(calculate("(3 + 4) * 12")), str(calculate("6 / 4"))
        ('84', '3/2')
        >>> calculate("1 / (2 - 2)")
        Traceback (most recent call last):
        torchrl_mt.envs.calculator.CalculatorError: division by zero
    """
    tree = parse(expression)
    if max_operators is not None and _num_operators(tree) > max_operators:
        raise CalculatorError(f"at most {max_operators} operator(s) in a call")
    return _value(tree)


def parse(expression: str) -> Expression:
    """Parse an expression without computing it.

    Args:
        expression: see :func:`calculate`.

    Returns:
        The number or operation that it stands for; parentheses are gone.

    Raises:
        CalculatorError: if the text is no expression.

    Examples:
        >>> parse("1 - 2 * 3").symbol
        '-'
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"expression too long (at most {MAX_LENGTH} characters)")
    return _Parser(_tokens(expression)).whole()


class _Parser:
    """Recursive descent: one method a precedence, loosest first."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Expression:
        """The expression that all tokens make."""
        tree = self._sum()
        if self._next() is not None:
            raise CalculatorError(f"unexpected {self._next()!r}")
        return tree

    def _sum(self) -> Expression:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Expression:
        return self._chain(("*", "/", "//", "%"), self._signed)

    def _chain(self, symbols: tuple[str, ...], part: Callable[[], Expression]) -> Expression:
        """Operands of one precedence, from left to right."""
        tree = part()
        while self._next() in symbols:
            tree = Operation(self._take(), (tree, part()))
        return tree

    def _signed(self) -> Expression:
        """A power with any number of signs before it: ``-2 ** 2`` is ``-(2 ** 2)``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CalculatorError(f"nested too deep (at most {_MAX_DEPTH})")
        if self._next() in ("+", "-"):
            tree: Expression = Operation(self._take(), (self._signed(),))
        else:
            tree = self._atom()
            if self._next() == "**":
                tree = Operation(self._take(), (tree, self._signed()))
        self._depth -= 1
        return tree

    def _atom(self) -> Expression:
        """A number or a parenthesis."""
        token = self._next()
        if token == "(":
            self._take()
            tree = self._sum()
            if self._next() != ")":
                raise CalculatorError("missing ')'")
            self._take()
            return tree
        if token is None:
            raise CalculatorError("a number is missing at the end")
        if not token[0].isdigit():
            raise CalculatorError(f"unexpected {token!r}")
        return Fraction(self._take())

    def _next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]


def _tokens(expression: str) -> list[str]:
    """Numbers, operators and parentheses."""
    tokens, at = [], 0
    while at < len(expression):
        if expression[at] in _SPACE:
            at += 1
        elif (match := _TOKEN.match(expression, at)) is not None:
            tokens.append(match.group())
            at = match.end()
        else:
            raise CalculatorError(f"unexpected {expression[at]!r}")
    return tokens


def _num_operators(tree: Expression) -> int:
    """Operations on two operands."""
    if isinstance(tree, Fraction):
        return 0
    return len(tree.operands) - 1 + sum(map(_num_operators, tree.operands))


def _value(tree: Expression) -> Fraction:
    """The value of a tree; no number on the way outgrows the limit."""
    if isinstance(tree, Fraction):
        return _bounded(tree)
    values = [_value(operand) for operand in tree.operands]
    if len(values) == 1:
        return -values[0] if tree.symbol == "-" else values[0]
    try:
        if tree.symbol == "**":
            return _bounded(_power(*values))
        return _bounded(Fraction(_EXACT[tree.symbol](*values)))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """A power of integer exponent; refused before it is computed if it would be too large."""
    if exponent.denominator != 1:
        raise CalculatorError("exponents must be integers")
    # A number of b bits is at least 2 ** (b - 1), so its n-th power has at least n * (b - 1) bits.
    bits = max(_bits(base) - 1, 0) * abs(exponent.numerator)
    if bits > _MAX_BITS:
        raise CalculatorError("number too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    """The value, unless it is too large."""
    if _bits(value) > _MAX_BITS:
        raise CalculatorError("number too large")
    return value


def _bits(value: Fraction) -> int:
    """Bits of the longer of numerator and denominator."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())
