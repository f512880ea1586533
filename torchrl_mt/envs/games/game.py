"""Base class of the games, and the record of a game."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_mt.checks import refuse_misspelt_keys
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep

__all__ = ["Game", "GameEnv"]


class GameEnv(TextEnv):
    """Base class of the games, whose methods return at once.

    Args:
        seed: seed of the tasks of episodes whose data has none.
    """

    inline = True
    _data_keys: ClassVar[Sequence[str]]
    """Keys of the data that the game reads, including ``"seed"``."""

    def __init__(self, seed: int | None) -> None:
        self._rng = random.Random(seed)
        self._solution: Any = None
        """The right answer; ``None`` if no episode is under way."""

    def _read(self, data: Any) -> tuple[Mapping[str, Any], random.Random]:
        """The data, and the generator that draws a task if the data has none."""
        given = data if isinstance(data, Mapping) else {}
        refuse_misspelt_keys(given, self._data_keys)
        seed = given.get("seed")
        return given, self._rng if seed is None else random.Random(int(seed))


@dataclass(frozen=True)
class Game:
    """The record of a whole game."""

    messages: list[Message]
    """The opening message, then alternately the player's (``assistant``) and the environment's."""
    rewards: list[float]
    """Reward of every turn."""

    def say(self, env: GameEnv, content: str) -> TextStep:
        """Play a turn and record it."""
        step: Any = env.step(content)
        self.messages.extend([{"role": "assistant", "content": content}, *step.messages])
        self.rewards.append(step.reward)
        return step
