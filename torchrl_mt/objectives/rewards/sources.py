"""Asking sources of rewards: all at the same time where they wait, and never for a silent 0.

A source is a callable from ``n`` rows to ``[n]`` (a score for each row) or ``[n, S]`` (a reward for
each token), or to an awaitable of one. A score is the outcome of the row's episode.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

Scores = Tensor | Sequence[float]
"""What a source answers with."""

RewardSource = Callable[[TensorDictBase], Scores | Awaitable[Scores]]
"""See the module. One with the attribute ``per_episode = True`` is asked about one row of each
episode only, the one with its last turn; one with a ``name`` is called so in metrics and errors."""

_T = TypeVar("_T")


def ask(calls: Sequence[tuple[str, RewardSource, TensorDictBase]]) -> list[Tensor]:
    """Ask sources about rows, ``(name, source, rows)`` each, for ``[n]`` or ``[n, S]`` float32.

    Those that answer with an awaitable are waited for together, on an event loop of their own, which
    also works where one is running already. If one fails the others are cancelled. An answer that is
    no tensor or sequence of finite numbers, or of another shape, is refused.
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
        for i, answer in zip(waiting, _run([answers[i] for i in waiting]), strict=True):
            answers[i] = answer
    return [
        _checked(name, answer, rows) for (name, _, rows), answer in zip(calls, answers, strict=True)
    ]


async def wait_all(coroutines: Iterable[Awaitable[_T]]) -> list[_T]:
    """Give the results of all, in order; when one fails, cancel the others and fail with it."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait from outside of any loop, or in another thread if one is running in this."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait_all(awaitables))
    outcome: Future[list[Any]] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(wait_all(awaitables)))
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: who interrupts the wait, in a notebook say, does not wait for the source.
    threading.Thread(target=run, name="rewards", daemon=True).start()
    return outcome.result()


def _checked(name: str, answer: Any, rows: TensorDictBase) -> Tensor:
    """The answer as ``[n]`` or ``[n, S]`` float32."""
    asked = f"reward source {name!r} must answer with"
    try:
        reward = torch.as_tensor(answer).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{asked} a tensor or a sequence of numbers, got {type(answer).__name__}: {error}"
        ) from error
    if reward.is_complex():
        raise TypeError(f"{asked} real numbers, got {reward.dtype}.")
    reward = reward.float()
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
            f"{asked} finite numbers, got {float(reward[at])} for row {at[0]} of the rows that it was "
            "given."
        )
    return reward
