"""Leases of servers: in this process, a server has at most one holder at a time.

Whoever finds no free server waits, first come, first served. Holders may be on any event loop. A lease
ends at the latest when it is garbage collected. A server that failed is set aside for a while that
doubles with each further failure; it is tried at once only where there is no other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from time import monotonic

from torchrl_mt.server_load import ServerLoad, choose

__all__ = ["Lease", "lease"]

_FIRST_PAUSE = 1.0
"""Seconds that a server is set aside after its first failure."""
_LONGEST_PAUSE = 60.0
"""Most seconds that a server is set aside."""
_LOOK_SECONDS = 0.02
"""How often one who waits looks for a free server."""
_GONE_SECONDS = 1.0
"""Whoever has not looked for so long has lost its turn: its event loop may have ended."""

_lock = threading.RLock()  # A lease may be garbage collected while the same thread holds the lock.
_loads: dict[str, ServerLoad] = {}
_waiting: list[_Waiter] = []


class Lease:
    """A server that nobody else in this process has, until :meth:`end`."""

    def __init__(self, load: ServerLoad) -> None:
        self.server = load.address
        """Address of the server."""
        self.failed: bool | None = None
        """Whether the server failed, which its holder says; None if it was asked nothing."""
        self._load: ServerLoad | None = load

    def end(self) -> None:
        """Give the server to the one who waits longest for it; ending again does nothing."""
        with _lock:
            load, self._load = self._load, None
            if load is None:
                return
            load.end()
            if self.failed:
                load.fail(_FIRST_PAUSE, _LONGEST_PAUSE)
            elif self.failed is False:
                load.works()

    def __del__(self) -> None:
        self.end()


class _Waiter:
    """One who waits for any of several servers."""

    def __init__(self, loads: Sequence[ServerLoad]) -> None:
        self.loads = loads
        self.looked = monotonic()

    def choose(self, taken: set[ServerLoad]) -> ServerLoad | None:
        """A free server that may be had now."""
        mine = [one for one in self.loads if not one.running and one not in taken]
        # If all are set aside, waiting would only delay the failure.
        if any(one.is_open for one in mine) or all(one.is_away for one in self.loads):
            never_failed = [one for one in mine if not one.away_until]
            return choose(never_failed or mine) if mine else None
        return None

    def take(self) -> ServerLoad | None:
        """Take a server that those who wait for longer leave."""
        with _lock:
            self.looked = monotonic()
            if all(one.running for one in self.loads):
                return None
            taken: set[ServerLoad] = set()
            for each in _waiting[: _waiting.index(self)]:
                left = each.choose(taken) if self.looked - each.looked < _GONE_SECONDS else None
                if left is not None:
                    taken.add(left)
            mine = self.choose(taken)
            if mine is not None:
                mine.begin()
            return mine


async def lease(servers: Sequence[str]) -> Lease:
    """Wait for a free server and take it; of several, the one that was taken longest ago.

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
    with _lock:
        waiter = _Waiter([_loads.setdefault(one, ServerLoad(one)) for one in servers])
        _waiting.append(waiter)
    try:
        while (load := waiter.take()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
        return Lease(load)
    finally:
        with _lock:
            _waiting.remove(waiter)
