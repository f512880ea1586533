"""Tools of MCP servers.

A connection is used in the event loop in which it was opened, and one task enters and leaves it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_mt.checks import check_positive_finite, shown
from torchrl_mt.envs.tools import CallableTool, ToolError

__all__ = ["MCPConnection", "MCPTools", "is_connection"]

_LOOP_SECONDS = 30.0
"""Seconds for the event loop of an open connection to do anything at all."""

_ADVICE = (
    "it must run while episodes are played: in a coroutine, iterate the collector in a thread "
    "(asyncio.to_thread), or give a callable that opens a connection for each episode"
)


class MCPTools:
    """The tools of an MCP server (Model Context Protocol), listed and called through a connection.

    Needs ``pip install 'torchrl-mt[mcp]'``.

    Args:
        session: what opens a connection: a callable without arguments that makes an async context
            manager which gives one, such as ``lambda: mcp.Client("http://localhost:8000/mcp")``. Each
            episode opens a connection of its own and closes it at its end. Or an open connection
            (``mcp.Client``, ``mcp.ClientSession``), which all episodes share. It is used in the event
            loop in which this object is made, which must run while episodes are played.
        timeout: maximum seconds of a call; ``tool_timeout`` of the environment if ``None``.
        images: whether the model is shown images in results, for models that take images. By default
            they are named only, as ``"[image]"``.

    Raises:
        TypeError: if ``session`` is neither.
        RuntimeError: if an open connection is given outside of an event loop.
        ValueError: if ``timeout`` is not positive.

    Examples:
        >>> from mcp import Client, StdioServerParameters
        >>> server = StdioServerParameters(command="python", args=["my_server.py"])
        >>> tools = MCPTools(lambda: Client(server), timeout=30.0)
    """

    def __init__(self, session: Any, timeout: float | None = None, *, images: bool = False) -> None:
        if timeout is not None:
            check_positive_finite("timeout", timeout)
        self.timeout = timeout
        self.images = images
        self._connection: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.opener: Callable[[], Any] | None = None
        """Makes a connection; ``None`` if there is an open one."""
        self._listed: list[_ServerTool] | None = None
        if is_connection(session):
            self._connection, self._loop = session, _running_loop()
        elif callable(session):
            self.opener = session
        else:
            raise TypeError(
                "session must be an open MCP connection, or a callable that makes an async context "
                f"manager which gives one, got {shown(session)}."
            )

    async def shared_tools(self) -> list[_ServerTool]:
        """The tools of the open connection."""
        if self._listed is None:
            await self._require_running_loop()
            self._listed = await self.tools_of(self._connection)
        return self._listed

    async def tools_of(self, connection: Any) -> list[_ServerTool]:
        """The tools of a connection."""
        listed = await self.in_its_loop(lambda: _list_tools(connection))
        return [_ServerTool(self, connection, _schema_of(tool)) for tool in listed]

    async def in_its_loop(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await a coroutine in the loop of the open connection, or else in this one."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await begin()
        if not self._loop.is_running():
            raise RuntimeError(f"the event loop of the MCP connection has ended; {_ADVICE}.")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begin(), self._loop))

    async def _require_running_loop(self) -> None:
        """Raise if the loop of the open connection is blocked, since calls would wait forever."""
        sign = asyncio.ensure_future(self.in_its_loop(lambda: asyncio.sleep(0)))
        try:
            done, _ = await asyncio.wait([sign], timeout=_LOOP_SECONDS)
        finally:
            sign.cancel()
        if not done:
            raise RuntimeError(
                f"the event loop of the MCP connection did nothing for {_LOOP_SECONDS:g} seconds, so it "
                f"is blocked; {_ADVICE}."
            )
        sign.result()


class MCPConnection:
    """An episode's connection to a server; the same for all episodes if it was open before.

    Args:
        server: the server's tools.
    """

    def __init__(self, server: MCPTools) -> None:
        self._server = server
        self._holder: asyncio.Task[None] | None = None
        self._is_open = False
        self._leave = asyncio.Event()

    async def open(self) -> Sequence[CallableTool]:
        """Open the connection and list its tools.

        Raises:
            TypeError: if the callable makes something else.
            Exception: the error of opening or listing.
        """
        if self._server.opener is None:
            return await self._server.shared_tools()
        opened = asyncio.get_running_loop().create_future()
        # A task of its own: anyio demands that the task which enters a connection leaves it.
        self._holder = asyncio.ensure_future(self._hold(self._server.opener, opened))
        await asyncio.wait([self._holder, opened], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._holder.result()
        return await self._server.tools_of(opened.result())

    async def close(self) -> None:
        """Close the connection, unless it was open before; call this in the same loop as :meth:`open`.

        Raises:
            Exception: the error that ended the connection, or of closing it.
        """
        if self._holder is None:
            return
        if self._is_open:
            self._leave.set()
        else:
            self._holder.cancel()
        await asyncio.wait([self._holder])
        if not self._holder.cancelled():
            self._holder.result()

    async def _hold(self, opener: Callable[[], Any], opened: asyncio.Future[Any]) -> None:
        """Enter a connection, and leave it when told to."""
        manager = opener()
        if not hasattr(manager, "__aenter__"):
            raise TypeError(
                "session must be a callable that makes an async context manager, got "
                f"{type(manager).__name__} from it."
            )
        async with manager as connection:
            if not is_connection(connection):
                raise TypeError(
                    "session must make an async context manager which gives an MCP connection, got "
                    f"one that gives {type(connection).__name__}: use mcp.Client, or enter "
                    "mcp.ClientSession."
                )
            self._is_open = True
            if not opened.done():
                opened.set_result(connection)
            await self._leave.wait()


@dataclass(frozen=True)
class _ServerTool:
    """A tool of a server."""

    server: MCPTools
    connection: Any
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def timeout(self) -> float | None:
        return self.server.timeout

    async def run(self, arguments: dict[str, Any]) -> Any:
        """Call the tool; the server checks the arguments."""
        result = await self.server.in_its_loop(
            lambda: self.connection.call_tool(self.name, arguments)
        )
        text = _text_of(result)
        if _field(result, "is_error", "isError"):
            raise ToolError(text)
        if self.server.images and any(block.type == "image" for block in result.content):
            return list(map(_part_of, result.content))
        return text


def is_connection(value: Any) -> bool:
    """Whether an object is a connection to an MCP server, of whatever class."""
    return hasattr(value, "list_tools") and hasattr(value, "call_tool")


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "an open MCP connection must be given in the event loop in which it was opened, got one "
            "where no event loop runs: make the environment or MCPTools there, or give a callable that "
            "opens a connection for each episode, MCPTools(lambda: mcp.Client(...))."
        ) from None


async def _list_tools(connection: Any) -> list[Any]:
    """All tools of a connection, from all pages of the list."""
    page = await connection.list_tools()
    tools = list(page.tools)
    while cursor := _field(page, "next_cursor", "nextCursor"):
        if "cursor" in inspect.signature(connection.list_tools).parameters:
            page = await connection.list_tools(cursor=cursor)
        else:
            params = importlib.import_module("mcp.types").PaginatedRequestParams(cursor=cursor)
            page = await connection.list_tools(params=params)
        tools += page.tools
    return tools


def _schema_of(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": _field(tool, "input_schema", "inputSchema"),
    }
    return {"type": "function", "function": function}


def _part_of(block: Any) -> str | dict[str, str]:
    """A part of a result: an image, or the text of anything else."""
    if block.type != "image":
        return _text_of_block(block)
    kind = _field(block, "mime_type", "mimeType")
    return {"type": "image", "image": f"data:{kind};base64,{block.data}"}


def _text_of_block(block: Any) -> str:
    """Text of a part of a result, or what it is."""
    source = getattr(block, "resource", block)
    text = getattr(source, "text", None)
    return str(getattr(source, "uri", f"[{block.type}]")) if text is None else str(text)


def _text_of(result: Any) -> str:
    """The text of a result; images and sounds are named only, other resources by their addresses."""
    parts = list(map(_text_of_block, result.content))
    structured = _field(result, "structured_content", "structuredContent")
    if not parts and structured is not None:
        return json.dumps(structured, ensure_ascii=False)
    return "\n".join(parts)


def _field(value: Any, name: str, earlier: str) -> Any:
    """A field by its name in mcp 2, or by that in mcp 1."""
    return getattr(value, name, None) if hasattr(value, name) else getattr(value, earlier, None)
