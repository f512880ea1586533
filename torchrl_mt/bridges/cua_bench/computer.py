"""One episode's computer on a server, after the protocol of cua-bench.

An action is sent once and never again: where the reply is lost, the episode is over. A server is given
to the next episode when it has answered all requests of this one and was told to release its computer;
after a request that failed, it is set aside for a while.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from torchrl_mt.bridges.cua_bench.actions import MAX_WAIT, Action
from torchrl_mt.bridges.cua_bench.leases import Lease, lease
from torchrl_mt.checks import import_extra
from torchrl_mt.http_client import HttpClient, HttpError

__all__ = ["Computer", "ComputerError", "Observation", "Reply", "check_server", "server_form"]

_AWAY_SECONDS = 10.0
"""Seconds that a reset waits for a server that starts, restarts or has no computer left."""
_CLOSE_SECONDS = 10.0
"""Most seconds to tell a server that an episode is over."""
_SCREEN = (1920, 1080)
"""Pixels of a screen that is only described in text; cua-bench's own default."""
_TYPES = {
    "click": "ClickAction",
    "left_double": "DoubleClickAction",
    "right_single": "RightClickAction",
    "drag": "DragAction",
    "hotkey": "HotkeyAction",
    "key": "KeyAction",
    "type": "TypeAction",
    "scroll": "ScrollAction",
    "wait": "WaitAction",
    "done": "DoneAction",
}
"""A server's names of the actions."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"scroll": {"amount": 100}, "wait": {"seconds": 1.0}}
_DRAG = {"x": "from_x", "y": "from_y", "x2": "to_x", "y2": "to_y"}


class ComputerError(HttpError):
    """A server of computers refused, failed or answered something else, so the episode cannot go on."""


@dataclass(frozen=True)
class Observation:
    """What is on the screen.

    Args:
        text: a description, such as the accessibility tree.
        image: the screenshot as a data URI, as ``transformers`` takes images.
        size: width and height in pixels.
    """

    text: str | None
    image: str | None
    size: tuple[int, int]


@dataclass(frozen=True)
class Reply:
    """A server's reply to an action; after the last one there is nothing to observe."""

    observation: Observation | None
    reward: float
    done: bool


class Computer:
    """A computer on a leased server.

    Args:
        held: the lease of the server.
        timeout: seconds for each request.
    """

    def __init__(self, held: Lease, timeout: float) -> None:
        self.server = held.server
        self._lease = held
        self._timeout = timeout
        self._env_id: Any = None
        self._is_open = False
        """Whether the server may have a computer for this episode."""
        self._size = _SCREEN
        self._request: asyncio.Task[Any] | None = None

    @classmethod
    async def find(cls, servers: Sequence[str], timeout: float) -> Computer:
        """Wait for a free server of several."""
        return cls(await lease(servers), timeout)

    async def reset(self, task: Mapping[str, Any]) -> tuple[str, Observation]:
        """Begin a task; return its instruction and the first observation.

        A server that starts or restarts is waited for. This is safe: a reset begins anew.

        Raises:
            ComputerError: if the server does not begin it.
        """
        client = _client(self.server, "/reset", self._timeout, _AWAY_SECONDS)
        body = {**task, "timeout": math.ceil(self._timeout)}
        self._is_open = True
        return await self._finished(client.post(body, self._read_reset))

    async def act(self, action: Action) -> Reply:
        """Execute an action, once.

        Args:
            action: any but ``call_user``, for which servers have nothing.

        Raises:
            ComputerError: if the server does not answer as it should. The action may have been executed.
        """
        form = server_form(action, self._size)
        seconds = self._timeout + (MAX_WAIT if action.name == "wait" else 0.0)
        client = _client(self.server, "/step", seconds)
        is_last = action.name == "done"
        read = functools.partial(self._read_step, is_last=is_last)
        reply = await self._finished(client.post({"action": form, "env_id": self._env_id}, read))
        if is_last:  # The server releases the computer by itself.
            self._is_open = False
            self._lease.end()
        return reply

    async def close(self) -> None:
        """Release the computer and the server.

        Raises:
            ComputerError: if the server does not confirm it.
        """
        try:
            # Until the server has answered, it may still act, or take the computer from a next episode.
            if self._request is not None and not self._request.done():
                await asyncio.wait([self._request])
            if self._is_open:
                self._is_open = False
                # Without an id, all computers: this episode has the server for itself.
                client = _client(self.server, "/shutdown", min(self._timeout, _CLOSE_SECONDS))
                try:
                    await client.post({"env_id": self._env_id}, lambda said: None)
                except ComputerError:
                    self._lease.failed = True
                    raise
        finally:
            if self._request is not None and self._request.cancel():
                self._lease.failed = True  # It does not answer.
            self._lease.end()

    async def _finished(self, request: Any) -> Any:
        """The result of a request, which goes on if the caller is cancelled."""
        self._request = asyncio.ensure_future(request)
        self._request.add_done_callback(self._note)
        return await asyncio.shield(self._request)

    def _note(self, request: asyncio.Task[Any]) -> None:
        """Note whether the server failed."""
        # Looked at even if nobody waits for the request: asyncio logs its error otherwise.
        error = None if request.cancelled() else request.exception()
        if isinstance(error, ComputerError):
            self._lease.failed = True
        elif not request.cancelled() and not self._lease.failed:
            self._lease.failed = False

    def _read_reset(self, said: Any) -> tuple[str, Observation]:
        env_id, instruction = said["env_id"], said["instruction"]
        if isinstance(env_id, bool) or not isinstance(env_id, (int, str)):
            raise ValueError(f"env_id must be a number or a string, got {env_id!r:.80}")
        self._env_id = env_id
        if not isinstance(instruction, str):
            raise ValueError(f"instruction must be a string, got {instruction!r:.80}")
        return instruction, self._read_observation(said)

    def _read_step(self, said: Any, is_last: bool) -> Reply:
        reward, done = said["reward"], said["done"]
        is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if not is_number or not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number, got {reward!r:.80}")
        if not isinstance(done, bool):
            raise ValueError(f"done must be true or false, got {done!r:.80}")
        if is_last and not done:
            raise ValueError("the server was told to end the episode, but says that it is not done")
        return Reply(None if done else self._read_observation(said), float(reward), done)

    def _read_observation(self, said: Mapping[str, Any]) -> Observation:
        """The screenshot or text of a reply."""
        image = said.get("screenshot") or None
        given = (said.get(key) for key in ("text", "observation"))
        text = next((value for value in given if value is not None), None)
        if text is not None and not isinstance(text, str):
            text = json.dumps(text)
        if image is not None:
            image, self._size = _read_screenshot(image)
        elif text is None:
            raise ValueError("the reply has no screenshot, text or observation")
        elif said.get("width") is not None or said.get("height") is not None:
            self._size = _checked_size(said.get("width"), said.get("height"))
        return Observation(text, image, self._size)


def check_server(server: Any) -> str:
    """Check the address of a server; return it without a slash at its end.

    Raises:
        ImportError: if httpx or tenacity is not installed.
        ValueError: if it is no HTTP address.
    """
    address = server.rstrip("/") if isinstance(server, str) else server
    try:
        # Once for each address, since certificates are loaded for https.
        _client(address, "/reset", 1.0)
    except (TypeError, ValueError):
        raise ValueError(
            "server_url must be an address such as 'http://localhost:8001', or several, got "
            f"{server!r:.80}."
        ) from None
    return address


@functools.lru_cache(maxsize=4096)
def _client(server: str, path: str, timeout: float, wait_ready: float = 0.0) -> HttpClient:
    """A client that tries once, or until a server that is away is there."""
    return HttpClient(
        server + path,
        timeout=timeout,
        max_retries=0,
        wait_ready=wait_ready,
        name="ComputerEnv",
        error=ComputerError,
    )


def server_form(action: Action, size: tuple[int, int]) -> dict[str, Any]:
    """An action as the server reads it."""
    given = action.arguments
    sides = {"x": size[0], "y": size[1], "x2": size[0], "y2": size[1]}
    pixels = {
        name: min(int(given[name] * side), side - 1)
        for name, side in sides.items()
        if name in given
    }
    # cua-bench scrolls where the pointer is; other servers may read where to scroll.
    form = {**_DEFAULTS.get(action.name, {}), **given, **pixels}
    if action.name == "drag":
        form = {_DRAG[name]: pixel for name, pixel in form.items()}
    return {"type": _TYPES[action.name], **form}


# ---- screenshots --------------------------------------------------------------------------------


def _read_screenshot(encoded: Any) -> tuple[str, tuple[int, int]]:
    """A screenshot in base64 as a data URI, and its width and height."""
    if not isinstance(encoded, str):
        raise ValueError(f"screenshot must be a string in base64, got {encoded!r:.80}")
    if encoded.startswith("data:"):
        encoded = encoded.partition(",")[2]
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(f"screenshot must be in base64 ({error}), got {encoded[:40]!r}") from None
    pil = import_extra("PIL.Image", "images")
    try:  # The header alone is read.
        with pil.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            kind, size = "png" if image.format == "PNG" else "jpeg", image.size
    except Exception:
        raise ValueError(f"screenshot must be a PNG or JPEG image, got {data[:16]!r}...") from None
    return f"data:image/{kind};base64,{encoded}", size


def _checked_size(width: Any, height: Any) -> tuple[int, int]:
    """A width and a height, if they are whole numbers above 0."""
    for side in (width, height):
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise ValueError(
                f"the screen's width and height must be positive, got {width} x {height}"
            )
    return width, height
