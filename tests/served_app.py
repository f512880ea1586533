"""Applications that uvicorn serves in a thread of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.waiting import wait_until


@contextmanager
def served_app(app: Any, **config: Any) -> Iterator[str]:
    """Serve an ASGI application; the value is its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", **config))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
