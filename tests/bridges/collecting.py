"""A collector whose model answers by a rule, and the episodes that it plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.envs.speaking import collected, speaker


class Played(NamedTuple):
    """An episode."""

    text: str
    """The last prompt with its response."""
    rewards: list[float]
    truncated: bool
    infos: list[Any]


def collect(
    env: Any, answer: Callable[[str], str], data: Any = None, number: int = 1, **collector: Any
) -> list[Played]:
    """Play episodes in which a model answers a prompt by ``answer(prompt)``; sorted by their text."""
    engine = speaker(answer)
    batch, _ = collected(env, engine, data, number, **collector)
    prompts = batch.get(("tokens", "prompt"), as_list=True)
    responses = batch.get(("tokens", "response"), as_list=True)
    episodes = []
    begin = 0
    for end in (batch["next", "done"].flatten().nonzero().flatten() + 1).tolist():
        episodes.append(
            Played(
                engine.tokenizer.decode([*prompts[end - 1], *responses[end - 1]]),
                batch["next", "reward"].flatten()[begin:end].tolist(),
                bool(batch["next", "truncated"].flatten()[end - 1]),
                [batch["info"][k] for k in range(begin, end)],
            )
        )
        begin = end
    return sorted(episodes, key=lambda played: played.text)
