"""Servers whose weights another process updates: what it and an engine tell each other.

An engine sends no request to a server that lacks the weights. It tells the other process, which alone
changes the servers, and waits until they are loaded.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock

from torchrl_mt.engines.completions.servers import Servers

__all__ = ["ServerStates", "UpdatesElsewhere"]


@dataclass(frozen=True)
class ServerStates:
    """What the process that updates servers tells those that sample from them."""

    version: int = 0
    """Number of updates."""
    lacking: frozenset[str] = frozenset()
    """Addresses of servers without the weights of that version."""
    is_updating: bool = False
    """Whether an update is under way: no request begins."""
    reports_versions: bool = False
    """Whether the servers' answers report the version."""


class UpdatesElsewhere:
    """Follows the updates that another process makes. Thread-safe.

    Args:
        servers: the engine's servers.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._states = ServerStates()
        self._waiting: dict[str, Future[None]] = {}
        """Servers that requests wait for."""
        self._lock = Lock()
        self._hold = ExitStack()

    def enter(self, states: ServerStates) -> None:
        """Take what the other process tells."""
        with self._lock:
            before, self._states = self._states, states
            if states.is_updating:
                if not before.is_updating:
                    self._hold.enter_context(self._servers.hold())
                return
            if states.version != before.version:
                self._servers.commit(states.version, states.lacking)
                restored = [url for url in self._waiting if url not in states.lacking]
            else:
                restored = sorted(before.lacking - states.lacking)
                self._servers.restored(restored)
                self._servers.missed(states.lacking - before.lacking)
            self._hold.close()
            loaded = [self._waiting.pop(url) for url in restored if url in self._waiting]
        for each in loaded:
            each.set_result(None)

    def lacking(self) -> dict[str, bool]:
        """Servers that must load weights, and whether they may have them already."""
        return self._servers.lacking()

    def refuse(self, url: str, reason: str) -> None:
        """Tell that a server could not load the weights."""
        with self._lock:
            loaded = self._waiting.pop(url, None)
        if loaded is not None:
            loaded.set_exception(RuntimeError(reason))

    def bring_up(self, url: str, version: int, trust: bool = False) -> None:
        """Wait until a server has loaded the weights of a version; see :class:`Servers`.

        Raises:
            RuntimeError: if it could not.
        """
        with self._lock:
            if version != self._states.version:
                return  # An update came in between, and told of this server.
            loaded = self._waiting.setdefault(url, Future())
        loaded.result()
