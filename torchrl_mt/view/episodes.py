"""Episodes as a person reads them, from whatever holds them.

Every source ends in the same records: an episode has turns, a turn has what was said before it and the
tokens that were sampled, and a token has values by name. Records of one episode from several sources are
joined, so that what the sampler recorded and what training computed stand on one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SeenEpisode", "SeenTurn", "join"]


@dataclass
class SeenTurn:
    """One answer of the model, and what was said before it."""

    turn: int
    """Index in the episode."""
    row: int = 0
    """Its training row: a fork begins another."""
    parent: int = -1
    """The turn that it goes on from; -1 if there is none."""
    reward: float | None = None
    finish: str | None = None
    """Why the answer ended."""
    given: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """New messages before the answer."""
    said: Mapping[str, Any] | None = None
    """The answer as a message."""
    ids: Sequence[int] = ()
    """Sampled tokens, ``n`` of them."""
    pieces: list[str] = field(default_factory=list)
    """The text of each."""
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 ``[n]`` by name; NaN where there is none."""


@dataclass
class SeenEpisode:
    """A whole episode."""

    id: int
    group: int | None = None
    sample: int | None = None
    """Index in the group."""
    task: str | None = None
    stop: str | None = None
    """Why it ended."""
    rejected: str | None = None
    """Why it was rejected, if it was."""
    is_eval: bool = False
    source: int = 0
    """Number of its source."""
    turns: list[SeenTurn] = field(default_factory=list)
    length: int = 0
    """Tokens of its rows, those of the environment included."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else is known of it, as JSON data."""

    @property
    def reward(self) -> float | None:
        """Sum of the rewards; ``None`` if no turn has one."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        return sum(rewards) if rewards else None

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.ids) for turn in self.turns)


def join(sources: Iterable[Iterable[SeenEpisode]]) -> list[SeenEpisode]:
    """Join the records of each episode; those whose tokens differ stay apart.

    What an earlier source knows counts, a later one adds what is missing.
    """
    episodes: list[SeenEpisode] = []
    by_id: dict[tuple[int, bool], SeenEpisode] = {}
    for number, source in enumerate(sources):
        for episode in source:
            episode.source = number
            key = (episode.id, episode.is_eval)
            known = by_id.get(key)
            if known is not None and known.source != number and _same_tokens(known, episode):
                _add(known, episode)
            else:
                by_id.setdefault(key, episode)
                episodes.append(episode)
    _number_samples(episodes)
    return episodes


def _same_tokens(one: SeenEpisode, other: SeenEpisode) -> bool:
    """Whether all turns of the other are in the one, token for token."""
    known = {turn.turn: list(turn.ids) for turn in one.turns}
    return all(known.get(turn.turn) == list(turn.ids) for turn in other.turns if len(turn.ids))


def _add(known: SeenEpisode, other: SeenEpisode) -> None:
    turns = {turn.turn: turn for turn in known.turns}
    for new in other.turns:
        turn = turns.get(new.turn)
        if turn is None:
            continue
        turn.values = new.values | turn.values
        for name in ("reward", "finish", "said"):
            if getattr(turn, name) is None:
                setattr(turn, name, getattr(new, name))
        if new.given and all(message["role"] == "tokens" for message in turn.given):
            turn.given = new.given
    for name in ("group", "sample", "task", "stop", "rejected"):
        if getattr(known, name) is None:
            setattr(known, name, getattr(other, name))
    known.facts = other.facts | known.facts


def _number_samples(episodes: Sequence[SeenEpisode]) -> None:
    """Count the members of groups where no source has numbered them."""
    groups: dict[tuple[int, bool], list[SeenEpisode]] = {}
    for episode in episodes:
        if episode.group is not None:
            groups.setdefault((episode.group, episode.is_eval), []).append(episode)
    for members in groups.values():
        if any(episode.sample is None for episode in members):
            for k, episode in enumerate(members):
                episode.sample = k
