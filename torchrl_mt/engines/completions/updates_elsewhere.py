"""Servers whose weights another process updates: what it and an engine tell each other.

An engine sends no request to a server that lacks the weights. It tells the other process, which alone
changes the servers, and waits until they are loaded.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock

from torchrl_mt.engines.completions.reported_versions import VersionSource
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
    versions: VersionSource = "begun"
    """How an engine knows which weights sampled a response."""


class UpdatesElsewhere:
    """Follows the updates that another process makes. Thread-safe.

    Args:
        servers: the engine's servers.
    """

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        """Tell which servers must load weights, and take why one could not."""
        servers.follows = True
        self._states = ServerStates()
        self._lock = Lock()
        self._hold = ExitStack()

    def enter(self, states: ServerStates) -> None:
        """Take what the other process tells."""
        with self._lock:
            before, self._states = self._states, states
            if states.is_updating:
                if not before.is_updating:
                    self._hold.enter_context(self.servers.hold())
                return
            if states.version != before.version:
                self.servers.commit(states.version, states.lacking)
            else:
                self.servers.restored(before.lacking - states.lacking)
                self.servers.missed(states.lacking - before.lacking)
            self._hold.close()
