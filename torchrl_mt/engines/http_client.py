"""Asking an HTTP server for JSON: retried with backoff, cancellable, no socket left open.

A client belongs to one event loop. It is made with the first request under way there and closed with
the last, so that a loop may end at any time between requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

__all__ = ["CompletionsError", "HttpClient"]

_A = TypeVar("_A")
_S = TypeVar("_S")

_RETRIED = frozenset({408, 425, 429})
"""Refusals that may pass; so may every 5xx."""
_LONGEST_BACKOFF = 60.0
_CLOSING = 5.0
"""Seconds that closing waits for other threads' loops to let go."""


class CompletionsError(RuntimeError):
    """A request failed for good.

    Args:
        url: what was asked.
        attempts: how often.
        reason: what happened the last time.
    """

    def __init__(self, url: str, attempts: int, reason: str) -> None:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"POST {url} failed after {times}: {reason}")
        self.url = url
        self.attempts = attempts


class _Session:
    """One loop's client and what it is used for."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.users = 0
        self.tasks: set[asyncio.Task[Any]] = set()
        self.ended = threading.Event()

    def cancel(self) -> None:
        """Cancel every request under way; call it on the session's loop."""
        for task in self.tasks:
            task.cancel()


class HttpClient:
    """Post JSON to one address, from any number of event loops.

    Args:
        url: the address.
        headers: sent with every request.
        timeout: seconds to connect, and seconds without a byte while sending or waiting.
        max_retries: how often a failed request is tried again.
        backoff: seconds before the first retry, about; twice as long before each further one.
        max_connections: most connections at once, per event loop; requests wait for one.

    Raises:
        ImportError: if httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        timeout: float,
        max_retries: int,
        backoff: float,
        max_connections: int,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise ImportError(
                "CompletionsEngine needs httpx: pip install 'torchrl-mt[server]'"
            ) from None
        self.url = url
        self._httpx = httpx
        self._max_retries = max_retries
        self._backoff = backoff
        self._timeout = timeout
        self._options: dict[str, Any] = {
            "headers": dict(headers),
            # How long a request waits for a free connection depends on the others, not on the server.
            "timeout": httpx.Timeout(timeout, pool=None),
            "limits": httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            # Reading the certificates takes longer than a request on a local network.
            "verify": httpx.create_ssl_context() if url.startswith("https:") else False,
        }
        self._random = random.Random()
        self._lock = threading.Lock()
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = (
            weakref.WeakKeyDictionary()
        )
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    async def post(
        self, body: Mapping[str, Any], parse: Callable[[Any], _A], stamp: Callable[[], _S]
    ) -> tuple[_A, _S]:
        """Post ``body`` and return the answer.

        Connection errors, timeouts and the statuses 408, 425, 429 and 5xx are retried; a
        ``Retry-After`` is kept to, unless it asks for more than ``timeout`` seconds, which fails.

        Args:
            body: what is sent as JSON.
            parse: called with the answer's JSON; a ``ValueError`` is a failure that is not retried.
            stamp: called as an attempt begins.

        Returns:
            What ``parse`` made of the answer, and what ``stamp`` returned for that attempt.

        Raises:
            CompletionsError: if the server refuses, or the last retry failed.
            RuntimeError: if the client is closed.
        """
        async with self._session() as session:
            task = asyncio.ensure_future(self._post(session.client, body, parse, stamp))
            session.tasks.add(task)
            try:
                await asyncio.wait([task])
            finally:
                # A task of its own, so that closing can end it and its caller learns why.
                session.tasks.discard(task)
                task.cancel()
                await asyncio.wait([task])
                failure = None if task.cancelled() else task.exception()
            if task.cancelled():
                raise _closed()
            if failure is not None:
                raise failure
            return task.result()

    def close(self) -> None:
        """Fail every request under way; closing again does nothing."""
        with self._lock:
            self._closed = True
            sessions = dict(self._sessions)
        with suppress(RuntimeError):
            sessions.pop(asyncio.get_running_loop()).cancel()
        for loop, session in list(sessions.items()):
            try:
                loop.call_soon_threadsafe(session.cancel)
            except RuntimeError:  # a closed loop has nothing under way
                del sessions[loop]
        for loop, session in sessions.items():
            if loop.is_running():
                session.ended.wait(_CLOSING)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        """The running loop's session, for as long as a request takes."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise _closed()
            session = self._sessions.get(loop)
            if session is None:
                client = self._httpx.AsyncClient(**self._options)
                session = self._sessions[loop] = _Session(client)
            session.users += 1
        try:
            yield session
        finally:
            with self._lock:
                session.users -= 1
                last = session.users == 0
                if last:
                    self._sessions.pop(loop, None)
            if last:
                try:
                    await session.client.aclose()
                finally:
                    session.ended.set()

    async def _post(
        self,
        client: Any,
        body: Mapping[str, Any],
        parse: Callable[[Any], _A],
        stamp: Callable[[], _S],
    ) -> tuple[_A, _S]:
        """Try until an attempt succeeds."""
        cause: Exception | None = None
        for attempt in range(1, self._max_retries + 2):
            begun, wait = stamp(), 0.0
            try:
                response = await client.post(self.url, json=body)
            except (self._httpx.TransportError, self._httpx.DecodingError) as error:
                said = str(error) or self._silence(error)
                cause, reason = error, f"{type(error).__name__}: {said}"
            else:
                if response.is_success:
                    return self._parsed(response, parse, attempt), begun
                cause, reason = None, f"status {response.status_code}: {_message(response)}"
                if response.status_code not in _RETRIED and response.status_code < 500:
                    raise CompletionsError(self.url, attempt, reason)
                wait = _retry_after(response.headers.get("retry-after"))
                if wait > self._timeout:
                    reason += f" (the server asks to wait {wait:.0f} seconds)"
                    raise CompletionsError(self.url, attempt, reason)
            if attempt > self._max_retries:
                raise CompletionsError(self.url, attempt, reason) from cause
            pause = min(self._backoff * 2 ** (attempt - 1), _LONGEST_BACKOFF)
            # Spread out, so that requests that failed together do not come back together.
            await asyncio.sleep(max(wait, pause * self._random.uniform(0.5, 1.5)))
        raise AssertionError("unreachable")

    def _parsed(self, response: Any, parse: Callable[[Any], _A], attempt: int) -> _A:
        """What an answer says."""
        try:
            payload = json.loads(response.content)
        except ValueError as error:
            reason = f"the answer is no JSON ({error}): {response.text[:200]!r}"
            raise CompletionsError(self.url, attempt, reason) from error
        try:
            return parse(payload)
        except ValueError as error:
            raise CompletionsError(self.url, attempt, str(error)) from error

    def _silence(self, error: Exception) -> str:
        """What a timeout means, which httpx leaves without a message."""
        timed_out = isinstance(error, self._httpx.TimeoutException)
        return f"nothing for {self._timeout} seconds" if timed_out else "no message"


def _message(response: Any) -> str:
    """What a server says about its refusal."""
    try:
        said = json.loads(response.content)
        said = said.get("error", said)
        said = said.get("message", said) if isinstance(said, Mapping) else said
    except (ValueError, AttributeError):
        said = response.text
    return str(said)[:500] or "(no message)"


def _retry_after(header: str | None) -> float:
    """Seconds that a server asks to wait: its header has seconds or a date."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


def _closed() -> RuntimeError:
    """What requests to a closed engine fail with."""
    return RuntimeError("the engine is closed: make a new one.")
