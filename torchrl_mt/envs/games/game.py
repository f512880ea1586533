"""What the games share: a task from the data or drawn, and the record of a game."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchrl_mt.envs.games.misspelt_keys import refuse_misspelt_keys
from torchrl_mt.envs.text_env import Message, TextEnv, TextStep

__all__ = ["Game", "GameEnv"]


class GameEnv(TextEnv):
    """Base of the games: plain methods that return at once.

    Args:
        seed: seed of the tasks drawn for episodes whose data gives none.
    """

    inline = True
    _data_keys: ClassVar[Sequence[str]]
    """The keys of an episode's data that the game reads, ``"seed"`` among them."""

    def __init__(self, seed: int | None) -> None:
        self._rng = random.Random(seed)
        self._solution: Any = None
        """What the model is to find; ``None`` if no episode is under way."""

    def _read(self, data: Any) -> tuple[Mapping[str, Any], random.Random]:
        """The data, and what draws the task if the data does not hold it."""
        given = data if isinstance(data, Mapping) else {}
        refuse_misspelt_keys(given, self._data_keys)
        seed = given.get("seed")
        return given, self._rng if seed is None else random.Random(int(seed))

    def _require_episode(self) -> None:
        if self._solution is None:
            raise RuntimeError(
                f"{type(self).__name__}.step was called with no episode under way: call reset first."
            )


@dataclass(frozen=True)
class Game:
    """A whole game, as a player and the environment wrote it."""

    messages: list[Message]
    """The opening message, then the player's (``assistant``) and the environment's by turns."""
    rewards: list[float]
    """The reward of every turn."""

    def say(self, env: GameEnv, content: str) -> TextStep:
        """Play a turn, and write it down."""
        step: Any = env.step(content)
        self.messages.extend([{"role": "assistant", "content": content}, *step.messages])
        self.rewards.append(step.reward)
        return step
