"""Changes that an interrupt does not tear apart."""

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

__all__ = ["undisturbed"]


class _Later:
    """Takes note of Ctrl-C."""

    args: tuple[Any, ...] | None = None

    def __call__(self, *args: Any) -> None:
        self.args = args


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have Ctrl-C wait until the body is done.

    Ctrl-C is raised in the main thread only, so in other threads this does nothing.

    Examples:
        >>> import os, signal
        >>> try:
        ...     with undisturbed():
        ...         os.kill(os.getpid(), signal.SIGINT)
        ...         done = True
        ... except KeyboardInterrupt:
        ...     done
        True
    """
    before = getsignal(SIGINT)
    if isinstance(before, _Later):  # The body of another waits already.
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    later = _Later()
    signal(SIGINT, later)
    try:
        yield
    finally:
        signal(SIGINT, before)
        if later.args is not None:
            before(*later.args)
