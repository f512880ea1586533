"""Waiting for events, never for times: a slow machine makes tests slow and changes no verdict."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1800.0
"""Seconds after which a test that hangs is given up; nothing else may depend on it."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this did not happen"
        time.sleep(0.002)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, and let the event loop go on meanwhile."""
    while not condition():
        await asyncio.sleep(0.001)


def in_thread(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Call a function in a thread; the result is a function that waits for its value or its error."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(PATIENCE)
        return outcome[0]

    return wait


@contextmanager
def ctrl_c(when: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Press Ctrl-C once the condition holds and the main thread waits for something."""
    pressing = threading.Thread(target=press_ctrl_c, args=[when], daemon=True)
    pressing.start()
    try:
        yield
    finally:
        pressing.join()


def press_ctrl_c(when: Callable[[], object] = lambda: True) -> None:
    """Press Ctrl-C once the condition holds and the main thread waits for something."""
    wait_until(lambda: when() and _main_waits())
    os.kill(os.getpid(), signal.SIGINT)


def _main_waits() -> bool:
    """Whether the main thread is about to wait for another one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code is threading.Condition.wait.__code__
