"""A server of tools, in this process or as a program: ``python -m tests.envs.mcp_server``."""

from __future__ import annotations

import os
import threading
from contextlib import asynccontextmanager

import anyio
import numpy as np
from mcp.server.mcpserver import Image, MCPServer

from tests.idle_clock import hang
from torchrl_mt.vision import StoredImage

PHOTOGRAPH = StoredImage.of(StoredImage.of(np.eye(4, dtype=np.uint8)).file()[1])


class Opened:
    """What becomes of the server's sessions."""

    def __init__(self):
        self.now = self.ever = 0
        self.threads = set()


def make_server(opened: Opened | None = None) -> MCPServer:
    opened = opened or Opened()

    @asynccontextmanager
    async def lifespan(server):
        opened.now, opened.ever = opened.now + 1, opened.ever + 1
        try:
            yield {"notes": []}
        finally:
            # Anything that is left in another task than it was entered in raises here.
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0)
            opened.now -= 1

    server = MCPServer("numbers", lifespan=lifespan)

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        opened.threads.add(threading.get_ident())
        return a + b

    @server.tool()
    def divide(a: int, b: int) -> float:
        """Divide two numbers."""
        return a / b

    @server.tool()
    def several() -> list[str]:
        """Give several texts."""
        return ["one", "two"]

    @server.tool()
    def draw() -> Image:
        """Draw."""
        return Image(data=b"1", format="png")

    @server.tool()
    def photograph() -> list[Image | str]:
        """Take a photograph."""
        return ["seen:", Image(data=PHOTOGRAPH.data, format="png")]

    @server.tool()
    async def stuck() -> None:
        """Never end."""
        await hang()

    @server.tool()
    def whereabouts() -> int:
        """Tell the process."""
        return os.getpid()

    @server.tool()
    def die() -> None:
        """End the server."""
        os._exit(3)

    return server


if __name__ == "__main__":
    make_server().run()
