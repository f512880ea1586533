"""Calls of reward sources: awaitables are awaited together, and invalid results are errors.

A source is a callable from ``n`` rows to ``[n]`` (the score of each row's episode) or ``[n, S]`` (a
reward per token), or to an awaitable of either. In a list, ``None`` may take the place of a row's
reward, if the source does not apply to its episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.checks import as_tensor
from torchrl_mt.threads import run_all

Scores = Tensor | Sequence[float | None] | Sequence[list[float] | None]
"""Result of a source."""

RewardSource = Callable[[TensorDictBase], Scores | Awaitable[Scores]]
"""See the module. A source with ``per_episode = True`` gets one row per episode, that of its last turn.
A ``name`` attribute is its name in metrics and errors."""


def ask(calls: Sequence[tuple[str, RewardSource, TensorDictBase]]) -> list[Tensor]:
    """Call sources, ``(name, source, rows)`` each, and return ``[n]`` or ``[n, S]`` float32.

    It is NaN on the rows for which a source returned ``None``.
    Awaitables are awaited together on an event loop of their own, even if another loop is running;
    if one fails, the others are cancelled. Results that are not finite numbers of the right shape are
    refused.
    """
    answers: list[Any] = []
    try:
        for _, source, rows in calls:
            answers.append(source(rows))
    except BaseException:
        for answer in answers:
            if inspect.iscoroutine(answer):
                answer.close()
        raise
    waiting = [i for i, answer in enumerate(answers) if inspect.isawaitable(answer)]
    if waiting:
        for i, answer in zip(waiting, run_all([answers[i] for i in waiting]), strict=True):
            answers[i] = answer
    return [
        _checked(name, answer, rows) for (name, _, rows), answer in zip(calls, answers, strict=True)
    ]


def _checked(name: str, answer: Any, rows: TensorDictBase) -> Tensor:
    """Convert a result to ``[n]`` or ``[n, S]`` float32, NaN for ``None``."""
    asked = f"reward source {name!r} must return"
    skipped: list[int] = []
    if isinstance(answer, (list, tuple)):
        skipped = [i for i, each in enumerate(answer) if each is None]
        blank = next((each for each in answer if each is not None), 0.0)
        answer = [blank if each is None else each for each in answer]
    reward = as_tensor(f"the result of reward source {name!r}", answer).float()
    n = len(rows)
    if reward.ndim not in (1, 2) or reward.shape[0] != n:
        raise ValueError(
            f"{asked} one number for each of the {n} rows, [{n}], or one for each of their tokens, "
            f"[{n}, S], got shape {tuple(reward.shape)}."
        )
    bad = (~reward.isfinite()).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise ValueError(
            f"{asked} finite numbers, got {float(reward[at])} for row {at[0]} of the given rows."
        )
    if skipped:
        reward[skipped] = torch.nan
    return reward
