"""Post JSON to an HTTP server: every attempt has a time limit, and no socket is left open.

httpx sends and tenacity retries. This module decides what is retried and how long connections live. A
client works on any number of event loops. Each loop has its own connections while it has open requests,
so a loop may end at any time between requests.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from numbers import Real
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["AttemptError", "HttpClient", "HttpError", "Target", "TryAgainError"]

_A = TypeVar("_A")

_RETRIED = frozenset({408, 425, 429})
"""Statuses that are retried; so is every 5xx."""
_AWAY = frozenset({502, 503, 504})
"""Statuses of a server that starts or restarts."""
_AWAY_PAUSE = 1.0
"""Seconds between two attempts at such a server, about."""
_LONGEST_BACKOFF = 60.0
_ABORT_TIMEOUT = 2.0
"""Seconds for the request that has a server give another one up."""


class HttpError(RuntimeError):
    """A request failed, and retries did not help.

    Args:
        url: address of the request.
        attempts: number of attempts.
        reason: why the last attempt failed.
    """

    asked = "POST"
    """Start of the message, before the address."""

    def __init__(self, url: str, attempts: int, reason: str) -> None:
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"{self.asked} {url} failed after {times}: {reason}")
        self.url = url
        self.attempts = attempts
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.attempts, self.reason)


class TryAgainError(ValueError):
    """Raised by ``parse`` if the server gave no real reply and a retry may get one."""


class AttemptError(Exception):
    """One attempt failed; the cause is the original error, if any."""

    def __init__(
        self, reason: str, *, final: bool = False, away: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(reason)
        self.final = final
        """Whether a retry would fail too."""
        self.away = away
        """Whether the server seems to start or restart."""
        self.wait = wait
        """Seconds to wait, as the server asks."""
        self.refused = False
        """Whether nothing listens there, or a proxy says that nothing does."""
        self.timed_out = False
        """Whether there was no reply in time."""
        self.given_up = False
        """Whether the server gave no real reply, and a retry may get one."""
        self.status: int | None = None
        """Status of the reply, if there was one and it was no success."""
        self.at_once = False
        """Set by a target if another attempt should begin at once, as part of this one."""
        self.url = ""
        """Address of the attempt."""


@dataclass(frozen=True)
class Target:
    """Where one attempt of a request goes."""

    url: str
    """The address."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body."""
    abort: tuple[str, Mapping[str, Any]] | None = None
    """Address and body of what is posted to free the server if the attempt is cancelled or times out."""


class _Connections:
    """Connections of one event loop, and the tasks that use them."""

    def __init__(self, client: Any, max_connections: int) -> None:
        self.client = client
        # httpx scans its own queue whenever a request begins or ends, which is slow.
        self.free = asyncio.Semaphore(max_connections)
        self.tasks: set[asyncio.Task[Any]] = set()

    def cancel(self) -> None:
        """Cancel all open requests; call it on their loop."""
        for task in self.tasks:
            task.cancel()


class HttpClient:
    """Posts JSON to one address, from any number of event loops.

    Args:
        url: the address.
        headers: sent with every request.
        timeout: seconds for one attempt, from connecting to the reply's last byte. Waiting for a free
            connection does not count.
        max_retries: maximum number of retries of a request.
        backoff: seconds before the first retry, about; doubles for each further one.
        max_connections: maximum number of connections per event loop; further requests wait.
        wait_ready: seconds that a request waits for a server that starts or restarts: connections are
            refused or break, or the status is 502, 503 or 504. The client tries about once a second,
            which counts as one attempt in all. Afterwards the request fails.
        name: name of the client in the error of a request after :meth:`close`.
        error: makes the final error of a request, from the arguments of :class:`HttpError`.

    Raises:
        ImportError: if httpx or tenacity is not installed.
        ValueError: if ``url`` is no HTTP address, or a number is out of range.
        TypeError: if a numeric argument is no number.

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
            import tenacity
        except ImportError as missing:
            raise ImportError(
                f"asking a server needs {missing.name}: pip install 'torchrl-mt[server]'."
            ) from None
        _check_address(url, httpx)
        self.url = url
        self._httpx = httpx
        self._tenacity = tenacity
        self._max_retries = max_retries
        self._backoff = backoff
        self._timeout = timeout
        self._max_connections = max_connections
        self._wait_ready = wait_ready
        self._name = name
        self._error = error
        self._options: dict[str, Any] = {
            "headers": {"Content-Type": "application/json", **(headers or {})},
            # httpx's timeouts are for single reads and writes; ours is for a whole attempt.
            "timeout": None,
            "limits": httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            # Loading certificates takes longer than a request on a local network.
            "verify": httpx.create_ssl_context() if url.startswith("https:") else False,
        }
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = (
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
        target: Callable[[], AbstractAsyncContextManager[Target]] | None = None,
    ) -> _A:
        """Post ``body`` and return the parsed reply.

        Connection errors, timeouts and the statuses 408, 425, 429 and 5xx are retried. A ``Retry-After``
        is obeyed; if it exceeds ``timeout`` seconds, the request fails.

        Args:
            body: sent as JSON.
            parse: called with the reply's JSON. If it raises :class:`TryAgainError`, the request is
                retried; any other ``ValueError``, a ``LookupError`` or a ``TypeError`` fails it.
            target: makes a context manager for each attempt, which gives its address; ``None`` is the
                client's own. An attempt's :class:`AttemptError` is raised within it.

        Returns:
            The result of ``parse``.

        Raises:
            HttpError: if the server refuses, or the last retry failed. With ``error``, its error.
            TypeError: if ``body`` cannot be encoded as JSON.
            RuntimeError: if the client is closed.
        """
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TypeError(f"the request must be fit for JSON: {error}.") from error
        # In a task, so that close() can cancel it without cancelling the caller.
        aim = self._own_target if target is None else target
        task = asyncio.ensure_future(self._post(content, parse, aim))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # asyncio logs exceptions that are never retrieved
        if task.cancelled():
            raise self._closed_error()
        return task.result()

    def close(self) -> None:
        """Fail all open requests and close their connections; closing again does nothing."""
        with self._lock:
            self._closed = True
            by_loop = dict(self._by_loop)
        for loop, connections in by_loop.items():
            with suppress(RuntimeError):  # a closed loop has no open requests
                loop.call_soon_threadsafe(connections.cancel)

    async def _post(
        self,
        content: bytes,
        parse: Callable[[Any], _A],
        target: Callable[[], AbstractAsyncContextManager[Target]],
    ) -> _A:
        """Retry until an attempt succeeds or retries are used up."""
        library, pause = self._tenacity, _AWAY_PAUSE
        while_away = library.AsyncRetrying(
            retry=library.retry_if_exception(lambda error: getattr(error, "away", False)),
            stop=library.stop_after_delay(self._wait_ready),
            wait=library.wait_random(0.5 * pause, 1.5 * pause),
            sleep=asyncio.sleep,
            reraise=True,
        )
        retrying = library.AsyncRetrying(
            retry=library.retry_if_exception(self._is_retried),
            stop=library.stop_after_attempt(self._max_retries + 1),
            # Jitter, so that requests that failed together do not retry together.
            wait=library.wait_exponential(self._backoff, max=_LONGEST_BACKOFF)
            + library.wait_random(0, self._backoff)
            + library.wait_exception(lambda error: error.wait),
            sleep=asyncio.sleep,
            reraise=True,
        )
        async with self._connections() as connections:
            try:
                return await retrying(
                    while_away, self._attempt, connections, content, parse, target
                )
            except AttemptError as error:
                attempts = retrying.statistics["attempt_number"]
                raise self._error(error.url, attempts, str(error)) from error.__cause__

    def _is_retried(self, error: BaseException) -> bool:
        """Whether to retry after an error; with ``wait_ready``, a server that is away had its wait."""
        if not isinstance(error, AttemptError) or error.final:
            return False
        return not (error.away and self._wait_ready)

    @asynccontextmanager
    async def _own_target(self) -> AsyncIterator[Target]:
        yield Target(self.url)

    async def _attempt(
        self,
        connections: _Connections,
        content: bytes,
        parse: Callable[[Any], _A],
        target: Callable[[], AbstractAsyncContextManager[Target]],
    ) -> _A:
        """Attempt a request once, or as often as its targets say at once."""
        while True:
            try:
                async with connections.free, target() as aim:
                    try:
                        return await self._send(connections, content, parse, aim)
                    except AttemptError as error:
                        error.url = aim.url
                        raise
            except AttemptError as error:
                error.url = error.url or self.url
                if not error.at_once:
                    raise

    async def _send(
        self, connections: _Connections, content: bytes, parse: Callable[[Any], _A], aim: Target
    ) -> _A:
        transport_error = self._httpx.TransportError
        if aim.fields:
            # The body is a JSON object with at least one field.
            content = json.dumps(aim.fields).encode()[:-1] + b", " + content[1:]
        try:
            request = connections.client.post(aim.url, content=content)
            response = await asyncio.wait_for(request, self._timeout)
        except asyncio.CancelledError:
            await self._abort(connections, aim)
            raise
        except asyncio.TimeoutError as error:
            await self._abort(connections, aim)
            failed = AttemptError(f"no reply within {self._timeout} seconds")
            failed.timed_out = True
            raise failed from error
        except (transport_error, self._httpx.DecodingError) as error:
            reason = f"{type(error).__name__}: {str(error) or 'no message'}"
            failed = AttemptError(reason, away=isinstance(error, transport_error))
            failed.refused = isinstance(error, self._httpx.ConnectError)
            raise failed from error
        if not response.is_success:
            raise self._status_error(response)
        try:
            return parse(_payload(response))
        except (ValueError, RecursionError) as error:
            failed = AttemptError(str(error), final=not isinstance(error, TryAgainError))
            failed.given_up = not failed.final
            raise failed from error
        except (LookupError, TypeError) as error:
            unfit = f"the reply lacks what is read: {error!r}"
            raise AttemptError(unfit, final=True) from error

    async def _abort(self, connections: _Connections, aim: Target) -> None:
        """Have the server give a request up; a server that does not answer is left alone."""
        if aim.abort is None:
            return
        url, body = aim.abort
        with suppress(self._httpx.HTTPError, asyncio.TimeoutError):
            sent = connections.client.post(url, content=json.dumps(body).encode())
            await asyncio.wait_for(sent, _ABORT_TIMEOUT)

    def _status_error(self, response: Any) -> AttemptError:
        """The error for a status other than success."""
        code, reason = response.status_code, f"status {response.status_code}: {_message(response)}"
        away = code in _AWAY
        final = code not in _RETRIED and code < 500
        wait = 0.0 if final else _retry_after(response.headers.get("retry-after"))
        if wait > self._timeout and not (away and self._wait_ready):
            reason += f" (the server asks to wait {wait:.0f} seconds)"
            final = True
        error = AttemptError(reason, final=final, away=away and not final, wait=wait)
        error.refused, error.status = error.away, code
        return error

    @asynccontextmanager
    async def _connections(self) -> AsyncIterator[_Connections]:
        """The running loop's connections, with the current task registered."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._closed:
                raise self._closed_error()
            connections = self._by_loop.get(loop)
            if connections is None:
                client = self._httpx.AsyncClient(**self._options)
                connections = self._by_loop[loop] = _Connections(client, self._max_connections)
            connections.tasks.add(task)
        try:
            yield connections
        finally:
            with self._lock:
                connections.tasks.discard(task)
                if not connections.tasks:
                    self._by_loop.pop(loop, None)
            if not connections.tasks:
                # A task that is cancelled here must still close its sockets.
                await asyncio.shield(connections.client.aclose())

    def _closed_error(self) -> RuntimeError:
        """The error of a request to a closed client."""
        return RuntimeError(f"the {self._name} is closed: make a new one.")


def _check_address(url: Any, httpx: Any) -> None:
    """Raise an error unless ``url`` is an HTTP address."""
    with suppress(httpx.InvalidURL, ValueError, TypeError, AttributeError):
        # Reading the port raises if it is out of range.
        host, _ = httpx.URL(url).host, urlsplit(url).port
        if host and url.startswith(("http://", "https://")):
            return
    raise ValueError(
        "url must begin with http:// or https:// and have a host and, if any, a port up to 65535, got "
        f"{url!r}."
    )


def _payload(response: Any) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is no JSON ({error}): {response.text[:200]!r}") from error


def _message(response: Any) -> str:
    try:
        said = json.loads(response.content)
        said = said.get("error", said)
        said = str(said.get("message", said) if isinstance(said, Mapping) else said)
    except (ValueError, AttributeError, RecursionError):
        said = response.text
    return said[:500] or "(no message)"


def _retry_after(header: str | None) -> float:
    """Seconds to wait by a ``Retry-After`` header, which has seconds or a date."""
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
