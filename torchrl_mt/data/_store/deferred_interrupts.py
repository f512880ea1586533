"""Changes of several assignments that Ctrl-C does not tear apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT
from typing import Any

try:
    # Those of the signal module look every handler up in an enum, which takes as long as a small write.
    from _signal import getsignal, signal
except ImportError:
    from signal import getsignal, signal

__all__ = ["interrupts_deferred"]


class _Pending:
    """A handler that takes note of Ctrl-C."""

    args: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self.args = args


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise Ctrl-C after the body, not in it.

    Ctrl-C is raised in the main thread only, so in other threads this does nothing. A write copies into
    rows that the oldest episodes had: half of it cannot be undone, so it must not stop halfway.

    Examples:
        >>> import os, signal
        >>> try:
        ...     with interrupts_deferred():
        ...         os.kill(os.getpid(), signal.SIGINT)
        ...         done = True
        ... except KeyboardInterrupt:
        ...     done
        True
    """
    before = getsignal(SIGINT)
    if isinstance(before, _Pending):  # The body of another defers them already.
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pending = _Pending()
    signal(SIGINT, pending)
    try:
        yield
    finally:
        signal(SIGINT, before)
        if pending.args is not None:
            before(*pending.args)
