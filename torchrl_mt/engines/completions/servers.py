"""Several servers of one model: which one a request goes to, and which ones may take any.

A conversation stays on the server that has its prefix. A server takes requests only while it answers
and has the current weights. A request is stamped with a version that its server had when it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

from torchrl_mt.engines.completions.prefixes import PrefixPlaces
from torchrl_mt.http_client import AttemptError
from torchrl_mt.server_load import ServerLoad, choose
from torchrl_mt.threads import start_daemon

__all__ = ["Server", "Servers", "server_origins"]

_PAUSE = 5.0
"""Seconds after which a server that did not answer is tried again."""
_MOST_LOSSES = 3
"""How often in a row a server may lose its weights before its requests fail."""
_GROUP_SLACK, _TURN_SLACK = 8, 16
"""Open requests beyond twice the least at which a prompt leaves the server that knows its prefix: of a
prompt that was sent before, and of one that goes on from a response."""


@dataclass(eq=False)
class Server(ServerLoad):
    """One server, as far as requests have shown; its address is without a path."""

    reason: str = ""
    """Why it takes no requests."""
    weights: Literal["current", "doubtful", "missed"] = "current"
    """Whether it has the weights of the last update. A restart puts them in doubt."""
    losses: int = 0
    """How often it has lost the weights since it last answered with them."""
    refusals: int = 0
    """How often nothing listened at its address."""
    restored: Future[None] | None = field(default=None, repr=False)
    """Done when it has loaded the weights that it lacked; ``None`` while no request waits for that."""


def server_origins(urls: str | Iterable[str]) -> list[str]:
    """Addresses of servers without ``/v1`` and the like.

    Args:
        urls: one address or several.

    Raises:
        ValueError: if there is none, one comes twice, or one is no HTTP address.
        TypeError: if ``urls`` are no strings.

    Examples:
        >>> server_origins(["http://a:8000/v1", "http://b:8000"])
        ['http://a:8000', 'http://b:8000']
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    origins = []
    for url in given:
        if not isinstance(url, str):
            raise TypeError(f"base_url must be a string or a list of strings, got {url!r}.")
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url must begin with http:// or https://, got {url!r}: "
                "for example 'http://localhost:8000/v1'."
            )
        url = url.rstrip("/").removesuffix("/v1/completions")
        origins.append(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    if not origins or len(set(origins)) < len(origins):
        raise ValueError(f"base_url must have at least one server, each once, got {given!r}.")
    return origins


class Servers:
    """Chooses a server for each attempt of a request.

    Requests go to the server that has their prefix, unless it is far busier than another; others to the
    one with the fewest open requests, in turns. Servers that do not answer are left out for a while; if
    none answers, the one that was left out first is tried.

    Args:
        origins: the servers' addresses.
        bring_up: has a server load the weights of a version, or raises a RuntimeError; called with the
            server's address, the version, and whether the server may have them already. ``None`` if
            that is not possible.
    """

    def __init__(
        self,
        origins: Sequence[str],
        *,
        bring_up: Callable[[str, int, bool], object] | None = None,
    ) -> None:
        self.all = [Server(origin) for origin in origins]
        self.version = 0
        """Version of the weights that servers have unless they missed an update."""
        self.moved = 0
        """Number of prompts that left the server that had their prefix."""
        self._bring_up = bring_up
        self.follows = False
        """Whether to wait for :meth:`restored`, :meth:`commit` or :meth:`refuse`, and never call
        ``bring_up``."""
        self._pause = _PAUSE
        self._places = PrefixPlaces[Server]()
        self._lock = Lock()
        self._held: Future[None] | None = None

    @property
    def live(self) -> int:
        """Number of servers that take requests."""
        return sum(not each.away_until and each.weights == "current" for each in self.all)

    @asynccontextmanager
    async def use(self, prompt: Sequence[int]) -> AsyncIterator[tuple[Server, int]]:
        """Choose a server for one attempt, and learn from how it goes.

        Args:
            prompt: the tokens of the prompt.

        Yields:
            The server, and the version of its weights.

        Raises:
            AttemptError: if no server has the current weights.
        """
        server, version = await self._ready(prompt)
        refusals = server.refusals
        try:
            yield server, version
            if version and server.refusals > refusals:
                error = AttemptError(f"{server.address} may have restarted before it sampled this.")
                error.given_up = True
                raise error
        except AttemptError as error:
            with self._lock:
                self._learn(server, version, error)
            raise
        else:
            with self._lock:
                server.works()
                server.reason, server.losses = "", 0
        finally:
            with self._lock:
                server.end()

    def remember(self, server: Server, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember that a server has a prompt and its response."""
        if len(self.all) > 1:
            with self._lock:
                self._places.add([*prompt, *answer], server, is_turn=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let no attempt begin meanwhile, while weights are updated."""
        held: Future[None] = Future()
        with self._lock:
            self._held = held
        try:
            yield
        finally:
            with self._lock:
                self._held = None
            held.set_result(None)

    def commit(self, version: int, missed: Iterable[str] = ()) -> None:
        """Set the version that servers have after an update.

        Args:
            version: the new version.
            missed: addresses of servers that failed. One that is unknown counts as all of them.
        """
        lacking = self._at(missed)
        with self._lock:
            for server in self.all:
                if server in lacking:
                    self._lacks(server, "it missed an update of the weights")
                else:
                    self._has_weights(server)
            self.version = version

    def missed(self, origins: Iterable[str]) -> None:
        """Have servers load the current weights before they take another request."""
        with self._lock:
            for server in self._at(origins):
                self._lacks(server, "it lacks the weights")

    def lacking(self) -> dict[str, bool]:
        """Addresses of servers that must load weights, and whether they may have them already."""
        with self._lock:
            lacking = [server for server in self.all if server.weights != "current"]
            return {server.address: server.weights == "doubtful" for server in lacking}

    def restored(self, origins: Iterable[str]) -> None:
        """Let servers take requests: they have loaded the current weights."""
        with self._lock:
            for server in self._at(origins):
                self._has_weights(server)

    def refuse(self, origin: str, reason: str) -> None:
        """Fail the requests that wait for a server to load weights."""
        with self._lock:
            for server in self._at([origin]):
                restored, server.restored = server.restored, None
                if restored is not None:
                    restored.set_exception(RuntimeError(reason))

    def _at(self, origins: Iterable[str]) -> list[Server]:
        """The servers at some addresses; all if one is unknown, such as that behind a router."""
        wanted = set(origins)
        if wanted - {server.address for server in self.all}:
            return self.all
        return [server for server in self.all if server.address in wanted]

    def lost(self, server: Server, version: int, reason: str) -> bool:
        """Have a server that lacks a version load the current weights before it takes another request.

        Returns:
            Whether that may help.
        """
        with self._lock:
            if server.weights == "current" and version == self.version:
                server.losses += 1
                self._lacks(server, reason)
            return server.losses <= _MOST_LOSSES

    async def _ready(self, prompt: Sequence[int]) -> tuple[Server, int]:
        """Choose a server that has the current weights, once no update is under way."""
        while True:
            while (held := self._held) is not None:
                await asyncio.shield(asyncio.wrap_future(held))
            with self._lock:
                if self._held is not None:
                    continue
                server = self._choose(prompt)
                if server.weights == "current":
                    return server, self.version
                version = self.version
            try:
                await self._restore(server, version)
            except AttemptError as error:
                with self._lock:
                    self._learn(server, version, error)
                raise
            finally:
                with self._lock:
                    server.end()

    async def _restore(self, server: Server, version: int) -> None:
        """Have a server load the weights of a version, once for all requests that wait for it."""
        with self._lock:
            if server.weights == "current":
                return
            restored = server.restored
            if restored is None:
                restored = server.restored = Future()
                if not self.follows:
                    start_daemon(self._load, server, version, restored)
        try:
            await asyncio.shield(asyncio.wrap_future(restored))
        except RuntimeError as error:
            reason = f"it lacks the weights of version {version}: {error}"
            raise AttemptError(reason, away=True) from error

    def _lacks(self, server: Server, reason: str) -> None:
        """Have a server load weights before it takes another request; the caller has the lock."""
        server.weights, server.reason = "missed", reason
        if not self.follows:
            server.restored = None  # What it is loading may be lost.

    def _has_weights(self, server: Server) -> None:
        """Let a server take requests; the caller has the lock."""
        server.works()
        server.weights, server.reason = "current", ""
        restored, server.restored = server.restored, None
        if self.follows and restored is not None:
            restored.set_result(None)

    def _load(self, server: Server, version: int, restored: Future[None]) -> None:
        """Have a server load weights, in a thread of its own."""
        failure: BaseException | None = None
        try:
            if self._bring_up is None:
                raise RuntimeError("call update_weights")
            self._bring_up(server.address, version, server.weights == "doubtful")
        except BaseException as error:
            failure = error if isinstance(error, RuntimeError) else RuntimeError(repr(error))
        with self._lock:
            if server.restored is restored:  # Nothing has changed its weights since.
                server.restored = None
                if failure is None and version == self.version and self._held is None:
                    server.weights = "current"
        if failure is None:
            restored.set_result(None)
        else:
            restored.set_exception(failure)

    def _choose(self, prompt: Sequence[int]) -> Server:
        """Choose a server and count the request as open there."""
        chosen = choose(self.all)
        if len(self.all) > 1 and chosen.is_open:
            chosen = self._by_prefix(prompt, chosen)
            if prompt:
                self._places.add(prompt, chosen, is_turn=False)
        chosen.begin()
        return chosen

    def _by_prefix(self, prompt: Sequence[int], least: Server) -> Server:
        found = self._places.find(prompt)
        if found is None:
            return least
        server, is_turn = found
        slack = _TURN_SLACK if is_turn else _GROUP_SLACK
        if server.is_open and server.running <= 2 * least.running + slack:
            return server
        self.moved += is_turn
        return least

    def _learn(self, server: Server, version: int, error: AttemptError) -> None:
        """Leave a server out that does not answer, and say whether another attempt follows at once."""
        if error.away or error.timed_out:
            server.fail(self._pause)
            server.reason = str(error)
            others = [each for each in self.all if not each.away_until]
            error.at_once = error.away and bool(others)
            if error.away and not others and len(self.all) > 1:
                error.args = ("; ".join(f"{each.address}: {each.reason}" for each in self.all),)
        elif error.given_up and (
            self._held is not None or version != self.version or server.weights != "current"
        ):
            error.at_once = True  # the server aborted it for an update, or lacks one
        server.refusals += error.refused
        can_load = self.follows or self._bring_up is not None
        if error.refused and self.version and can_load and server.weights == "current":
            server.weights = "doubtful"
