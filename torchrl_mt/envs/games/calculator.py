"""An exact calculator for untrusted text.

For any text, it returns the exact rational value or raises :class:`CalculatorError`. Time and memory are
bounded, and no code is executed. Operator precedence is as in Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

__all__ = [
    "MAX_LENGTH",
    "CalculatorError",
    "Expression",
    "Operation",
    "calculate",
    "num_operators",
    "parse",
]

MAX_LENGTH = 256
"""Maximum length of an expression, in characters."""
_MAX_DEPTH = 32
_MAX_BITS = 1024

_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\*\*|//|[^ \t\r\n]")
_SYMBOLS = {"+", "-", "*", "/", "//", "%", "**", "(", ")"}
_COMPUTE: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul},
    **{"/": operator.truediv, "//": operator.floordiv, "%": operator.mod},
}


class CalculatorError(ValueError):
    """The text cannot be computed; the message gives the reason to the model that wrote it."""


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
        max_operators: maximum number of binary operators; any number if ``None``.

    Returns:
        The value: ``str()`` of it is an integer or a fraction in lowest terms.

    Raises:
        CalculatorError: if the text is no such expression, divides by zero, has too many operators, or
            has an intermediate value of more than 1024 bits.

    Examples:
        >>> str(calculate("(3 + 4) * 12")), str(calculate("6 / 4"))
        ('84', '3/2')
        >>> calculate("1 / (2 - 2)")
        Traceback (most recent call last):
        torchrl_mt.envs.games.calculator.CalculatorError: division by zero
    """
    tree = parse(expression)
    if max_operators is not None and num_operators(tree) > max_operators:
        raise CalculatorError(f"at most {max_operators} operator(s) in a call")
    return _value(tree)


def parse(expression: str) -> Expression:
    """Parse an expression without computing it.

    Raises:
        CalculatorError: if the text is no expression.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"expression too long (at most {MAX_LENGTH} characters)")
    return _Parser(_tokens(expression)).whole()


class _Parser:
    """Recursive descent parser with one method per precedence, lowest first."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self._depth = 0

    def whole(self) -> Expression:
        """Parse all tokens."""
        tree = self._sum()
        if self._tokens:
            raise CalculatorError(f"unexpected {self._tokens[-1]!r}")
        return tree

    def _sum(self) -> Expression:
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Expression:
        return self._chain(("*", "/", "//", "%"), self._signed)

    def _chain(self, symbols: tuple[str, ...], part: Callable[[], Expression]) -> Expression:
        """Parse operators of one precedence, which associate to the left."""
        tree = part()
        while symbol := self._take(*symbols):
            tree = Operation(symbol, (tree, part()))
        return tree

    def _signed(self) -> Expression:
        """Parse a power after any number of signs: ``-2 ** 2`` is ``-(2 ** 2)``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CalculatorError(f"nested too deep (at most {_MAX_DEPTH})")
        if sign := self._take("+", "-"):
            tree: Expression = Operation(sign, (self._signed(),))
        else:
            tree = self._atom()
            if self._take("**"):
                tree = Operation("**", (tree, self._signed()))
        self._depth -= 1
        return tree

    def _atom(self) -> Expression:
        if self._take("("):
            tree = self._sum()
            if not self._take(")"):
                raise CalculatorError("missing ')'")
            return tree
        if not self._tokens:
            raise CalculatorError("a number is missing at the end")
        if not self._tokens[-1][0].isdigit():
            raise CalculatorError(f"unexpected {self._tokens[-1]!r}")
        return Fraction(self._tokens.pop())

    def _take(self, *symbols: str) -> str | None:
        """Take the next token if it is one of these; else ``None``."""
        return self._tokens.pop() if self._tokens and self._tokens[-1] in symbols else None


def _tokens(expression: str) -> list[str]:
    """Split text into numbers, operators and parentheses."""
    tokens: list[str] = _TOKEN.findall(expression)
    for token in tokens:
        if not (token in _SYMBOLS or re.fullmatch("[0-9].*", token)):
            raise CalculatorError(f"unexpected {token!r}")
    return tokens


def num_operators(tree: Expression) -> int:
    """Number of binary operators in an expression."""
    if isinstance(tree, Fraction):
        return 0
    return len(tree.operands) - 1 + sum(map(num_operators, tree.operands))


def _value(tree: Expression) -> Fraction:
    """Compute a tree; no intermediate value exceeds the limit."""
    if isinstance(tree, Fraction):
        return _bounded(tree)
    values = [_value(operand) for operand in tree.operands]
    if len(values) == 1:
        return -values[0] if tree.symbol == "-" else values[0]
    try:
        if tree.symbol == "**":
            return _bounded(_power(*values))
        return _bounded(Fraction(_COMPUTE[tree.symbol](*values)))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute a power with an integer exponent; one that would be too large is not computed."""
    if exponent.denominator != 1:
        raise CalculatorError("exponents must be integers")
    # A number of b bits is at least 2 ** (b - 1), so its n-th power has at least n * (b - 1) bits.
    bits = max(_bits(base) - 1, 0) * abs(exponent.numerator)
    if bits > _MAX_BITS:
        raise CalculatorError("number too large")
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    """Return the value, or raise an error if it is too large."""
    if _bits(value) > _MAX_BITS:
        raise CalculatorError("number too large")
    return value


def _bits(value: Fraction) -> int:
    """Number of bits of the numerator or denominator, whichever is longer."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())
