"""Defer Ctrl-C during changes that must not stop halfway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT
from typing import Any

try:
    # Those of the signal module convert handlers to enums, which takes as long as a small write.
    from _signal import getsignal, signal
except ImportError:
    from signal import getsignal, signal

__all__ = ["interrupts_deferred"]


class _Pending:
    """A signal handler that records Ctrl-C."""

    args: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self.args = args


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise Ctrl-C after the body, not in it.

    A write overwrites rows of evicted episodes, which cannot be undone. Python raises Ctrl-C in the
    main thread only, so in other threads this does nothing.
    """
    before = getsignal(SIGINT)
    if isinstance(before, _Pending):  # An outer context already defers them.
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
