"""OpenAI's Python client with an engine of this process as the server.

Existing ``async`` code runs as a workflow, without a socket, and every token is recorded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from torchrl_mt.collectors.completions import Completions, RequestError, chunks
from torchrl_mt.collectors.settings import ChatOptions
from torchrl_mt.engines import Engine

__all__ = ["openai_client"]


def openai_client(
    engine: Engine,
    tokenizer: Any = None,
    **chat_options: Any,
) -> Any:
    """Make an ``openai.AsyncOpenAI`` client whose chat completions an engine samples.

    Make one per episode, with the engine that the workflow is given. A request that continues an
    earlier answer continues with that answer's tokens. Streams, several answers (``n``), tools and
    ``logprobs`` work as usual. What the engine cannot do (``stop``, penalties, a forced tool, JSON mode)
    raises an ``openai.BadRequestError`` that names it. So does a limit of the episode, with the code
    ``"limit_reached"``; if the workflow lets that error through, the episode is truncated.

    Args:
        engine: samples the answers.
        tokenizer: renders messages; the engine's own if ``None``.
        **chat_options: the fields of :class:`~torchrl_mt.collectors.ChatOptions`; a request's ``tools``
            and ``chat_template_kwargs`` are added.

    Raises:
        ImportError: if the package ``openai`` is not installed.

    Examples:
        >>> class Asks:
        ...     async def arun_episode(self, engine, data):
        ...         client = openai_client(engine)
        ...         completion = await client.chat.completions.create(
        ...             model="policy", messages=[{"role": "user", "content": data["question"]}]
        ...         )
        ...         return float(completion.choices[0].message.content == data["answer"])
    """
    try:
        import openai
    except ImportError as error:
        raise ImportError(
            "openai_client needs the package openai: pip install 'torchrl-mt[agents]'."
        ) from error
    # The HTTP package that the client uses depends on its version.
    http = importlib.import_module(
        openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0]
    )
    completions = Completions(engine, tokenizer, ChatOptions(**chat_options))

    class InProcess(http.AsyncBaseTransport):  # type: ignore[name-defined]
        """Answers requests by calling the engine."""

        async def handle_async_request(self, request: Any) -> Any:
            status, kind, body = await _respond(
                completions, request.method, request.url.path, await request.aread()
            )
            return http.Response(status, headers={"content-type": kind}, content=body)

    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://engine/v1",
        max_retries=0,
        timeout=None,
        http_client=http.AsyncClient(transport=InProcess()),
    )


async def _respond(
    completions: Completions, method: str, path: str, body: bytes
) -> tuple[int, str, bytes]:
    """Answer a request: status, content type and body."""
    try:
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "torchrl_mt"}
            return _json(200, {"object": "list", "data": [model]})
        if (method, path) != ("POST", "/v1/chat/completions"):
            raise RequestError(f"{method} {path} is not answered here.", status=404)
        request = json.loads(body)
        completion = await completions.create(request)
    except RequestError as error:
        return _json(error.status, error.body)
    if not request.get("stream"):
        return _json(200, completion)
    with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
    events = [json.dumps(chunk) for chunk in chunks(completion, with_usage=with_usage)]
    sent = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return 200, "text/event-stream", sent.encode()


def _json(status: int, body: Mapping[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()
