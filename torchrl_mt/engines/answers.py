"""How a thread answers the event loops that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["closed_error", "settle"]


class _Asked(Protocol):
    """A request that somebody waits for."""

    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


def settle(outcomes: Iterable[tuple[_Asked, object]]) -> None:
    """Hand answers and failures to the loops that wait for them, one wake-up per loop.

    Args:
        outcomes: requests, each with its answer or the error that it fails with.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future, object]]] = {}
    for asked, outcome in outcomes:
        by_loop.setdefault(asked.loop, []).append((asked.answer, outcome))
    for loop, settled in by_loop.items():
        with suppress(RuntimeError):  # a closed loop waits for nothing
            loop.call_soon_threadsafe(_resolve, settled)


def closed_error() -> RuntimeError:
    """What requests to a closed engine fail with."""
    return RuntimeError("the engine is closed: make a new one.")


def _resolve(settled: Iterable[tuple[asyncio.Future, object]]) -> None:
    """Settle futures on the loop that they belong to."""
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
