"""A JSON server on this machine that misbehaves on request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class FaultyServer(ThreadingHTTPServer):
    """Answers as it is told: ``faults`` are used up first, one a request."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults: list[Fault] = []
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.connections: set[Any] = set()
        self.open = 0
        self.most_open = 0
        self.disconnected = threading.Event()
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.handling = threading.local()
        """The handler of each thread's request."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status and the body of an answer without a fault."""
        raise NotImplementedError

    def look_up(self, path: str) -> tuple[int, Any]:
        """The status and the body of an answer to ``GET``."""
        return 404, {"error": {"message": f"no {path}"}}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections.add(self.connection)
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)

    def finish(self) -> None:
        with self.server.lock:
            self.server.connections.discard(self.connection)
            self.server.open -= 1
        super().finish()

    def do_GET(self) -> None:
        self.send(*self.server.look_up(self.path))

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {}
        self.server.handling.handler = self
        with self.server.lock:
            self.server.seen.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.monotonic())
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault is not None:
            fault(self)
        else:
            self.send(*self.server.answer(self.path, body))

    def send(self, status: int, answer: Any, **headers: str) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""


Fault = Callable[[Handler], None]


def status(code: int, message: str = "not now", **headers: str) -> Fault:
    """A refusal."""
    return lambda handler: handler.send(code, {"error": {"message": message}}, **headers)


def success(what: Any) -> Fault:
    """Whatever as a success; bytes as they are."""
    return lambda handler: handler.send(200, what)


def after(first: Callable[[], object], fault: Fault) -> Fault:
    """A fault before which something else happens."""
    return lambda handler: (first(), fault(handler))[1]


def half(handler: Handler) -> None:
    """A connection that breaks in the middle of the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"answer": [')
    handler.wfile.flush()
    handler.close_connection = True


def dripping(handler: Handler) -> None:
    """A body that never ends: a byte now and then, as proxies send to keep a connection."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    try:
        while not handler.server.release.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()
    except OSError:
        handler.server.disconnected.set()
    handler.close_connection = True


def nothing(handler: Handler) -> None:
    """A connection that is closed without an answer."""
    handler.close_connection = True


def silent(handler: Handler) -> None:
    """No answer, until the client hangs up or the test is over."""
    handler.connection.settimeout(0.02)
    while not handler.server.release.is_set():
        try:
            if handler.connection.recv(1) == b"":
                handler.server.disconnected.set()
                break
        except TimeoutError:
            continue
        except OSError:
            handler.server.disconnected.set()
            break
    handler.close_connection = True


AnyServer = TypeVar("AnyServer", bound=FaultyServer)


@contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    """A server, for as long as it is needed; when it ends, it hangs up on everybody."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        with server.lock:
            for connection in server.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()
