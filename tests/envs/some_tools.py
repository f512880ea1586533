"""Tools, and environments of tools that are found by name and in other processes."""

from __future__ import annotations

import os

from torchrl_mt.envs import ToolEnv


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


async def look(q: str, n: int = 1) -> dict:
    """Look something up.

    Args:
        q: what to look up.
        n: how many results.
    """
    return {"found": [q] * n}


def whereabouts() -> int:
    """Tell the process."""
    return os.getpid()


def says_seven(messages, data) -> float:
    """The reward of a last message that is the data's answer, 7 if it has none."""
    return float(messages[-1]["content"] == data.get("answer", "7"))


class Sums(ToolEnv):
    """An environment of tools as a class."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__([add, look, whereabouts], reward=says_seven, max_calls=max_calls)
