"""Sampling servers that the engines of all workers share: this process alone changes their weights.

No worker sends a request to a server that lacks the weights, whoever noticed that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchrl_mt.collectors.distributed.workers import Workers
from torchrl_mt.engines.completions.updates_elsewhere import ServerStates
from torchrl_mt.engines.server_weights import ServerWeights
from torchrl_mt.threads import start_daemon

__all__ = ["SharedServers"]

_PAUSE = 5.0
"""Seconds after which a server that could not load weights tries again."""


class SharedServers:
    """Updates servers, and tells the workers how that went.

    Args:
        weights: loads weights into the servers.
        workers: have engines that sample from them.

    Raises:
        ValueError: if the engines have servers or a model that ``weights`` does not update.
    """

    def __init__(self, weights: ServerWeights, workers: Workers) -> None:
        if workers.facts["servers"] is not None:
            weights.check_engine(*workers.facts["servers"])
        self._weights = weights
        self._workers = workers
        self._changing = threading.Lock()
        """Held while the states of the servers change."""
        self._updates = 0
        """Updates that have begun."""
        self._loading: set[str] = set()
        """Servers that are loading the last weights again."""
        self._doubtful: set[str] = set()
        """Servers that lack the weights only if they were started again."""
        self._lock = threading.Lock()
        workers.on_report.append(lambda report: self.bring_up(report.servers))
        workers.tell_servers(ServerStates(versions=weights.versions))

    def update(self, source: Any) -> None:
        """Load weights into all servers, and have the workers count that if any server has them.

        Raises:
            Exception: see :meth:`ServerWeights.update
                <torchrl_mt.engines.server_weights.base.ServerWeights.update>`.
        """
        with self._changing:
            self._updates += 1
            self._doubtful.clear()
            before = self._workers.servers
            self._workers.tell_servers(replace(before, is_updating=True))
            version = before.version + 1
            try:
                self._weights.update(source, version)
            finally:
                has_reached, lacking = self._weights.outcome
                if has_reached:
                    after = replace(before, version=version, lacking=frozenset(lacking))
                    self._workers.count_update(after)
                else:
                    after = replace(before, lacking=before.lacking.union(lacking))
                    self._workers.tell_servers(after)

    def count_update(self) -> None:
        """Have the workers count an update that all servers received otherwise."""
        with self._changing:
            self._updates += 1
            before = self._workers.servers
            self._workers.count_update(
                replace(before, version=before.version + 1, lacking=frozenset())
            )

    def bring_up(self, lacking: Mapping[str, bool]) -> None:
        """Have servers load the last weights again, and tell the workers when they have; do not wait.

        Args:
            lacking: addresses of servers, and whether they may have the weights already.
        """
        for url, trust in lacking.items():
            with self._lock:
                if url in self._loading:
                    continue
                self._loading.add(url)
            start_daemon(self._bring_up, url, trust)

    def _bring_up(self, url: str, trust: bool) -> None:
        try:
            with self._changing:
                updates, states = self._updates, self._workers.servers
                if trust and url not in states.lacking:
                    self._doubtful.add(url)
                trust = url in self._doubtful
                # The other workers must not use it either.
                self._workers.tell_servers(replace(states, lacking=states.lacking | {url}))
            try:
                self._weights.bring_up(url, states.version, trust)
            except Exception as error:
                self._workers.refuse_server(url, str(error))
                time.sleep(_PAUSE)
                return
            with self._changing:
                if self._updates == updates:
                    states = self._workers.servers
                    self._workers.tell_servers(replace(states, lacking=states.lacking - {url}))
                    self._doubtful.discard(url)
        finally:
            with self._lock:
                self._loading.discard(url)
