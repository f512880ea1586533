"""A server of text environments for other machines.

It answers only addresses and tokens that it was told to answer. No client, however it behaves, disturbs
another one's session, and nothing runs on once the server is stopped.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from torchrl_mt.checks import check_positive_finite, check_positive_integer, import_extra
from torchrl_mt.envs.remote.protocol import (
    CAPACITY_CLOSE_CODE,
    FORM_HEADER,
    MAX_REQUEST_BYTES,
    ErrorCode,
    error_message,
    quiet_logger,
)
from torchrl_mt.envs.remote.served_session import CLOSE_SECONDS, ServedSession, dismiss
from torchrl_mt.envs.text_env import TextEnv

__all__ = ["EnvServer", "ServerOptions", "check_factory", "listen", "serve", "url_of"]

_PING_SECONDS = 20.0
"""How often the server asks whether the client's machine is there."""
_PONG_SECONDS = 60.0
"""How long a client may take to say so: its event loop may be busy."""

_logger = logging.getLogger("torchrl_mt")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def serve(
    make_env: Callable[[], TextEnv],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    allowed_ips: Iterable[str] = ("127.0.0.1", "::1"),
    max_sessions: int = 64,
    idle_timeout: float = 300.0,
) -> EnvServer:
    """Serve text environments to other processes and machines, by OpenEnv's protocol.

    Clients are :class:`~torchrl_mt.envs.OpenEnvEnv` and those of the ``openenv`` package: an action is
    ``{"response": "..."}``, an observation ``{"messages": [...]}``. Each connection is a session with an
    environment of its own, which is closed when the connection ends. Plain methods run in threads, as in
    collectors, so one that hangs delays no other session. The server runs in a thread of its own.

    Messages are JSON. A step with the ``"step_id"`` of the step before is answered again, but not
    executed again. ``GET /health`` tells that the server runs, and its number of sessions.

    Needs ``pip install 'torchrl-mt[remote]'``.

    Args:
        make_env: the class of a ``TextEnv``, or a callable that makes one, for each session.
        host: address to listen on, such as ``"0.0.0.0"`` for all of this machine.
        port: port to listen on; 0 takes a free one.
        token: what clients must send as ``Authorization: Bearer <token>``; others get status 401.
            Connections are not encrypted: across networks that others can read, use a proxy that speaks
            TLS.
        allowed_ips: addresses and networks (``"10.0.0.0/8"``) of clients; others get status 403.
        max_sessions: maximum number of sessions at a time; further ones are refused. A call of a plain
            method whose client left before it returned runs on in its thread, and does not count.
        idle_timeout: seconds without a request after which a session ends. The model samples between two
            requests.

    Returns:
        A handle: ``url`` is for clients, ``stop()`` ends the server. It is a context manager, too.

    Raises:
        TypeError: if ``make_env`` cannot be called without arguments, or an argument has a wrong type.
        ValueError: if an argument is out of range, or ``host`` is not loopback and ``token`` is missing.
        OSError: if the address cannot be used.
        ImportError: if websockets is not installed.

    Examples:
        >>> from torchrl_mt.envs import TextEnv, TextStep
        >>> class Echo(TextEnv):
        ...     def reset(self, data=None):
        ...         return [{"role": "user", "content": data["word"]}]
        ...
        ...     def step(self, response):
        ...         return TextStep(reward=float(len(response)), done=True)
        >>> with serve(Echo) as server:
        ...     print(server.url.rpartition(":")[0])
        http://127.0.0.1
    """
    check_factory(make_env)
    options = ServerOptions(token, allowed_ips, max_sessions, idle_timeout)
    return EnvServer(make_env, listen(host, port, token), options)


@dataclass(frozen=True)
class ServerOptions:
    """Arguments of :func:`serve`, checked. They can be sent to other processes."""

    token: str | None
    allowed_ips: Iterable[str]
    max_sessions: int
    idle_timeout: float
    networks: Sequence[_Network] = field(init=False)
    """Of ``allowed_ips``."""

    def __post_init__(self) -> None:
        check_positive_integer("max_sessions", self.max_sessions)
        check_positive_finite("idle_timeout", self.idle_timeout)
        _check_token(self.token)
        networks = _networks(self.allowed_ips)
        object.__setattr__(self, "networks", networks)
        object.__setattr__(self, "allowed_ips", [str(network) for network in networks])
        import_extra("websockets.asyncio.server", "remote")


class EnvServer:
    """A running server of text environments. :func:`serve` makes it.

    Args:
        make_env: makes the environment of a session.
        listening: the socket; the server closes it.
        options: the other arguments of :func:`serve`.
    """

    url: str
    """Address for clients, ``http://host:port``; of this machine if it listens on all addresses."""
    sessions: int
    """Number of sessions, those included whose environment is still being made or closed."""

    def __init__(
        self, make_env: Callable[[], TextEnv], listening: socket.socket, options: ServerOptions
    ) -> None:
        self._websockets = import_extra("websockets.asyncio.server", "remote")
        self._make_env = make_env
        self._options = options
        self.sessions = 0
        self._logged: set[str] = set()
        self._socket = listening
        self.url = url_of(listening)
        self._started: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="torchrl_mt-serve", daemon=True)
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """End all sessions, close their environments, and wait for it; stopping again does nothing.

        An environment that does not close within 10 seconds is left behind.
        """
        with suppress(RuntimeError):  # the loop is closed: it has been stopped
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def __enter__(self) -> EnvServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        """Serve until :meth:`stop`, in the server's thread."""
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._started.done():
                _logger.warning("a server of environments has ended.", exc_info=error)
            else:
                self._started.set_exception(error)
        finally:
            self._socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = await self._websockets.serve(
            self._handle,
            sock=self._socket,
            process_request=self._process_request,
            process_response=_mark,
            origins=[None],  # no web page in a browser may play
            compression=None,
            server_header=None,
            max_size=MAX_REQUEST_BYTES,
            ping_interval=_PING_SECONDS,
            ping_timeout=_PONG_SECONDS,
            close_timeout=CLOSE_SECONDS / 2,
            logger=quiet_logger,
        )
        self._started.set_result(None)
        await self._stopping.wait()
        server.close()
        # Longer than a session waits for its environment: for a call, its closing, and the handshake.
        await asyncio.wait({asyncio.ensure_future(server.wait_closed())}, timeout=3 * CLOSE_SECONDS)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_SECONDS)

    async def _handle(self, connection: Any) -> None:
        """Run the session of a connection, if there is room for it."""
        if self.sessions >= self._options.max_sessions:
            await self._refuse(connection)
            return
        self.sessions += 1
        try:
            idle = self._options.idle_timeout
            await ServedSession(connection, self._make_env, idle, self._logged).run()
        except Exception as error:
            _logger.warning("a session of a served environment has failed.", exc_info=error)
        finally:
            self.sessions -= 1

    async def _refuse(self, connection: Any) -> None:
        """Tell a client that all sessions are in use."""
        refusal = error_message(
            ErrorCode.CAPACITY_REACHED,
            f"all {self._options.max_sessions} sessions are in use; try again later.",
            active_sessions=self.sessions,
            max_sessions=self._options.max_sessions,
        )
        await dismiss(connection, refusal, CAPACITY_CLOSE_CODE, "all sessions are in use")

    def _process_request(self, connection: Any, request: Any) -> Any:
        """Refuse who may not enter; answer what is no session."""
        if not self._allows(connection.remote_address):
            return connection.respond(HTTPStatus.FORBIDDEN, "This address is not allowed.\n")
        path = request.path.partition("?")[0]
        if path == "/health":
            health = {"status": "healthy", "sessions": self.sessions}
            response = connection.respond(HTTPStatus.OK, json.dumps(health))
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "application/json"
            return response
        if not self._knows(request.headers.get_all("Authorization")):
            response = connection.respond(
                HTTPStatus.UNAUTHORIZED, "Authorization must be Bearer and the token.\n"
            )
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if path != "/ws":
            return connection.respond(HTTPStatus.NOT_FOUND, "Sessions are at /ws.\n")
        return None

    def _allows(self, address: Any) -> bool:
        """Whether a client's address is one of ``allowed_ips``."""
        if not address:  # the client has left already
            return False
        ip = ipaddress.ip_address(address[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        return any(ip in network for network in self._options.networks)

    def _knows(self, given: list[str]) -> bool:
        """Whether a request has the token, in a time that does not tell how much of it is right."""
        if self._options.token is None:
            return True
        expected = f"Bearer {self._options.token}".encode()
        if len(given) != 1:
            return False
        # Bytes that are no text come as half characters.
        return hmac.compare_digest(given[0].encode(errors="surrogateescape"), expected)


def _mark(connection: Any, request: Any, response: Any) -> None:
    """Tell the client that steps may carry a ``step_id``."""
    response.headers[FORM_HEADER] = "1"


def check_factory(make_env: Any) -> None:
    """Refuse what cannot be called without arguments."""
    if not callable(make_env):
        raise TypeError(
            "make_env must be the class of a TextEnv or a callable that makes one, got "
            f"{type(make_env).__name__}: give its class, or a function that makes one."
        )
    missing = sorted(getattr(make_env, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"make_env must be a class with all methods, but it has no {missing}.")
    try:
        inspect.signature(make_env).bind()
    except TypeError as error:
        raise TypeError(
            f"make_env must be called without arguments: {error}; give lambda: make_env(...)."
        ) from None
    except ValueError:  # such as functions that are written in C
        pass


def _check_token(token: Any) -> None:
    """Refuse a token that no header can hold."""
    if token is None:
        return
    if not isinstance(token, str):
        raise TypeError(f"token must be a string, got {type(token).__name__}.")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            "token must have ASCII characters and no spaces; it is empty or has others."
        )


def _networks(allowed_ips: Iterable[str]) -> list[_Network]:
    """Addresses as networks."""
    expected = "allowed_ips must be a list of addresses or networks such as '10.0.0.0/8'"
    if isinstance(allowed_ips, str) or not isinstance(allowed_ips, Iterable):
        raise TypeError(f"{expected}, got {allowed_ips!r}.")
    networks = []
    for given in allowed_ips:
        if not isinstance(given, str):
            raise TypeError(f"{expected}, got {given!r} in it.")
        try:
            networks.append(ipaddress.ip_network(given))
        except ValueError as error:
            raise ValueError(f"{expected}, got {given!r} in it: {error}.") from None
    return networks


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that listens; refuse to serve everybody without a token."""
    if not isinstance(host, str) or not host:
        raise TypeError(f"host must be an address such as '127.0.0.1', got {host!r}.")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port must be an integer from 0 to 65535, got {port!r}.")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # localhost: where most clients look
    family, *_, address = found[0]
    ip = ipaddress.ip_address(address[0])
    if not ip.is_loopback and token is None:
        raise ValueError(
            f"token must be given where the host is not loopback, got host={host!r} and no token: "
            "whoever reaches the port could play."
        )
    both = ip.is_unspecified and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=1024, dualstack_ipv6=both)


def url_of(listening: socket.socket) -> str:
    """Address of a socket for clients; of this machine if it listens on all addresses."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
