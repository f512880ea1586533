"""A completions server on this machine that misbehaves on request."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 26
STOP = 1


def sampled(prompt: list[int], max_tokens: int) -> tuple[list[int], list[float], str]:
    """An answer from a distribution that depends on the token before: what the server samples from."""
    rng = random.Random(str(prompt))
    last, tokens, log_probs = prompt[-1], [], []
    while len(tokens) < max_tokens:
        weights = [1 + (3 * token + last) % 7 for token in range(VOCABULARY)]
        (last,) = rng.choices(range(VOCABULARY), weights)
        tokens.append(last)
        log_probs.append(math.log(weights[last] / sum(weights)))
        if last == STOP:
            return tokens, log_probs, "stop"
    return tokens, log_probs, "length"


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """What vLLM would send."""
    tokens, log_probs, reason = sampled(body["prompt"], body["max_tokens"])
    return {
        "id": "cmpl-1",
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "text": "not to be used",
                "finish_reason": reason,
                "token_ids": tokens,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in tokens],
                    "token_logprobs": log_probs,
                    "top_logprobs": None,
                },
            }
        ],
    }


class Server(ThreadingHTTPServer):
    """Answers as it is told: ``faults`` are used up first, one a request."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults: list[Callable[[_Handler], None]] = []
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.connections: set[Any] = set()
        self.open = 0
        self.most_open = 0
        self.disconnected = threading.Event()
        self.release = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

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

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.monotonic())
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault is not None:
            fault(self)
        elif self.path != "/v1/completions":
            self.send(404, {"error": {"message": f"no {self.path}"}})
        else:
            self.send(200, self.server.change(completion(body)))

    def send(self, status: int, answer: Any, **headers: str) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""


def status(code: int, message: str = "not now", **headers: str) -> Callable[[_Handler], None]:
    """A refusal."""
    return lambda handler: handler.send(code, {"error": {"message": message}}, **headers)


def raw(data: bytes) -> Callable[[_Handler], None]:
    """Whatever bytes as a success."""
    return lambda handler: handler.send(200, data)


def half(handler: _Handler) -> None:
    """A connection that breaks in the middle of the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.close_connection = True


def dripping(handler: _Handler) -> None:
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


def nothing(handler: _Handler) -> None:
    """A connection that is closed without an answer."""
    handler.close_connection = True


def silent(handler: _Handler) -> None:
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


@contextmanager
def running(port: int = 0) -> Iterator[Server]:
    """A server, for as long as it is needed; when it ends, it hangs up on everybody."""
    server = Server(port)
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
