"""A server for programs that speak to an OpenAI endpoint. Every answered call of an episode is a turn.

A program can do nothing but ask for completions: with the key of its episode, until the episode ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchrl_mt.agents.conversation import ChatTokensCache
from torchrl_mt.agents.requests import RequestError
from torchrl_mt.agents.responses import event_stream, model_list
from torchrl_mt.agents.session import Model, Session, ended
from torchrl_mt.checks import check_positive, check_positive_integer
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.event_loop.background_tasks import BackgroundTasks, cancel_all
from torchrl_mt.collectors.limits import Limits
from torchrl_mt.collectors.recorder import Recorder
from torchrl_mt.collectors.settings import ChatOptions
from torchrl_mt.engines import Engine
from torchrl_mt.engines.policy.engine import as_engine
from torchrl_mt.vision import VisionProcessor

__all__ = ["AgentServer"]

_logger = logging.getLogger("torchrl_mt")

_KNOWN = "torchrl_mt.known"
"""Marks the scope of a request with a session's key."""
_STRANGER_SECONDS = 5.0
"""Seconds, at most doubled, that a connection may stay without a request that has a key."""


class AgentServer:
    """Serve OpenAI's chat completions from an engine, and record every call as a turn of an episode.

    Use it as an async context manager, in the event loop that opens and closes the sessions.
    :meth:`open` begins an episode and gives its address and key. A request that goes on from an earlier
    reply continues with the tokens of that reply; any other begins a new branch of the episode.
    :doc:`/agents` has the endpoints, the fields of requests, and when two messages are the same.

    Args:
        engine: samples the replies; a TorchRL LLM wrapper is converted.
        tokenizer: renders messages; the engine's own if ``None``. A processor may be given in its place.
        host: address to listen on. Programs on other machines need the machine's address.
        port: port to listen on; 0 takes a free one.
        models: further engines by model name, such as ``{"judge": engine}``, whose calls are no turns.
        tool_parser: returns the :class:`~torchrl_mt.chat.replies.ParsedReply` of a reply's text;
            ``None`` parses the tokenizer's or the model family's notation.
        limits: limits of each episode; none if ``None``.
        chat: options of rendering messages; ``on_break`` is ``"append"`` unless they say otherwise.
        max_body_bytes: maximum size of a request; larger ones get status 413.
        max_requests: maximum number of requests in progress; further ones get status 503.
        idle_timeout: seconds until connections and sessions without a request are ended.
        processor: the processor of a model that takes images (:doc:`/images`).

    Raises:
        ImportError: if the extra ``agents`` is not installed.
        TypeError, ValueError: if an argument is of the wrong type or out of range.
        OSError: on entering, if the address cannot be used.

    Examples:
        >>> from torchrl_mt.engines import TransformersEngine
        >>> from torchrl_mt.testing import tiny_chat_model
        >>> engine = TransformersEngine(*tiny_chat_model("hello"), max_new_tokens=4)
        >>> request = {"messages": [{"role": "user", "content": "hello"}]}
        >>> async def main():
        ...     async with AgentServer(engine) as server:
        ...         session = server.open({"question": "hello"})
        ...         await session.http_client.post("/chat/completions", json=request)
        ...         return len(session.turns())
        >>> asyncio.run(main())
        1
        >>> engine.close()
    """

    def __init__(
        self,
        engine: Engine | Any,
        tokenizer: Any = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Mapping[str, Engine | Any] | None = None,
        tool_parser: Callable[[str], Any] | None = None,
        limits: Limits | None = None,
        chat: ChatOptions | None = None,
        max_body_bytes: int = 32 * 2**20,
        max_requests: int = 4096,
        idle_timeout: float = 3600.0,
        processor: Any = None,
    ) -> None:
        check_positive_integer("max_body_bytes", max_body_bytes)
        check_positive_integer("max_requests", max_requests)
        check_positive("idle_timeout", idle_timeout)
        # Tokenizers have no tokenizer.
        if processor is None and hasattr(tokenizer, "tokenizer"):
            tokenizer, processor = None, tokenizer
        own = None if processor is None else VisionProcessor.of(processor).tokenizer
        self.engine = as_engine(engine, own if tokenizer is None else tokenizer)
        self.host = host
        self.port = port
        self.limits = limits or Limits()
        self._max_body_bytes = max_body_bytes
        self._max_requests = max_requests
        self._idle_timeout = idle_timeout
        self._options = chat or ChatOptions()
        self._tool_parser = tool_parser
        if tokenizer is None:
            tokenizer = getattr(self.engine, "tokenizer", own)
        self._chats = self._chats_of(tokenizer, processor)
        self._models = {
            name: self._model_of(given)
            for name, given in (models or {}).items()
            if given is not engine
        }
        self._sessions: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Of the sessions that end when idle."""
        self._secret = secrets.token_bytes(32)
        self._opened = self._in_progress = 0
        self._app = self._make_app()
        self._serving: asyncio.Task[None] | None = None

    @property
    def origin(self) -> str:
        """``http://host:port``.

        Raises:
            RuntimeError: if the server was not started.
        """
        if self._serving is None:
            raise RuntimeError(
                "the server is not running: use it as `async with AgentServer(...)`."
            )
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen for requests.

        Raises:
            RuntimeError: if it runs already.
            OSError: if the address cannot be used.
        """
        if self._serving is not None:
            raise RuntimeError("the server runs already.")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), family=family, backlog=2048)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=partial(_Connection, self._max_requests),  # type: ignore[arg-type]
            timeout_keep_alive=self._idle_timeout,  # type: ignore[arg-type]  # It may be a fraction.
            timeout_graceful_shutdown=1,
        )
        self._serving = asyncio.ensure_future(_Server(config).serve_until_cancelled(listener))
        # Also if it is cancelled before it has begun.
        self._serving.add_done_callback(lambda _: listener.close())

    async def stop(self) -> None:
        """End all sessions and close all connections."""
        for session in list(self._sessions.values()):
            await session.close()
        for chats in (self._chats, *(model.chats for model in self._models.values())):
            await chats.close()
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None

    async def __aenter__(self) -> AgentServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def open(self, data: Any = None) -> Session:
        """Begin an episode.

        Args:
            data: the episode's item.

        Returns:
            Its session. Close it when the episode is over.
        """
        episode = Episode(data, shows_images=self._chats.take_images)
        session = self.open_recorded(Recorder(self.engine, episode, self.limits))
        self._end_when_idle(session)
        return session

    def open_recorded(self, recorder: Recorder) -> Session:
        """Begin a session whose calls a recorder writes into its episode."""
        key = self._new_key()
        base_url = f"{self.origin}/v1"
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app, raise_app_exceptions=False),
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=None,
        )
        session = Session(
            base_url=base_url,
            api_key=key,
            http_client=client,
            recorder=recorder,
            chats=self._chats,
            models=self._models,
            on_close=self._forget,
        )
        self._sessions[key] = session
        return session

    def _forget(self, session: Session) -> None:
        """Forget a session that ends."""
        del self._sessions[session.api_key]
        if timer := self._timers.pop(session.api_key, None):
            timer.cancel()

    # Keys

    def _new_key(self) -> str:
        self._opened += 1
        number = str(self._opened)
        return f"sk-{number}-{self._sign(number)}"

    def _sign(self, number: str) -> str:
        """The part of a key that only this server can make, so that keys of the past need no list."""
        return hmac.new(self._secret, number.encode(), hashlib.sha256).hexdigest()

    def _session_of(self, request: Request) -> Session:
        """The session of a request's key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            session = self._sessions.get(key)
            if session is not None:
                request.scope[_KNOWN] = True
                return session
            number, _, signature = key.removeprefix("sk-").partition("-")
            if hmac.compare_digest(signature.encode(), self._sign(number).encode()):
                raise ended()
        raise RequestError(
            "the API key is not known: use the api_key of a session as a bearer token.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def _end_when_idle(self, session: Session) -> None:
        """End a session once it had no request for the idle time."""
        loop = asyncio.get_running_loop()
        seen = session.num_calls

        def look() -> None:
            nonlocal seen
            if session.in_progress or session.num_calls != seen:
                seen = session.num_calls
                look_later()
            else:
                BackgroundTasks.of(loop).start(session.close(), "closing an idle session")

        def look_later() -> None:
            self._timers[session.api_key] = loop.call_later(self._idle_timeout, look)

        look_later()

    def _model_of(self, engine: Engine | Any) -> Model:
        engine = as_engine(engine, None)
        return Model(engine, self._chats_of(getattr(engine, "tokenizer", None)))

    def _chats_of(self, tokenizer: Any, processor: Any = None) -> ChatTokensCache:
        return ChatTokensCache(tokenizer, self._options, self._tool_parser, processor=processor)

    # Requests

    def _make_app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._answers("chat"), methods=["POST"]),
                Route("/v1/completions", self._answers("tokens"), methods=["POST"]),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/models/{id:path}", self._show_model, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={
                RequestError: _error_response,
                HTTPException: _unknown_route,
                ClientDisconnect: _client_gone,
            },
        )

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "sessions": len(self._sessions)})

    async def _list_models(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse(model_list(["policy", *(n for n in self._models if n != "policy")]))

    async def _show_model(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse(model_list([request.path_params["id"]])["data"][0])

    def _answers(self, kind: str) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            session = self._session_of(request)
            if self._in_progress >= self._max_requests:
                raise RequestError(
                    f"the server answers at most max_requests={self._max_requests} requests at once.",
                    status=503,
                    kind="server_error",
                    code="overloaded",
                )
            self._in_progress += 1
            try:
                return await self._answer(kind, session, request)
            except (RequestError, ClientDisconnect):
                raise
            except Exception as error:
                _logger.exception("answering a request failed.")
                raise RequestError(
                    f"the server failed: {type(error).__name__}: {error}",
                    status=500,
                    kind="server_error",
                ) from error
            finally:
                self._in_progress -= 1

        return answer

    async def _answer(self, kind: str, session: Session, request: Request) -> Response:
        try:
            content = await asyncio.wait_for(self._read(request), self._idle_timeout)
        except asyncio.TimeoutError:
            raise RequestError(
                f"the request's body did not come within idle_timeout={self._idle_timeout} seconds.",
                status=408,
            ) from None
        retries = request.headers.get("x-stainless-retry-count", "")
        is_retry = retries.isascii() and retries.isdigit() and retries.strip("0") != ""
        call = session.call(kind, content, is_retry=is_retry)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            body = await call.wait(gone)
        finally:
            gone.cancel()
        if body is None or (gone.done() and not gone.cancelled()):
            raise ClientDisconnect
        response = _stream(body, call.request) if call.request.get("stream") else JSONResponse(body)
        call.is_delivered = True
        return response

    async def _read(self, request: Request) -> bytes:
        """Read a request's body."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise RequestError(
                    f"the request must have at most max_body_bytes={self._max_body_bytes} bytes.",
                    status=413,
                )
            parts.append(part)
        return b"".join(parts)


class _Server(uvicorn.Server):
    """A server that is one task of its event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield

    async def serve_until_cancelled(self, listener: socket.socket) -> None:
        """Serve until the task is cancelled; then close all connections."""
        try:
            await self.serve([listener])
        finally:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                if (transport := getattr(connection, "transport", None)) is not None:
                    transport.abort()
            if self.started:
                await self.shutdown([listener])
            await cancel_all(self.server_state.tasks)


class _Connection(H11Protocol):
    """A connection that is closed when it is idle: before, in and after the head of a request."""

    _timer: asyncio.TimerHandle | None = None
    _seen: Any = None

    def __init__(self, most_strangers: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_strangers = most_strangers

    @property
    def is_known(self) -> bool:
        """Whether its last request had a session's key."""
        return self.cycle is not None and _KNOWN in self.cycle.scope

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look after it; close one of the strangers if there are too many."""
        if len(self.connections) >= self._most_strangers:
            strangers = (each for each in self.connections if not each.is_known)  # type: ignore
            if (stranger := next(strangers, None)) is not None:
                stranger.transport.abort()
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """End to look after it."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        seconds: float = self.timeout_keep_alive
        if not self.is_known:
            seconds = min(seconds, _STRANGER_SECONDS)
        self._timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Close it, unless a request came since the last look, or one waits for its response."""
        if self.cycle is not None and not self.cycle.response_started:
            self._seen = None
        elif self._seen is (self.cycle or self):
            self.transport.abort()
            return
        else:
            self._seen = self.cycle or self
        self._look_later()


async def _disconnected(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(body: Mapping[str, Any], request: Mapping[str, Any]) -> Response:
    """A completion as the events of a stream."""
    with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
    return Response(event_stream(body, with_usage=with_usage), media_type="text/event-stream")


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    # Waiting does not help, except where the server is busy.
    again = "true" if error.status == 503 else "false"
    return JSONResponse(error.body, error.status, headers={"x-should-retry": again})


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not answered here."
    return await _error_response(request, RequestError(message, status=error.status_code))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
