"""The engine as an episode sees it: every call is recorded, and the episode's limits hold.

Whoever plays the episode, the ledger has each model call once, with the very tokens that went in and
came out, in the order in which the calls began.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.ledger import Line
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.engines import Completion, Engine

__all__ = ["LimitReached", "Recorder", "within"]

_T = TypeVar("_T")

_LINES = 4
"""Lines that an episode may go back and forth between without storing their beginnings again."""


class LimitReached(Exception):
    """A limit of the episode does not allow a further model call.

    Args:
        reason: the limit.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode has reached its limit: {reason.value}")
        self.reason = reason


class Recorder:
    """An engine that writes what it is asked and what it answers into an episode.

    Args:
        engine: who answers.
        episode: the ledger to fill.
        limits: what the episode may use. The engine's ``max_total_tokens`` and ``max_new_tokens``, if it
            has such, bound the conversation and each response like the limits of the same meaning.
        sampling: arguments for every call, unless the call has its own.
    """

    def __init__(
        self,
        engine: Engine,
        episode: Episode,
        limits: Limits,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits.within(engine)
        self._episode = episode
        self._sampling = dict(sampling or {})
        self._lines: list[Line] = []
        """What the model has seen, the line that was added to last at the end."""
        self._order: list[int] = []
        """When the calls behind the turns began, counted."""
        self._calls = self._running = 0
        self._closed = False

    @property
    def version(self) -> int:
        """The engine's weight version."""
        return self.engine.version

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, if it has one."""
        return getattr(self.engine, "tokenizer", None)

    def update_weights(self, source: Any) -> int:
        """Not for those who play an episode.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "an episode cannot change the weights: use collector.update_policy_weights_"
        )

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        """Have the engine answer, and record it as a turn.

        Args:
            prompt_ids: every token that the model is to see.
            max_new_tokens: longest answer, if shorter than the limits allow.
            **sampling: what the engine's ``generate`` takes.

        Raises:
            LimitReached: if the episode may not have a further turn, or the prompt leaves no room.
            RuntimeError: if the episode is over.
        """
        self._check_open()
        limits = self.limits
        if limits.max_turns is not None and len(self._order) + self._running >= limits.max_turns:
            raise LimitReached(StopReason.MAX_TURNS)
        budget, reached = limits.response_budget(len(prompt_ids))
        if budget == 0:
            raise LimitReached(reached)
        if max_new_tokens is not None:
            budget = max_new_tokens if budget is None else min(budget, max_new_tokens)
        line = self._line_of(prompt_ids)
        prompt, call = line.prompt(), self._calls
        self._calls += 1
        self._running += 1
        begin = time.perf_counter()
        try:
            answer = await within(
                self.engine.generate(
                    prompt[:], max_new_tokens=budget, **{**self._sampling, **sampling}
                ),
                limits.turn_timeout,
                StopReason.TURN_TIMEOUT,
            )
        finally:
            self._running -= 1
        self._check_open()
        turn = Turn(prompt, answer, model_seconds=time.perf_counter() - begin)
        place = bisect(self._order, call)
        self._order.insert(place, call)
        self._episode.turns.insert(place, turn)
        if len(line) == len(prompt):
            line.add(answer.token_ids)
        return answer

    def continued(self, tokens: Sequence[int]) -> Sequence[int]:
        """The prompt that goes on from the last turn, its prompt and its response."""
        line = self._lines[-1]
        line.add(tokens)
        return line.prompt()

    def drop_last(self) -> None:
        """Take the last turn back."""
        self._order.pop()
        self._episode.turns.pop()

    def close(self) -> None:
        """Answer no more: the episode is over."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the episode is over: its engine answers no more")

    def _line_of(self, prompt: Sequence[int]) -> Line:
        """The line that holds the prompt, and nothing more; it is the last one now."""
        for line in reversed(self._lines):
            if line.holds(prompt):
                self._lines.remove(line)
                line.add(prompt[len(line) :])
                break
        else:
            line = Line(prompt)
        self._lines = [*self._lines, line][-_LINES:]
        return line


async def within(work: Coroutine[Any, Any, _T], seconds: float | None, reason: StopReason) -> _T:
    """What the coroutine returns, or ``LimitReached`` if that takes too long.

    As a task of its own, so that an error of its own that looks like ours is not taken for it.
    """
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
        raise LimitReached(reason)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
