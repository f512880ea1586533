"""Arithmetic with a calculator: a minimal task of tool use over several turns.

No response raises an error. The best return is 1 on every expression; :func:`play_arithmetic` reaches it
with the calculator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

from torchrl_mt.checks import check_at_least
from torchrl_mt.envs.games.calculator import (
    CalculatorError,
    Expression,
    Operation,
    calculate,
    num_operators,
    parse,
)
from torchrl_mt.envs.games.game import Game, GameEnv
from torchrl_mt.envs.text_env import Message, TextStep

__all__ = ["Arithmetic", "play_arithmetic"]

_PROMPT = (
    "Compute {expression}\n"
    "To use the calculator, write for example <calc>3 + 4</calc> and wait for its result. "
    "To finish, write the value, for example <answer>7</answer>."
)
_HINT = "error: write <calc>...</calc> or <answer>...</answer>"
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**")
_ANSWER = re.compile(r"([+-]?[0-9]{1,400})(?:/([0-9]{1,400})|\.[0-9]{1,400})?")
_MAX_CALLS = 16
_MAX_DRAWS = 1000


class Arithmetic(GameEnv):
    """Compute the value of an expression, with a calculator at hand.

    A response may contain ``<calc>3 + 4</calc>``, which calls the calculator
    (:func:`~torchrl_mt.envs.calculate`), at most 16 times a response: one message answers with a line
    for each call, the value or ``error:`` and the reason. ``<answer>84</answer>`` ends the episode. The
    reward is 1 for the right value (an integer, a decimal number, or a fraction in lowest terms such as
    ``3/2``), else ``wrong_reward``. The last of several answers counts, and calls beside it are not run.
    Without either, the reply is a hint. An episode without an answer after ``turns`` responses is
    truncated. At its end, ``info`` has ``correct``, the ``answer`` as written (or ``None``), the
    ``expected`` value and the number of ``calls``.

    The episode's data sets the expression: ``{"expression": "(3 + 4) * 12"}``, or any text with its
    ``"answer"`` (a number, or text such as ``"3/2"``), or ``{"seed": 3}`` to draw it from that seed.
    Other data, or none, draws a new one.

    Args:
        operands: number of operands in an expression.
        operators: operators to draw from, out of ``+ - * / // % **``; exponents are drawn from 0 to 3.
        depth: maximum nesting (1: a single operation), at least ``ceil(log2(operands))``; ``None``: any.
        digits: operands are drawn from 1 to ``10 ** digits - 1``.
        turns: maximum number of responses in an episode.
        call_operators: maximum operators in a call; any if ``None``. At 1, every operation needs a call.
        tool_role: role of the calculator's messages; ``"tool"`` for chat templates that know it.
        wrong_reward: reward of a well-formed wrong answer.
        format_penalty: subtracted for a response without a call or a well-formed answer.
        call_cost: subtracted from the reward for every call.
        prompt: the opening message; ``{expression}`` is filled in.
        seed: seed of the expressions of episodes whose data has none.

    Raises:
        ValueError: if a number is below 1, an operator is unknown, ``prompt`` lacks ``{expression}``, or
            arguments do not fit (``depth`` and ``operands``; ``call_operators`` and ``"/"``).

    Examples:
        >>> env = Arithmetic(tool_role="tool")
        >>> opening = env.reset({"expression": "(3 + 4) * 12"})
        >>> env.step("First <calc>3 + 4</calc>").messages
        ({'role': 'tool', 'content': '7'},)
        >>> env.step("<answer>84</answer>").reward
        1.0
    """

    _data_keys = ("expression", "answer", "seed")

    def __init__(
        self,
        operands: int = 3,
        operators: Sequence[str] = ("+", "-", "*"),
        *,
        depth: int | None = None,
        digits: int = 2,
        turns: int = 4,
        call_operators: int | None = None,
        tool_role: str = "user",
        wrong_reward: float = 0.0,
        format_penalty: float = 0.0,
        call_cost: float = 0.0,
        prompt: str = _PROMPT,
        seed: int | None = None,
    ) -> None:
        self.operands = operands
        self.operators = tuple(operators)
        self.depth = depth
        self.digits = digits
        self.turns = turns
        self.call_operators = call_operators
        self.tool_role = tool_role
        self.wrong_reward = wrong_reward
        self.format_penalty = format_penalty
        self.call_cost = call_cost
        self.prompt = prompt
        self._require_task()
        self._draw(random.Random(0))
        super().__init__(seed)
        self._turn = self._calls = 0

    def _require_task(self) -> None:
        for name in ("operands", "depth", "digits", "turns", "call_operators"):
            number = getattr(self, name)
            if number is not None:
                check_at_least(name, number)
        if not self.operators or any(symbol not in _OPERATORS for symbol in self.operators):
            raise ValueError(f"operators must be some of {_OPERATORS}, got {self.operators!r}.")
        if self.depth is not None:
            only_powers = set(self.operators) == {"**"}
            room = self.depth + 1 if only_powers else 2**self.depth
            if self.operands > room:
                also = ": with '**' alone, operations nest on one side only" if only_powers else ""
                raise ValueError(
                    f"depth={self.depth} must leave room for operands={self.operands}, got room for "
                    f"{room}{also}."
                )
        if self.call_operators is not None and "/" in self.operators:
            raise ValueError(
                "call_operators must be None where operators has '/', since a fraction is written with "
                f"an operator, got {self.call_operators}: use '//' and '%'."
            )
        if "{expression}" not in self.prompt:
            raise ValueError(f"prompt must contain '{{expression}}', got {self.prompt[:80]!r}.")

    def reset(self, data: Mapping[str, Any] | None = None) -> list[Message]:
        """Pose an expression.

        Raises:
            ValueError: if ``data["expression"]`` or ``data["answer"]`` cannot be computed, an answer
                comes without an expression, or a key of the data is misspelt.
        """
        expression, self._solution = self._task(data)
        self._turn = self._calls = 0
        return [{"role": "user", "content": self.prompt.replace("{expression}", expression)}]

    def step(self, response: str) -> TextStep:
        """Grade an answer or run the calculator."""
        self._under_way(self._solution)
        self._turn += 1
        answers = _tagged(response, "answer")
        if answers:
            value = _answer(answers[-1])
            if value is None:
                reward = 0.0 - self.format_penalty
            else:
                reward = 1.0 if value == self._solution else self.wrong_reward
            return self._end((), reward, answers[-1].strip(), correct=value == self._solution)
        calls = _tagged(response, "calc")[:_MAX_CALLS]
        self._calls += len(calls)
        if calls:
            content = "\n".join(self._result(call) for call in calls)
            message = {"role": self.tool_role, "content": content}
            reward = 0.0 - self.call_cost * len(calls)
        else:
            message = {"role": "user", "content": _HINT}
            reward = 0.0 - self.format_penalty
        if self._turn == self.turns:
            return self._end((message,), reward, None, correct=False)
        return TextStep((message,), reward=reward)

    def data(self, size: int | None = None, *, seed: int = 0) -> Iterator[dict[str, str]]:
        """Draw episode data of this difficulty.

        Args:
            size: number of items; infinite if ``None``.
            seed: the same seed draws the same items.

        Returns:
            An iterator over ``{"expression": str, "answer": str}``.

        Examples:
            >>> list(Arithmetic(operands=2, digits=1).data(2, seed=0))
            [{'expression': '1 - 5', 'answer': '-4'}, {'expression': '7 * 5', 'answer': '35'}]
        """
        rng = random.Random(seed)
        drawn = islice(iter(lambda: self._draw(rng), None), size)
        return ({"expression": expression, "answer": str(value)} for expression, value in drawn)

    def _end(
        self, messages: Sequence[Message], reward: float, answer: str | None, *, correct: bool
    ) -> TextStep:
        """The episode's last step, truncated if there is no answer."""
        info = {
            "correct": correct,
            "answer": answer,
            "expected": str(self._solution),
            "calls": self._calls,
        }
        self._solution = None
        return TextStep(messages, reward=reward, done=True, truncated=answer is None, info=info)

    def _result(self, call: str) -> str:
        """The calculator's reply to a call."""
        try:
            return str(calculate(call, max_operators=self.call_operators))
        except CalculatorError as error:
            return f"error: {error}"

    def _task(self, data: Mapping[str, Any] | None) -> tuple[str, Fraction]:
        """The data's expression, or a new one, and its value."""
        given, rng = self._read(data)
        expression, answer = given.get("expression"), given.get("answer")
        if expression is None and answer is not None:
            raise ValueError(
                'data["answer"] must come with data["expression"], which it answers, got '
                f"{sorted(map(str, given))}."
            )
        if expression is None:
            return self._draw(rng)
        try:
            if answer is None:
                return str(expression), calculate(str(expression))
            return str(expression), Fraction(str(answer))
        except (ValueError, ZeroDivisionError) as error:
            name, value = ("expression", expression) if answer is None else ("answer", answer)
            raise ValueError(
                f'data["{name}"] must have a value, got {str(value)[:80]!r}: {error}.'
            ) from None

    def _draw(self, rng: random.Random) -> tuple[str, Fraction]:
        """Draw an expression that the calculator can compute."""
        for _ in range(_MAX_DRAWS):
            depth = self.operands if self.depth is None else self.depth
            expression = self._draw_tree(rng, self.operands, depth)
            try:
                return expression, calculate(expression)
            except CalculatorError:
                continue
        raise ValueError(
            f"operands={self.operands}, operators={self.operators} and digits={self.digits} must make "
            f"expressions that the calculator can compute, got none in {_MAX_DRAWS} draws: lower them."
        )

    def _draw_tree(self, rng: random.Random, operands: int, depth: int) -> str:
        """Draw an expression; subexpressions are in parentheses."""
        if operands == 1:
            return str(rng.randint(1, 10**self.digits - 1))
        room = 2 ** (depth - 1)
        # A power's exponent is one small number, so its base takes the other operands.
        symbol = rng.choice([s for s in self.operators if s != "**" or operands - 1 <= room])
        if symbol == "**":
            left = self._draw_tree(rng, operands - 1, depth - 1)
            return f"{_nested(left)} ** {rng.randint(0, 3)}"
        size = rng.randint(max(1, operands - room), min(operands - 1, room))
        sides = (self._draw_tree(rng, part, depth - 1) for part in (size, operands - size))
        return f" {symbol} ".join(map(_nested, sides))


def play_arithmetic(env: Arithmetic, data: Mapping[str, Any] | None = None) -> Game:
    """Play one episode optimally with the calculator.

    The player computes the whole expression in one call if ``call_operators`` allows it, otherwise one
    operation per call, and then answers. It needs a turn per call and one for the answer, and returns
    ``1 - call_cost * calls``.

    Args:
        env: the environment.
        data: passed to ``env.reset``.

    Raises:
        ValueError: if the expression cannot be read from the prompt, or ``env.turns`` is too small.

    Examples:
        >>> game = play_arithmetic(Arithmetic(call_operators=1), {"expression": "(3 + 4) * 12"})
        >>> [m["content"] for m in game.messages[1:]]
        ['<calc>3 + 4</calc>', '7', '<calc>7 * 12</calc>', '84', '<answer>84</answer>']
        >>> game.rewards
        [0.0, 0.0, 1.0]
    """
    game = Game(env.reset(data), [])
    before, _, after = env.prompt.partition("{expression}")
    posed = game.messages[0]["content"]
    expression = posed[len(before) : len(posed) - len(after)]

    def ask(call: str) -> str:
        step = game.say(env, f"<calc>{call}</calc>")
        result = str(step.messages[0]["content"])
        if step.done or result.startswith("error"):
            raise ValueError(f"env must let {call!r} be computed and answered, got {result!r}.")
        return result

    def value(tree: Expression) -> str:
        """Compute a tree, one operation per call."""
        if not isinstance(tree, Operation):
            return str(tree)
        values = [value(operand) for operand in tree.operands]
        if len(values) == 1:
            return str(calculate(tree.symbol + _signed(values[0])))
        return ask(f" {tree.symbol} ".join(map(_signed, values)))

    tree = parse(expression)
    whole = env.call_operators is None or num_operators(tree) <= env.call_operators
    game.say(env, f"<answer>{ask(expression) if whole else value(tree)}</answer>")
    return game


def _tagged(text: str, tag: str) -> list[str]:
    """The texts between ``<tag>`` and ``</tag>``, in linear time."""
    pieces = (piece.partition(f"</{tag}>") for piece in text.split(f"<{tag}>")[1:])
    return [body for body, closing, _ in pieces if closing]


def _answer(text: str) -> Fraction | None:
    """Parse an answer's number; ``None`` if it is none.

    Fractions must be in lowest terms, or the expression "6 / 4" would be its own answer.
    """
    match = _ANSWER.fullmatch(text.strip())
    if match is None:
        return None
    denominator = match.group(2)
    if denominator is None:
        return Fraction(match.group())
    if int(denominator) < 2:
        return None
    value = Fraction(int(match.group(1)), int(denominator))
    return value if value.denominator == int(denominator) else None


def _nested(expression: str) -> str:
    """An expression as an operand, in parentheses if it is an operation."""
    return f"({expression})" if " " in expression else expression


def _signed(number: str) -> str:
    """A number as an operand, in parentheses if it has a sign or is a fraction."""
    return number if number.isdigit() else f"({number})"
