"""OpenAI's Python client with an engine of this process as the server.

Existing ``async`` code runs as a workflow, without a socket, and every token is recorded.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import httpx

from torchrl_mt.agents.conversation import ChatTokensCache, Conversation, Prompt
from torchrl_mt.agents.requests import ChatRequest, RequestError, decoded, read_chat
from torchrl_mt.agents.responses import chat_completion, event_stream, model_list
from torchrl_mt.collectors.recorder import LimitReached
from torchrl_mt.collectors.settings import ChatOptions
from torchrl_mt.engines import Completion, Engine

__all__ = ["openai_client"]


def openai_client(
    engine: Engine, tokenizer: Any = None, *, processor: Any = None, **chat_options: Any
) -> Any:
    """Make an ``openai.AsyncOpenAI`` client whose chat completions an engine samples.

    Make one per episode, with the engine that the workflow is given. A request that continues an
    earlier reply continues with that reply's tokens. Streams, several replies (``n``), tools, ``stop``
    and ``logprobs`` work as usual. What the engine cannot do (penalties, a forced tool, JSON mode)
    raises an ``openai.BadRequestError`` that names it. So does a limit of the episode, with the code
    ``"limit_reached"``; if the workflow lets that error through, the episode is truncated.

    Programs that make their own client, and those in other processes, are
    :class:`~torchrl_mt.agents.Agent` objects instead.

    Args:
        engine: samples the replies.
        tokenizer: renders messages; the engine's own if ``None``.
        processor: the processor of a model that takes images. Messages may then have ``image_url`` parts
            with ``data:`` URIs.
        **chat_options: the fields of :class:`~torchrl_mt.collectors.ChatOptions`; a request's ``tools``
            and ``chat_template_kwargs`` are added. ``on_break`` is ``"append"`` by default.

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
    if tokenizer is None:
        tokenizer = getattr(engine, "tokenizer", None)
    chats = ChatTokensCache(tokenizer, ChatOptions(**chat_options), processor=processor)
    client: Any = httpx.AsyncClient(transport=_InProcess(engine, tokenizer, chats))
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://engine/v1",
        max_retries=0,
        timeout=None,
        http_client=client,
    )


class _InProcess(httpx.AsyncBaseTransport):
    """Answers requests by calling the engine."""

    def __init__(self, engine: Engine, tokenizer: Any, chats: ChatTokensCache) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._conversation = Conversation(chats)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        try:
            return await self._answer(request)
        except RequestError as error:
            return httpx.Response(error.status, json=error.body)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        method, path = request.method, request.url.path
        if (method, path) == ("GET", "/v1/models"):
            return httpx.Response(200, json=model_list(["policy"]))
        if method == "GET" and path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            return httpx.Response(200, json=model_list([name])["data"][0])
        if (method, path) != ("POST", "/v1/chat/completions"):
            raise RequestError(f"{method} {path} is not answered here.", status=404)
        chat = read_chat(decoded(await request.aread()), several=True)
        body = await self._complete(chat)
        if not chat.stream:
            return httpx.Response(200, json=body)
        events = event_stream(body, with_usage=chat.with_usage)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events)

    async def _complete(self, request: ChatRequest) -> Mapping[str, Any]:
        prompt = await self._conversation.prompt(request)
        found = await asyncio.gather(
            *(self._sample(prompt, request, k) for k in range(request.n)),
            return_exceptions=True,
        )
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        answers = [answer for answer in found if isinstance(answer, Completion)]
        return chat_completion(
            f"chatcmpl-{uuid.uuid4().hex}",
            request.model,
            [self._conversation.read(prompt, answer, request.stops) for answer in answers],
            len(prompt.token_ids),
            tokenizer=self._tokenizer,
            logprobs=request.logprobs,
        )

    async def _sample(self, prompt: Prompt, request: ChatRequest, k: int) -> Completion:
        sampling = request.arguments(prompt.images)
        if "seed" in sampling:
            sampling["seed"] += k
        try:
            return await self._engine.generate(prompt.token_ids, **sampling)
        except (LimitReached, TypeError, ValueError) as error:
            raise request.refusal(error) from error
