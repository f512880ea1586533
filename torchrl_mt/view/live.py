"""A page in the browser that follows a run, from its folder alone: nothing runs in the training process.

Only this machine is served, only to pages that know it by a name of its own, and only the pages of
episodes in the folder.
"""

from __future__ import annotations

import ipaddress
import json
import os
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torchrl_mt.checks import check_integer_within
from torchrl_mt.paths import inside
from torchrl_mt.view.plot_run import page_data, render_page
from torchrl_mt.view.run_files import EPISODES, FACTS, METRICS, read_run

__all__ = ["RunServer", "serve_run"]


def serve_run(folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve the page of a run until Ctrl-C; it asks for new numbers every two seconds.

    From another machine, forward the port: ``ssh -L 8000:localhost:8000 machine``.

    Args:
        folder: the folder of a :class:`~torchrl_mt.view.RunLog`.
        host: an address of this machine alone.
        port: 0 takes a free one.

    Raises:
        FileNotFoundError: if it is no folder of a run.
        ValueError: if ``host`` could be reached from elsewhere, or ``port`` is out of range.
        OSError: if the port is taken.
    """
    with RunServer(folder, host, port) as server:
        url = f"http://{host}:{server.server_port}/"
        print(f"{url} shows {folder}; Ctrl-C ends it.", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class RunServer(ThreadingHTTPServer):
    """The server of :func:`serve_run`."""

    daemon_threads = True

    def __init__(
        self, folder: str | os.PathLike[str], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        check_integer_within("port", port, 0, 65535)
        if not _is_loopback(host) or ":" in host:
            raise ValueError(
                f"host must be 127.0.0.1 or localhost, got {host!r}: from elsewhere, forward the port "
                "with ssh -L."
            )
        self.folder = Path(folder).expanduser()
        self._stamp: Any = None
        self.data()
        super().__init__((host, port), _Handler)

    def data(self) -> dict[str, Any]:
        """What the page shows, read again if a file changed."""
        paths = [self.folder / name for name in (METRICS, FACTS, EPISODES)]
        stats = [path.stat() for path in paths if path.exists()]
        stamp = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        if stamp != self._stamp:
            self._data, self._stamp = page_data([read_run(self.folder)]), stamp
        return self._data


class _Handler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        """Answer with the page, its numbers, or a page of episodes."""
        try:
            path = unquote(urlsplit(self.path).path)
            # A site whose name was made to lead here must not read the run.
            if not _is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif path == "/":
                self._send("text/html", render_page(self.server.data(), live=True).encode())
            elif path == "/metrics":
                self._send("application/json", json.dumps(self.server.data()).encode())
            elif path.startswith(f"/{EPISODES}/") and path.endswith(".html"):
                name = path.removeprefix(f"/{EPISODES}/")
                self._send("text/html", inside(self.server.folder / EPISODES, name).read_bytes())
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except ConnectionError:
            pass  # The browser went away.
        except (OSError, ValueError):
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page asks every two seconds."""


def _is_loopback(host: str) -> bool:
    """Whether a name can only mean this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
