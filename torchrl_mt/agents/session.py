"""One episode as its program sees it: an address, a key, and the record of its calls.

Every call that the policy answered is one turn of the episode, with exactly the tokens that the engine
was given and returned. A call whose reply was lost and never asked for again is none.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from torchrl_mt.agents.conversation import ChatTokensCache, Conversation, before_stop
from torchrl_mt.agents.requests import (
    ChatRequest,
    RequestError,
    TokensRequest,
    decoded,
    read_chat,
    read_tokens,
)
from torchrl_mt.agents.responses import chat_completion, text_completion
from torchrl_mt.chat.encoding import decode
from torchrl_mt.collectors.episode import Turn, copied
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.recorder import LimitReached, Recorder
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.vision import StoredImage

__all__ = ["Call", "Model", "Session"]

_Body = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model beside the policy, whose calls are no turns."""

    engine: Engine
    """Samples its replies."""
    chats: ChatTokensCache
    """Converts messages to its tokens."""


class Call:
    """A request in progress or answered. Requests that repeat it share it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[_Body]
        """Makes the body of the response."""
        self.request: _Body = {}
        self.response: _Body | None = None
        self.turn: Turn | None = None
        self.is_delivered = False
        """Whether a client has got the response."""
        self.num_waiting = 0
        """Number of requests that wait for the response."""
        self.is_abandoned = False
        """Whether nobody waited any more, so that it was cancelled."""

    @property
    def can_be_shared(self) -> bool:
        """Whether it has a response or is about to get one."""
        return self.response is not None or not (self.is_abandoned or self.task.done())

    async def wait(self, gone: asyncio.Future[Any] | None = None) -> _Body | None:
        """Wait for the response; ``None`` if the client is gone before.

        The last client that goes away or is cancelled cancels the call.

        Args:
            gone: done when the client has closed its connection.

        Raises:
            RequestError: if the request was refused.
        """
        self.num_waiting += 1
        try:
            await asyncio.wait(
                {self.task} if gone is None else {self.task, gone},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if gone is not None and gone.done():
                return None
            if self.task.cancelled():
                raise ended()
            return self.task.result()
        finally:
            self.num_waiting -= 1
            if not self.num_waiting and not self.task.done():
                self.is_abandoned = True
                self.task.cancel()


class Session:
    """One episode of an :class:`AgentServer`.

    Attributes:
        base_url: the server's address for OpenAI clients, ending in ``/v1``.
        api_key: the key of this episode.
        http_client: an ``httpx.AsyncClient`` that reaches the server without a socket, with the key.
        data: the episode's item.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        http_client: httpx.AsyncClient,
        recorder: Recorder,
        chats: ChatTokensCache,
        models: Mapping[str, Model],
        on_close: Callable[[Session], object],
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.http_client = http_client
        self.data = copied(recorder.episode.data)
        self.error: Exception | None = None
        """The engine's error in the last call, if it failed."""
        self._recorder = recorder
        self._episode = recorder.episode
        self._conversation = Conversation(chats)
        self._tokenizer = recorder.tokenizer
        self._models = models
        self._others = {name: Conversation(model.chats) for name, model in models.items()}
        self._calls: list[Call] = []
        self._by_request: dict[bytes, list[Call]] = {}
        self._last_messages: list[Any] = []
        self._ids: dict[int, str] = {}
        self._on_close = on_close
        self.is_closed = False

    def turns(self) -> list[Turn]:
        """The turns so far, in the order in which their calls began."""
        return list(self._episode.turns)

    @property
    def completion_ids(self) -> list[str]:
        """The id of each turn's completion."""
        return [self._ids.get(id(turn), "") for turn in self._episode.turns]

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """``{"request": body, "response": body}`` of each answered call, in the order of the calls."""
        return [
            {"request": call.request, "response": call.response}
            for call in self._calls
            if call.response is not None
        ]

    @property
    def num_calls(self) -> int:
        """Number of calls so far, refused ones included."""
        return len(self._calls)

    @property
    def in_progress(self) -> int:
        """Number of calls that have no response yet."""
        return sum(not call.task.done() for call in self._calls)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a response."""
        return sum(call.num_waiting for call in self._calls)

    def call(self, kind: str, content: bytes, *, is_retry: bool = False) -> Call:
        """Begin to answer a request, or find the call that it repeats.

        Args:
            kind: ``"chat"`` or ``"tokens"``.
            content: the request's body.
            is_retry: whether the client has sent this request before and wants the same reply.

        Raises:
            RequestError: if the session is closed.
        """
        if self.is_closed:
            raise ended()
        key = hashlib.sha256(kind.encode() + content).digest()
        alike = self._by_request.setdefault(key, [])
        if is_retry and alike:
            # What nobody got is asked for again, rather than what somebody has.
            lost = [call for call in alike if not call.is_delivered]
            repeated = (lost or alike)[-1]
            if repeated.can_be_shared:
                return repeated
            alike.remove(repeated)
        call = Call()
        call.task = asyncio.ensure_future(self._answer(call, kind, content))
        # Errors are given to whoever waits; without anybody, they are not worth a log.
        call.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._calls.append(call)
        alike.append(call)
        return call

    async def close(self) -> None:
        """End the session: cancel the calls in progress and refuse further ones (status 409)."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_close(self)
        await cancel_all(call.task for call in self._calls if not call.task.done())
        for call in reversed(self._calls):
            if call.turn is not None and not call.is_delivered:
                self._recorder.drop(call.turn)
        await self.http_client.aclose()

    async def _answer(self, call: Call, kind: str, content: bytes) -> _Body:
        """Answer a request; its task."""
        try:
            body = decoded(content)
            call.request = self._share_messages(body)
            if kind == "chat":
                call.response = await self._answer_chat(read_chat(body), call)
            else:
                call.response = await self._answer_tokens(read_tokens(body), call)
        except RecursionError:
            raise RequestError("the body must not be nested so deeply.") from None
        except asyncio.CancelledError as error:
            if self.is_closed or call.is_abandoned:
                raise
            raise self._engine_failed(RuntimeError("the engine cancelled the call.")) from error
        return call.response

    async def _answer_chat(self, request: ChatRequest, call: Call) -> _Body:
        other = self._models.get(request.model)
        conversation = self._conversation if other is None else self._others[request.model]
        prompt = await conversation.prompt(request)
        completion = await self._generate(request, prompt.token_ids, other, call, prompt.images)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        if call.turn is not None:
            # The turn's prompt shares memory with those of other turns.
            prompt = replace(prompt, token_ids=call.turn.prompt_ids)
        reply = conversation.read(prompt, completion, request.stops)
        self._note(call.turn, id, [*prompt.new, reply.said])
        return chat_completion(id, request.model, [reply], len(prompt.token_ids))

    async def _answer_tokens(self, request: TokensRequest, call: Call) -> _Body:
        other = self._models.get(request.model)
        completion = await self._generate(request, request.prompt, other, call)
        id = f"cmpl-{uuid.uuid4().hex}"
        self._note(call.turn, id, [])
        tokenizer = self._tokenizer if other is None else getattr(other.engine, "tokenizer", None)
        text = ""
        if tokenizer is not None:
            has_stop_token = completion.stop_token is not None
            said = completion.token_ids[: -1 if has_stop_token else None]
            text = before_stop(decode(tokenizer, list(said)), request.stops)
        return text_completion(id, request.model, completion, text, len(request.prompt))

    async def _generate(
        self,
        request: ChatRequest | TokensRequest,
        prompt_ids: Sequence[int],
        other: Model | None,
        call: Call,
        images: Sequence[StoredImage] = (),
    ) -> Completion:
        """Sample a reply; the policy's is a turn from here on."""
        sampling = request.arguments(images)
        try:
            if other is None:
                call.turn = await self._recorder.take_turn(prompt_ids, **sampling)
                completion = call.turn.completion
            else:
                completion = await other.engine.generate(prompt_ids, **sampling)
        except (LimitReached, TypeError, ValueError) as error:
            raise request.refusal(error) from error
        except Exception as error:
            if self._recorder.closed:  # Its time is up.
                raise ended() from error
            raise self._engine_failed(error) from error
        self.error = None
        return completion

    def _engine_failed(self, error: Exception) -> RequestError:
        self.error = error
        return RequestError(
            f"the engine failed: {type(error).__name__}: {error}", status=500, kind="server_error"
        )

    def _share_messages(self, body: _Body) -> _Body:
        """Replace messages by equal ones of the last call, so that memory grows with new ones only."""
        messages = body.get("messages")
        before = self._last_messages
        if isinstance(messages, list):
            self._last_messages = messages
            for k, (old, new) in enumerate(zip(before, messages, strict=False)):
                if old == new and _is_same(old, new):
                    messages[k] = old
        return body

    def _note(self, turn: Turn | None, id_: str, messages: list[Mapping[str, Any]]) -> None:
        """Write into a turn what the recorder does not know."""
        if turn is not None:
            turn.messages = messages
            turn.info = {"completion_id": id_}
            self._ids[id(turn)] = id_


def ended() -> RequestError:
    """The error for requests of an episode that is over."""
    return RequestError("the episode of this key has ended.", status=409, code="session_ended")


def _is_same(old: Any, new: Any) -> bool:
    """Whether equal JSON values are the same: ``True`` equals 1, but is another value."""
    is_flat = isinstance(old, Mapping) and all(type(value) is str for value in old.values())
    return is_flat or repr(old) == repr(new)
