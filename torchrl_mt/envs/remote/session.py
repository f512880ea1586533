"""A client's session: one WebSocket, on which every reply belongs to the last question.

A call that is cancelled or late, or a connection that breaks, closes the session for good, so that its
answer is never taken for the next one.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import random
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from torchrl_mt.checks import import_extra, shown
from torchrl_mt.envs.remote.errors import (
    CapacityReached,
    OpenEnvConnectionError,
    OpenEnvError,
    OpenEnvProtocolError,
    OpenEnvTimeoutError,
)
from torchrl_mt.envs.remote.protocol import (
    CAPACITY_CLOSE_CODE,
    FORM_HEADER,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    ErrorCode,
    quiet_logger,
    write,
)
from torchrl_mt.server_load import ServerLoad, choose
from torchrl_mt.strict_json import read_json

__all__ = ["Session", "open_session", "websocket_address"]

_PING_SECONDS = 20.0
"""How often the client pings, so that nothing between the two ends closes a connection as unused."""
_GOODBYE_SECONDS = 5.0
"""How long a client waits for a server to take leave."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two attempts at servers whose sessions are all in use, about."""
_PATIENCE = 10.0
"""Seconds after which such a wait is logged."""
_AVOIDED_SECONDS = 5.0
"""For how long a server that refused or was not there is tried after the others."""

_logger = logging.getLogger("torchrl_mt")


_lock = (
    threading.RLock()
)  # A session may be garbage collected while the same thread holds the lock.
_servers: dict[str, ServerLoad] = {}
"""The sessions of this process, by server."""
_queues: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str, ...], asyncio.Lock]
] = weakref.WeakKeyDictionary()
"""Of each event loop and each group of servers: who waits for a session. Only the first asks."""


class Session:
    """An open session. :func:`open_session` makes it.

    Args:
        server: the server, on which a request has begun; it ends with the session.
        connection: the open WebSocket.
        timeout: seconds for each reply.
    """

    def __init__(self, server: ServerLoad, connection: Any, timeout: float) -> None:
        self.url = server.address
        self.knows_step_ids = FORM_HEADER in connection.response.headers
        """Whether the server is ours, whose steps may carry a ``step_id``."""
        self._connection: Any = connection
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._lost = "it was closed"
        """Why the session has ended, if it has."""
        self._leave = weakref.finalize(self, _leave, server)

    async def ask(self, call: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and return the data of the observation that answers it.

        Raises:
            CapacityReached: if the server has no room for the session.
            OpenEnvError: if the server answers with an error. The session goes on.
            OpenEnvConnectionError: if the session was lost, now or before.
            OpenEnvTimeoutError: if no reply came in time; the session has ended.
            OpenEnvProtocolError: if the reply is not understood; the session has ended. Or if the
                message is too large; nothing was sent.
            TypeError, ValueError: if the message is not fit for JSON; nothing was sent.
        """
        connection = self._connection
        if connection is None:
            raise OpenEnvConnectionError(self.url, call, f"the session has ended: {self._lost}")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{call} was called on another event loop than reset: play an episode on one loop, such "
                "as in one asyncio.run(...)."
            )
        text = write(message)
        if self.knows_step_ids and len(text) > MAX_REQUEST_BYTES:  # JSON is ASCII here
            raise OpenEnvProtocolError(
                self.url,
                call,
                f"the message has {len(text)} bytes, but the server reads at most {MAX_REQUEST_BYTES}",
            )
        closed = import_extra("websockets.exceptions", "remote").ConnectionClosed
        receiving = asyncio.ensure_future(connection.recv())
        try:
            with self._in_time(connection, self._timeout) as late:
                await asyncio.sleep(0)
                unasked = receiving.done()
                with suppress(closed):  # what the server said before it closed may be there to read
                    await connection.send(text)
                raw = await receiving
        except closed as error:
            if late:
                self.drop(f"{call} was not answered within {self._timeout:g} seconds")
                raise OpenEnvTimeoutError(
                    self.url, call, f"no reply within {self._timeout:g} seconds"
                ) from error
            self.drop("the connection was lost")
            raise self._closed_error(call, error) from error
        except BaseException:
            self.drop(f"{call} was cancelled before it was answered")
            raise
        finally:
            receiving.cancel()
        try:
            data = self._read(call, raw)
            if unasked:  # an error may come unasked: a refusal
                raise OpenEnvProtocolError(
                    self.url, call, f"the server sent an observation unasked: {raw[:80]!r}"
                )
            return data
        except OpenEnvProtocolError:
            self.drop(f"the reply to {call} was not understood")
            raise

    async def close(self) -> None:
        """Take leave of the server; a session that has ended stays so."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._leave()
        closed = import_extra("websockets.exceptions", "remote").ConnectionClosed
        if asyncio.get_running_loop() is not self._loop:
            with suppress(RuntimeError):  # That loop may be closed.
                self._loop.call_soon_threadsafe(_break, connection)
            return
        try:
            with self._in_time(connection, _GOODBYE_SECONDS), suppress(closed):
                await connection.send(write({"type": "close"}))
                await connection.close()
        finally:
            _break(connection)

    def drop(self, reason: str) -> None:
        """End the session at once, without a word to the server, which sees the connection end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._lost = reason
            self._leave()
            with suppress(RuntimeError):  # Its event loop may be closed.
                _break(connection)

    @contextmanager
    def _in_time(self, connection: Any, seconds: float) -> Iterator[list[bool]]:
        """Break the connection after some seconds; the list is not empty then."""
        late: list[bool] = []

        def end() -> None:
            late.append(True)
            _break(connection)

        timer = asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield late
        finally:
            timer.cancel()

    def _read(self, call: str, raw: str | bytes) -> Mapping[str, Any]:
        """The data of an observation."""
        try:
            answer = read_json(raw)
        except ValueError as error:
            raise OpenEnvProtocolError(
                self.url, call, f"the reply is no JSON ({error}): {raw[:80]!r}"
            ) from None
        kind = answer.get("type") if isinstance(answer, dict) else None
        data = answer.get("data") if isinstance(answer, dict) else None
        if kind not in ("observation", "error") or not isinstance(data, dict):
            raise OpenEnvProtocolError(
                self.url,
                call,
                "the reply must be a JSON object with type 'observation' or 'error' and data, got "
                f"{shown(answer)}",
            )
        if kind == "error":
            raise self._error(call, data)
        return data

    def _error(self, call: str, data: Mapping[str, Any]) -> OpenEnvError:
        """An error that the server sent."""
        code, message = str(data.get("code", "no code")), str(data.get("message", "no message"))
        if code == ErrorCode.CAPACITY_REACHED.value:
            return CapacityReached(self.url, call, message, code)
        if "errors" in data:
            message = f"{message}: {str(data['errors'])[:500]}"
        return OpenEnvError(self.url, call, f"the server says {code}: {message[:1000]}", code)

    def _closed_error(self, call: str, error: Any) -> OpenEnvError:
        """The error for a connection that was closed while a reply was awaited."""
        received, sent = error.rcvd, error.sent
        if received is not None and received.code == CAPACITY_CLOSE_CODE:
            return CapacityReached(self.url, call, received.reason or "try again later")
        malformed = {
            1002: "the reply breaks the rules of WebSockets",
            1007: "the reply is no UTF-8",
            1009: f"the reply is larger than {MAX_ANSWER_BYTES} bytes",
        }
        if sent is not None and sent.code in malformed and not error.rcvd_then_sent:
            return OpenEnvProtocolError(self.url, call, malformed[sent.code])
        if received is None:
            why = "the connection broke"
        else:
            why = f"the server closed it with code {received.code} {received.reason}"
        if received is not None and received.code == 1009:
            why += ", because the message was too large"
        return OpenEnvConnectionError(self.url, call, f"the session was lost: {why}")


def _break(connection: Any) -> None:
    """End a connection at once. A transport that has ended cannot be ended again."""
    if connection.close_code is None:
        connection.transport.abort()


async def open_session(
    urls: Sequence[str], headers: Mapping[str, str], timeout: float, first: Mapping[str, Any]
) -> tuple[Session, Mapping[str, Any]]:
    """Open a session at one of the servers, and ask it the first question, a reset.

    Servers whose sessions are all in use are asked again until one has room, by one caller at a time.

    Returns:
        The session, and the reply.

    Raises:
        OpenEnvConnectionError: if no server can be reached.
        OpenEnvError: as :meth:`Session.ask` does.
    """
    queues = _queues.setdefault(asyncio.get_running_loop(), {})
    queue = queues.setdefault(tuple(urls), asyncio.Lock())
    if not queue.locked():
        try:
            return await _open_any(urls, headers, timeout, first)
        except CapacityReached:
            pass
    async with queue:
        pause, begin, logged = _FIRST_PAUSE, time.monotonic(), False
        while True:
            try:
                return await _open_any(urls, headers, timeout, first)
            except CapacityReached as refusal:
                if not logged and time.monotonic() - begin > _PATIENCE:
                    logged = True
                    _logger.warning(
                        "%s Episodes wait for a free session of %d server(s); a lower max_concurrency "
                        "of the collector, or num_envs of a loader, would not begin more than there "
                        "is room for.",
                        refusal,
                        len(urls),
                    )
            # Jitter, so that processes that were refused together do not ask again together.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE)


async def _open_any(
    urls: Sequence[str], headers: Mapping[str, str], timeout: float, first: Mapping[str, Any]
) -> tuple[Session, Mapping[str, Any]]:
    """Open a session at the first server that has one; raise the last error, or that one is full."""
    full: CapacityReached | None = None
    unreachable: OpenEnvConnectionError | None = None
    untried = [_servers.setdefault(url, ServerLoad(url)) for url in urls]
    while untried:
        with (
            _lock
        ):  # Begin at once, so that sessions that are opened together go to different servers.
            server = choose(untried)
            server.begin()
        untried.remove(server)
        try:
            session = await _connect(server, headers, timeout)
        except CapacityReached as refusal:
            full = refusal
        except OpenEnvConnectionError as error:
            unreachable = error
        else:
            try:
                answer = await session.ask("reset", first)
                server.works()
                return session, answer
            except CapacityReached as refusal:
                session.drop("the server had no room")
                full = refusal
            except BaseException as error:
                session.drop(f"reset failed: {error}")
                raise
        server.fail(_AVOIDED_SECONDS)
    failure = full or unreachable
    assert failure is not None
    raise failure


def _leave(server: ServerLoad) -> None:
    """A session at a server has ended."""
    with _lock:
        server.end()


async def _connect(server: ServerLoad, headers: Mapping[str, str], timeout: float) -> Session:
    """Open a connection at a server on which a request has begun."""
    exceptions = import_extra("websockets.exceptions", "remote")
    url, session = server.address, None
    try:
        connection = await _connector()(
            url,
            additional_headers=headers,
            open_timeout=timeout,
            compression=None,
            max_size=MAX_ANSWER_BYTES,
            ping_interval=_PING_SECONDS,
            ping_timeout=None,  # the timeout tells a server that is gone from one that is busy
            close_timeout=_GOODBYE_SECONDS,
            logger=quiet_logger,
            ssl=_certificates() if url.startswith("wss:") else None,
            **({"proxy": None} if _is_here(url) else {}),
        )
        session = Session(server, connection, timeout)
        return session
    except exceptions.InvalidStatus as error:
        status, body = error.response.status_code, error.response.body or b""
        said = body[:200].decode("utf-8", "replace").strip()
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            raise CapacityReached(url, "connect", f"status {status}: {said}") from None
        if place := error.response.headers.get("Location"):
            said = f"moved to {place[:200]}: give that address"
        raise OpenEnvConnectionError(url, "connect", f"status {status}: {said}") from None
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise OpenEnvConnectionError(
            url, "connect", f"not open within {timeout:g} seconds"
        ) from error
    except (OSError, EOFError, exceptions.WebSocketException) as error:
        reason = f"{type(error).__name__}: {error}"
        raise OpenEnvConnectionError(url, "connect", reason) from error
    finally:
        if session is None:
            _leave(server)


@functools.cache
def _connector() -> Any:
    """The connector of websockets, which here follows no redirects: headers may have secrets."""

    class Connect(import_extra("websockets.asyncio.client", "remote").connect):  # type: ignore[misc]
        def process_redirect(self, exc: Exception) -> Exception:
            return exc

    return Connect


@functools.cache
def _certificates() -> ssl.SSLContext:
    """What tells whom to trust; loading it takes longer than opening a session nearby."""
    return ssl.create_default_context()


def _is_here(url: str) -> bool:
    """Whether an address is this machine's own, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def websocket_address(url: Any) -> str:
    """The address of sessions at a server.

    Raises:
        ValueError: if ``url`` is no address of a server.

    Examples:
        >>> websocket_address("http://localhost:8000"), websocket_address("wss://a.space/env/ws")
        ('ws://localhost:8000/ws', 'wss://a.space/env/ws')
    """
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    try:
        parts = urlsplit(url)
        scheme, host, _ = schemes[parts.scheme], parts.hostname, parts.port
        if not host or parts.query or parts.fragment or any(c.isspace() for c in url):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            "base_url must begin with http://, https://, ws:// or wss:// and have a host and, if any, a "
            f"port up to 65535, got {url!r}."
        ) from None
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}/ws"
