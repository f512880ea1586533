"""A reward server on this machine that misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Scores a query with its number of words; ``faults`` are used up first, one a request."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults: list[Callable[[_Handler], None]] = []
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.delay = 0.0
        self.now = 0
        self.most = 0
        self.lock = threading.Lock()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(body)
            server.headers.append(dict(self.headers))
            server.now += 1
            server.most = max(server.most, server.now)
            fault = server.faults.pop(0) if server.faults else None
        time.sleep(server.delay)
        with server.lock:
            server.now -= 1
        if fault is not None:
            fault(self)
        else:
            self.send(200, {"rewards": [len(query.split()) for query in body["queries"]]})

    def send(self, status: int, answer: Any, **headers: str) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""


def status(code: int, **headers: str) -> Callable[[_Handler], None]:
    """A refusal."""
    return lambda handler: handler.send(code, {"detail": "not now"}, **headers)


def answer(what: Any) -> Callable[[_Handler], None]:
    """Whatever as a success."""
    return lambda handler: handler.send(200, what)


def nothing(handler: _Handler) -> None:
    """A connection that is closed without an answer."""
    handler.close_connection = True


def half(handler: _Handler) -> None:
    """A connection that breaks in the middle of the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"rewards": [1')
    handler.close_connection = True


def drip(handler: _Handler) -> None:
    """A byte now and then, for as long as somebody listens."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not handler.server.release.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()
    handler.close_connection = True


def silent(handler: _Handler) -> None:
    """No answer, until the test is over."""
    handler.server.release.wait(30)
    handler.close_connection = True


@contextmanager
def running() -> Iterator[Server]:
    """A server, for as long as it is needed."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
