"""Asking an HTTP server for JSON: within a limit of time, retried with backoff, no socket left open.

A client belongs to one event loop. It is made with the first request under way there and closed with
the last, so that a loop may end at any time between requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from numbers import Real
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["HttpClient", "HttpError", "TryAgainError"]

_A = TypeVar("_A")

_RETRIED = frozenset({408, 425, 429})
"""Refusals that may pass; so may every 5xx."""
_AWAY = frozenset({502, 503, 504})
_AWAY_PAUSE = 1.0
_LONGEST_BACKOFF = 60.0
_CLOSING = 5.0
"""Seconds that closing waits for other threads' loops to let go."""


class HttpError(RuntimeError):
    """A request failed for good.

    Args:
        url: what was asked.
        attempts: how often.
        reason: what happened the last time.
    """

    asked = "POST"
    """What the message begins with, before the address."""

    def __init__(self, url: str, attempts: int, reason: str) -> None:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"{self.asked} {url} failed after {times}: {reason}")
        self.url = url
        self.attempts = attempts
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.attempts, self.reason)


class TryAgainError(ValueError):
    """An answer says that the server did not get to an answer, which it may the next time."""


class _Session:
    """One loop's client and what it is used for."""

    def __init__(self, client: Any, max_connections: int) -> None:
        self.client = client
        # The pool's own queue is looked through for every request that begins or ends.
        self.free = asyncio.Semaphore(max_connections)
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
        timeout: seconds that one attempt may take in all, from connecting to the answer's last byte.
            The wait for a free connection does not count.
        max_retries: how often a failed request is tried again.
        backoff: seconds before the first retry, about; twice as long before each further one.
        max_connections: most connections at once, per event loop; requests wait for one.
        wait_ready: seconds for which a request waits for a server that is not there, since it starts or
            restarts: that refuses or breaks connections, or has status 502, 503 or 504. Such attempts do
            not count.
        name: what is closed, in the error of a request that comes too late.
        error: makes the error of a request that failed for good, from what :class:`HttpError` takes.

    Raises:
        ImportError: if httpx is not installed.
        ValueError: if ``url`` is no HTTP address, or a number is out of range.
        TypeError: if a number is none.

    Examples:
        >>> client = HttpClient("http://localhost:8000/score")  # doctest: +SKIP
        >>> await client.post({"queries": ["a"]}, lambda said: said["rewards"])  # doctest: +SKIP
        [0.5]
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        max_retries: int = 3,
        backoff: float = 0.5,
        max_connections: int = 256,
        wait_ready: float = 0.0,
        name: str = "client",
        error: Callable[[str, int, str], Exception] = HttpError,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}.")
        above_zero = {"timeout": timeout, "max_connections": max_connections}
        not_below = {"max_retries": max_retries, "backoff": backoff, "wait_ready": wait_ready}
        for what, number in {**above_zero, **not_below}.items():
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{what} must be a number, got {number!r}.")
            if what in above_zero and not number > 0:
                raise ValueError(f"{what} must be positive, got {number}.")
            if not number >= 0:
                raise ValueError(f"{what} must not be negative, got {number}.")
        try:
            import httpx
        except ImportError:
            raise ImportError(
                "asking a server needs httpx: pip install 'torchrl-mt[server]'"
            ) from None
        _check_host(url, httpx)
        self.url = url
        self._httpx = httpx
        self._max_retries = max_retries
        self._backoff = backoff
        self._timeout = timeout
        self._max_connections = max_connections
        self._wait_ready = wait_ready
        self._name = name
        self._error = error
        self._options: dict[str, Any] = {
            "headers": {"Content-Type": "application/json", **(headers or {})},
            # The limit is set on whole attempts: httpx's are on single reads and writes.
            "timeout": None,
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
        self,
        body: Mapping[str, Any],
        parse: Callable[[Any], _A],
        *,
        on_attempt: Callable[[], object] = lambda: None,
    ) -> _A:
        """Post ``body`` and return the answer.

        Connection errors, attempts that take too long and the statuses 408, 425, 429 and 5xx are
        retried; a ``Retry-After`` is kept to, unless it asks for more than ``timeout`` seconds, which
        fails.

        Args:
            body: what is sent as JSON.
            parse: called with the answer's JSON. A :class:`TryAgainError` is retried as well; any other
                ``ValueError``, a ``LookupError`` or a ``TypeError`` is a failure.
            on_attempt: called as an attempt begins.

        Returns:
            What ``parse`` made of the answer.

        Raises:
            HttpError: if the server refuses, or the last retry failed; or what ``error`` makes.
            TypeError: if ``body`` cannot be said in JSON.
            RuntimeError: if the client is closed.
        """
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"the request must be fit for JSON: {error}.") from error
        async with self._session() as session:
            task = asyncio.ensure_future(self._post(session, content, parse, on_attempt))
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
                raise self._too_late()
            if failure is not None:
                raise failure
            return task.result()

    def close(self) -> None:
        """Fail every request under way; closing again does nothing."""
        with self._lock:
            self._closed = True
            sessions = dict(self._sessions)
        with suppress(RuntimeError):
            own = sessions.pop(asyncio.get_running_loop(), None)
            if own is not None:
                own.cancel()
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
                raise self._too_late()
            session = self._sessions.get(loop)
            if session is None:
                client = self._httpx.AsyncClient(**self._options)
                session = self._sessions[loop] = _Session(client, self._max_connections)
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
                # A task of its own: a request that is cancelled once more must not leave sockets.
                closing = asyncio.ensure_future(session.client.aclose())
                closing.add_done_callback(lambda _: session.ended.set())
                await asyncio.shield(closing)

    async def _post(
        self,
        session: _Session,
        content: bytes,
        parse: Callable[[Any], _A],
        on_attempt: Callable[[], object],
    ) -> _A:
        """Try until an attempt succeeds."""
        cause: Exception | None
        loop, attempt, away_since = asyncio.get_running_loop(), 0, None
        while True:
            attempt, wait, is_away = attempt + 1, 0.0, False
            try:
                async with session.free:
                    on_attempt()
                    response = await _within(
                        self._timeout, session.client.post(self.url, content=content)
                    )
            except asyncio.TimeoutError as error:
                cause, reason = error, f"no answer within {self._timeout} seconds"
            except (self._httpx.TransportError, self._httpx.DecodingError) as error:
                cause, reason = error, f"{type(error).__name__}: {str(error) or 'no message'}"
                is_away = isinstance(error, self._httpx.TransportError)
            else:
                if response.is_success:
                    try:
                        return parse(_payload(response))
                    except TryAgainError as error:
                        cause, reason = error, str(error)
                    except (ValueError, RecursionError) as error:
                        raise self._error(self.url, attempt, str(error)) from error
                    except (LookupError, TypeError) as error:
                        unfit = f"the answer lacks what is read: {error!r}"
                        raise self._error(self.url, attempt, unfit) from error
                else:
                    cause, reason = None, f"status {response.status_code}: {_message(response)}"
                    is_away = response.status_code in _AWAY
                    if response.status_code not in _RETRIED and response.status_code < 500:
                        raise self._error(self.url, attempt, reason)
                    wait = _retry_after(response.headers.get("retry-after"))
                    if wait > self._timeout and not (is_away and self._wait_ready):
                        reason += f" (the server asks to wait {wait:.0f} seconds)"
                        raise self._error(self.url, attempt, reason)
            now = loop.time()
            away_since = (now if away_since is None else away_since) if is_away else None
            if away_since is not None and now < (until := away_since + self._wait_ready):
                attempt -= 1
                await asyncio.sleep(min(_AWAY_PAUSE * self._random.uniform(0.5, 1.5), until - now))
                continue
            if attempt > self._max_retries:
                raise self._error(self.url, attempt, reason) from cause
            pause = min(self._backoff * 2 ** (attempt - 1), _LONGEST_BACKOFF)
            # Spread out, so that requests that failed together do not come back together.
            await asyncio.sleep(max(wait, pause * self._random.uniform(0.5, 1.5)))

    def _too_late(self) -> RuntimeError:
        """What requests to a closed client fail with."""
        return RuntimeError(f"the {self._name} is closed: make a new one.")


def _check_host(url: str, httpx: Any) -> None:
    """Refuse an address that nothing can be sent to."""
    try:
        # Reading the port is what finds it out of range.
        host, _ = httpx.URL(url).host, urlsplit(url).port
        fault = None if host else "it has no host"
    except (httpx.InvalidURL, ValueError) as error:
        fault = str(error)
    if fault is not None:
        raise ValueError(
            f"url must be an address with a host and, if any, a port up to 65535, got {url!r}: {fault}."
        )


async def _within(seconds: float, call: Coroutine[Any, Any, _A]) -> _A:
    """The result of ``call``, which has ended when this returns or raises.

    Raises:
        asyncio.TimeoutError: if there is none in time.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
    finally:
        if task.cancel():
            await asyncio.wait([task])
    return task.result()


def _payload(response: Any) -> Any:
    """The JSON of an answer."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is no JSON ({error}): {response.text[:200]!r}") from error


def _message(response: Any) -> str:
    """What a server says about its refusal."""
    try:
        said = json.loads(response.content)
        said = said.get("error", said)
        said = str(said.get("message", said) if isinstance(said, Mapping) else said)
    except (ValueError, AttributeError, RecursionError):
        said = response.text
    return said[:500] or "(no message)"


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
    except (ValueError, OverflowError):
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())
