"""A guessing game: find a hidden number from the hints "higher" and "lower".

Its best expected return is known in closed form (:func:`optimal_return`), to check training against.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torchrl_mt.checks import check_at_least
from torchrl_mt.envs.games.game import Game, GameEnv
from torchrl_mt.envs.text_env import Message, TextStep

__all__ = ["GuessNumber", "optimal_return", "play_guess_number"]

_DECIMAL = re.compile(r"[1-9][0-9]{0,17}")


class GuessNumber(GameEnv):
    """Find a hidden number in ``1..numbers`` within ``turns`` guesses.

    The reply to a guess is ``"higher"`` (the hidden number is higher), ``"lower"`` or ``"correct"``. The
    reply to anything but a bare number in range is ``"invalid"``; it uses up the turn, too. The reward
    is 1 for the right guess and 0 otherwise. The episode terminates when the number is found or the
    guesses are used up. Then ``info`` has ``found`` (a bool) and the number of ``guesses``.

    The episode's data sets the hidden number: ``{"number": 7}``, or ``{"seed": 3}`` to draw it from that
    seed. So episodes that share data share their number. Other data, or none, draws a new number.

    Args:
        numbers: the hidden number is in ``1..numbers``.
        turns: maximum number of guesses in an episode.
        prompt: the opening message, or a list of messages, such as rules, a game as an example and the
            question; ``{numbers}`` is filled in each.
        seed: seed of the numbers of episodes whose data has none.

    Raises:
        TypeError: if ``prompt`` is neither text nor messages of text.
        ValueError: if ``numbers`` or ``turns`` is below 1, or ``prompt`` has braces but ``{numbers}``.

    Examples:
        >>> env = GuessNumber(numbers=16, turns=5)
        >>> env.reset({"number": 7})
        [{'role': 'user', 'content': 'guess 1 to 16'}]
        >>> env.step("8").messages
        ({'role': 'user', 'content': 'lower'},)
        >>> step = env.step("7")
        >>> step.reward, step.terminated
        (1.0, True)
    """

    _data_keys = ("number", "seed")

    def __init__(
        self,
        numbers: int = 16,
        turns: int = 5,
        *,
        prompt: str | Sequence[Message] = "guess 1 to {numbers}",
        seed: int | None = None,
    ) -> None:
        _require_game(numbers, turns)
        self._opening = _filled_in(prompt, numbers)
        self.numbers = numbers
        self.turns = turns
        super().__init__(seed)
        self._guesses = 0

    def reset(self, data: Mapping[str, Any] | None = None) -> list[Message]:
        """Hide a number.

        Raises:
            ValueError: if ``data["number"]`` is not in ``1..numbers``, or a key of the data is misspelt.
        """
        self._solution = self._number(data)
        self._guesses = 0
        return [dict(message) for message in self._opening]

    def step(self, response: str) -> TextStep:
        """Reply to a guess: a decimal number, with or without white space around it."""
        self._under_way(self._solution)
        self._guesses += 1
        answer = self._answer(response)
        found = answer == "correct"
        done = found or self._guesses == self.turns
        if done:
            self._solution = None
        info = {"found": found, "guesses": self._guesses} if done else None
        return TextStep((_user(answer),), reward=float(found), done=done, info=info)

    @staticmethod
    def data(
        size: int | None = None, *, numbers: int = 16, seed: int = 0
    ) -> Iterator[dict[str, int]]:
        """Draw episode data with uniformly distributed hidden numbers.

        Args:
            size: number of items; infinite if ``None``.
            numbers: numbers are drawn from ``1..numbers``.
            seed: the same seed draws the same items.

        Returns:
            An iterator over ``{"number": int}``.

        Examples:
            >>> list(GuessNumber.data(3, numbers=16, seed=0))
            [{'number': 13}, {'number': 14}, {'number': 2}]
        """
        _require_game(numbers, 1)
        rng = random.Random(seed)
        return islice(iter(lambda: {"number": rng.randint(1, numbers)}, None), size)

    def _number(self, data: Mapping[str, Any] | None) -> int:
        """The data's number, or a new one."""
        given, rng = self._read(data)
        if given.get("number") is None:
            return rng.randint(1, self.numbers)
        number = int(given["number"])
        if not 1 <= number <= self.numbers:
            raise ValueError(
                f'data["number"] must lie in 1..{self.numbers}, got {number}: '
                f"draw the data with numbers={self.numbers}."
            )
        return number

    def _answer(self, response: str) -> str:
        text = response.strip()
        if not _DECIMAL.fullmatch(text) or int(text) > self.numbers:
            return "invalid"
        guess = int(text)
        if guess == self._solution:
            return "correct"
        return "higher" if self._solution > guess else "lower"


def play_guess_number(
    player: Callable[[int, int], int], number: int, *, numbers: int = 16, turns: int = 5
) -> Game:
    """Play one game with a player that follows the hints.

    The player ``random.Random(seed).randint`` guesses uniformly among the remaining numbers. The best
    player is bisection, ``lambda low, high: (low + high) // 2``.

    Args:
        player: called with the lowest and highest remaining number; returns its guess.
        number: the hidden number, in ``1..numbers``.
        numbers: size of the range.
        turns: maximum number of guesses.

    Raises:
        ValueError: if ``number`` is out of range, or the hints exclude a guess.

    Examples:
        >>> game = play_guess_number(random.Random(0).randint, number=7)
        >>> [message["content"] for message in game.messages]
        ['guess 1 to 16', '13', 'lower', '7', 'correct']
        >>> game.rewards
        [0.0, 1.0]
    """
    env = GuessNumber(numbers, turns)
    game = Game(env.reset({"number": number}), [])
    low, high = 1, numbers
    while True:
        guess = player(low, high)
        if not low <= guess <= high:
            raise ValueError(f"player must guess a number in {low}..{high}, got {guess}.")
        if game.say(env, str(guess)).done:
            return game
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)


def optimal_return(numbers: int, turns: int, gamma: float) -> float:
    """Compute the best expected discounted return in :class:`GuessNumber`.

    A strategy is a binary search tree, in which a number at depth ``k`` (from 1) returns
    ``gamma ** (k - 1)``. Depth ``k`` has at most ``2 ** (k - 1)`` numbers, and bisection fills every
    depth before the next, so it is optimal.

    Args:
        numbers: size of the range; all numbers are equally likely.
        turns: maximum number of guesses.
        gamma: discount per turn, in ``[0, 1]``.

    Examples:
        >>> round(optimal_return(numbers=16, turns=5, gamma=0.9), 3)
        0.783
    """
    _require_game(numbers, turns)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
    total, left = 0.0, numbers
    for depth in range(turns):
        found = min(2**depth, left)
        total += found * gamma**depth
        left -= found
        if not left:
            break
    return total / numbers


def _require_game(numbers: int, turns: int) -> None:
    check_at_least("numbers", numbers)
    check_at_least("turns", turns)


def _filled_in(prompt: str | Sequence[Message], numbers: int) -> list[Message]:
    """The opening messages."""
    try:
        messages = [_user(prompt)] if isinstance(prompt, str) else [{**each} for each in prompt]
        if not messages or any({type(m["role"]), type(m["content"])} != {str} for m in messages):
            raise TypeError
    except (TypeError, KeyError):
        raise TypeError(
            "prompt must be text or a list of messages {'role': ..., 'content': 'text'}, got "
            f"{str(prompt)[:80]!r}."
        ) from None
    try:
        return [{**m, "content": m["content"].format(numbers=numbers)} for m in messages]
    except (AttributeError, LookupError, ValueError) as error:
        raise ValueError(
            f"prompt must have no braces but {{numbers}}; write others twice: {error!r} in "
            f"{str(prompt)[:80]!r}."
        ) from error


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
