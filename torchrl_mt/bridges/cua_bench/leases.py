"""Leases of servers: in this process, a server has at most one holder at a time.

Whoever finds no free server waits, first come, first served. Holders may be on any event loop. A lease
ends at the latest when it is garbage collected. A server that failed is set aside for a while that
doubles with each further failure; it is tried at once only where there is no other.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Lease", "lease"]

_FIRST_PAUSE = 1.0
"""Seconds that a server is set aside after its first failure."""
_LONGEST_PAUSE = 60.0
"""Most seconds that a server is set aside."""


class Lease:
    """A server that nobody else in this process has, until :meth:`end`."""

    def __init__(self, server: str) -> None:
        self.server = server
        """Address of the server."""
        self.failed: bool | None = None
        """Whether the server failed, which its holder says; None if it was asked nothing."""
        self._ended = False

    def end(self) -> None:
        """Give the server to the one who waits longest for it; ending again does nothing."""
        with _lock:
            ended, self._ended = self._ended, True
        if not ended:
            _give_back(self.server, self.failed)

    def __del__(self) -> None:
        self.end()


@dataclass(frozen=True)
class _Pause:
    """A server is set aside; the record stays until it succeeds."""

    until: float
    seconds: float


class _Waiter:
    """One who waits for any of several servers."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = frozenset(servers)
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        """Set when the waiter has a lease, or when one of its servers is set aside."""
        self.lease: Lease | None = None

    def choose(self, free: Iterable[str]) -> str | None:
        """A free server that may be had now: one that never failed if possible, free for longest."""
        mine = [one for one in free if one in self.servers and one not in _taken]
        ready = [one for one in mine if not _is_aside(one)]
        if ready:
            return min(ready, key=lambda one: (one in _pauses, _last_end.get(one, 0)))
        if mine and all(map(_is_aside, self.servers)):  # Waiting would only delay the failure.
            return min(mine, key=_pause_end)
        return None

    def seconds(self) -> float | None:
        """Seconds until a pause of a free server ends; None if there is none."""
        aside = [one for one in list(_pauses) if one in self.servers and one not in _taken]
        ends = min(map(_pause_end, aside), default=None)
        return None if ends is None else max(0.0, ends - time.monotonic())


_lock = threading.RLock()  # A lease may be garbage collected while the same thread holds the lock.
_taken: set[str] = set()
_waiting: list[_Waiter] = []
_pauses: dict[str, _Pause] = {}
_last_end: dict[str, int] = {}
_ends = itertools.count(1)


async def lease(servers: Sequence[str]) -> Lease:
    """Wait for a free server and take it; of several, the one that was free longest.

    A server that failed comes last, and not before its pause is over unless all of them have one.

    Args:
        servers: addresses, of which any will do.

    Returns:
        The lease.

    Examples:
        >>> async def main():
        ...     first = await lease(["http://a", "http://b"])
        ...     second = await lease(["http://a", "http://b"])
        ...     waiting = asyncio.ensure_future(lease(["http://a", "http://b"]))
        ...     second.end()
        ...     return first.server, second.server, (await waiting).server
        >>> asyncio.run(main())
        ('http://a', 'http://b', 'http://b')
    """
    waiter = _Waiter(servers)
    with _lock:
        _waiting.append(waiter)
        _serve(servers)
    try:
        while waiter.lease is None:
            with _lock:
                waiter.changed.clear()
                _serve([])  # A pause may be over.
                seconds = waiter.seconds()
            if waiter.lease is None:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waiter.changed.wait(), seconds)
    except BaseException:
        with _lock, suppress(ValueError):
            _waiting.remove(waiter)
        if waiter.lease is not None:  # It came in the same moment.
            waiter.lease.end()
        raise
    return waiter.lease


def _give_back(server: str, failed: bool | None) -> None:
    """Free a server, for the first who waits for it and is still there."""
    with _lock:
        _last_end[server] = next(_ends)
        if failed:
            last = _pauses.get(server)
            seconds = min(2 * last.seconds, _LONGEST_PAUSE) if last else _FIRST_PAUSE
            _pauses[server] = _Pause(time.monotonic() + seconds, seconds)
        elif failed is False:
            _pauses.pop(server, None)
        _taken.discard(server)
        _serve([server])
        if failed:
            for waiter in [one for one in _waiting if server in one.servers]:
                _wake(waiter)


def _serve(servers: Iterable[str]) -> None:
    """Give those of the servers that are free, and those whose pause is over, to waiters in order."""
    free = [one for one in dict.fromkeys([*servers, *_pauses]) if one not in _taken]
    for waiter in list(_waiting) if free else ():
        server = waiter.choose(free)
        # A lease that is garbage collected meanwhile may have taken the server or served the waiter.
        if server is None or server in _taken:
            continue
        _taken.add(server)
        if waiter not in _waiting:
            _taken.discard(server)
            continue
        _waiting.remove(waiter)
        waiter.lease = Lease(server)
        if not _wake(waiter):
            waiter.lease._ended = True
            _taken.discard(server)


def _wake(waiter: _Waiter) -> bool:
    """Wake a waiter; False if its loop is closed."""
    try:
        waiter.loop.call_soon_threadsafe(waiter.changed.set)
    except RuntimeError:
        return False
    return True


def _is_aside(server: str) -> bool:
    return _pause_end(server) > time.monotonic()


def _pause_end(server: str) -> float:
    pause = _pauses.get(server)
    return pause.until if pause else 0.0
