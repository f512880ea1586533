"""OpenAI chat completions that an engine samples: messages in, a message out, every token kept.

A request that continues an earlier answer continues with that answer's tokens, so sampled text is never
encoded again. Any other request starts a new conversation.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_mt.chat.assistant_messages import name_tool_results
from torchrl_mt.chat.tokens import Answer, ChatTokens
from torchrl_mt.collectors.recorder import LIMIT_CODE, LimitReached
from torchrl_mt.collectors.settings import ChatOptions
from torchrl_mt.engines import Completion, Engine
from torchrl_mt.threads import call_in_thread

__all__ = ["Completions", "RequestError", "chunks"]

_PASSED_ON = ("temperature", "top_p", "top_k", "min_p", "seed")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "stop": ("", []),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
"""Unsupported parameters, and their values that change nothing."""
# fmt: off
_IGNORED = frozenset((
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    "service_tier", "store", "stream", "stream_options", "user", "verbosity",
))
"""Parameters that change nothing here."""
_READ = frozenset((
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "max_tokens", "messages", "n",
    "tools",
))
# fmt: on


class RequestError(Exception):
    """An error response in OpenAI's format.

    Args:
        message: the error message.
        param: the parameter of the request that is wrong.
        status: the HTTP status.
        kind: OpenAI's ``type``.
        code: OpenAI's ``code``.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class _Turn:
    """An answered request."""

    options: str
    """Tools and template variables, as text."""
    shown: list[Any]
    """Identities of the messages, the answer included; see :func:`_identity`."""
    dialogue: list[Mapping[str, Any]]
    """The same messages in the chat template's form."""
    message: dict[str, Any]
    """The answer."""
    prompt_ids: list[int]
    answer_ids: list[int]
    last_token: int | None


class Completions:
    """Answers the requests of one episode.

    Args:
        engine: samples the answers.
        tokenizer: renders messages; the engine's own if ``None``.
        options: options of rendering; a request's ``tools`` and ``chat_template_kwargs`` are added.
    """

    def __init__(self, engine: Engine, tokenizer: Any, options: ChatOptions) -> None:
        self._engine = engine
        self._tokenizer: Any = (
            getattr(engine, "tokenizer", None) if tokenizer is None else tokenizer
        )
        self._options = options
        self._chats: dict[str, asyncio.Future[ChatTokens]] = {}
        self._turns: list[_Turn] = []

    async def create(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request.

        Args:
            request: the body of ``POST /chat/completions``.

        Returns:
            The body of the response, a ``chat.completion``.

        Raises:
            RequestError: if the request cannot be answered.
        """
        messages, n = _checked(request)
        kwargs = {
            **(self._options.template_kwargs or {}),
            **(request.get("chat_template_kwargs") or {}),
        }
        if request.get("tools") and request.get("tool_choice") != "none":
            kwargs["tools"] = request["tools"]
        options = json.dumps(kwargs, sort_keys=True, default=repr)
        shown = [_identity(message) for message in messages]
        plain = [_for_template(message) for message in messages]
        try:
            chat = await self._chat(options, kwargs)
            dialogue, prompt_ids = self._prompt(chat, options, shown, plain)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error
        answers = await asyncio.gather(
            *(self._answer(prompt_ids, request, k) for k in range(n)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        choices, sampled = [], 0
        for k, answer in enumerate(answers):
            assert isinstance(answer, Completion)
            ids = list(answer.token_ids)
            last = ids[-1] if answer.finish_reason == "stop" and ids else None
            said = chat.read(ids, prompt_ids=prompt_ids, messages=dialogue, last_token=last)
            sampled += len(ids)
            choices.append(self._choice(k, answer, said, request))
            self._turns.append(
                _Turn(
                    options,
                    [*shown, _identity(choices[-1]["message"])],
                    [*dialogue, said.in_dialogue],
                    said.message,
                    prompt_ids,
                    ids,
                    last,
                )
            )
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(request.get("model") or "policy"),
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": sampled,
                "total_tokens": len(prompt_ids) + sampled,
            },
        }

    async def _chat(self, options: str, kwargs: Mapping[str, Any]) -> ChatTokens:
        """Make the :class:`~torchrl_mt.collectors.ChatTokens`, once for equal options."""
        if options not in self._chats:
            self._chats[options] = asyncio.ensure_future(
                call_in_thread(
                    lambda: replace(self._options, template_kwargs=kwargs).tokens(self._tokenizer)
                )
            )
        return await asyncio.shield(self._chats[options])

    def _prompt(
        self, chat: ChatTokens, options: str, shown: list[Any], plain: list[dict[str, Any]]
    ) -> tuple[list[Mapping[str, Any]], list[int]]:
        """The dialogue in the template's form, and the prompt's tokens."""
        before = [
            turn
            for turn in self._turns
            if turn.options == options and turn.shown == shown[: len(turn.shown)]
        ]
        if not before:
            return list(plain), chat.open(plain)
        # Of equally long ones the last: a request asked twice is continued from its last answer.
        turn = max(reversed(before), key=lambda turn: len(turn.shown))
        new = name_tool_results(turn.message, plain[len(turn.shown) :])
        prompt_ids = chat.next_prompt(
            turn.dialogue, new, turn.prompt_ids, turn.answer_ids, last_token=turn.last_token
        )
        return [*turn.dialogue, *new], prompt_ids

    async def _answer(
        self, prompt_ids: list[int], request: Mapping[str, Any], k: int
    ) -> Completion:
        sampling = {name: request[name] for name in _PASSED_ON if request.get(name) is not None}
        if "seed" in sampling:
            sampling["seed"] += k
        longest = request.get("max_completion_tokens") or request.get("max_tokens")
        try:
            return await self._engine.generate(prompt_ids, max_new_tokens=longest, **sampling)
        except LimitReached as limit:
            raise RequestError(str(limit), kind="limit_error", code=LIMIT_CODE) from limit
        except (TypeError, ValueError) as error:
            raise RequestError(str(error)) from error

    def _choice(
        self, k: int, answer: Completion, said: Answer, request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """An answer as a ``choice`` of the response."""
        message: dict[str, Any] = {**said.message, "refusal": None}
        calls = message.pop("tool_calls", None)
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"]),
                    },
                }
                for call in calls
            ]
        reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
        logprobs = None
        if request.get("logprobs"):
            texts = [self._tokenizer.decode([token]) for token in answer.token_ids]
            logprobs = {
                "content": [
                    {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
                    for text, value in zip(texts, answer.log_probs, strict=True)
                ],
                "refusal": None,
            }
        return {"index": k, "message": message, "finish_reason": reason, "logprobs": logprobs}


def chunks(completion: Mapping[str, Any], *, with_usage: bool = False) -> Iterator[dict[str, Any]]:
    """Split a completion into the chunks of a stream."""
    head = {name: completion[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in completion["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": k, **call} for k, call in enumerate(delta["tool_calls"])
            ]
        said = {"index": choice["index"], "delta": delta, "logprobs": choice["logprobs"]}
        yield {**head, "choices": [{**said, "finish_reason": None}]}
        ended = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [{**ended, "logprobs": None}]}
    if with_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}


def _checked(request: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int]:
    """Check a request; return its messages and its number of answers."""
    messages = request.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages must be a list of messages, got {messages!r}.", "messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"each message must have a role, got {message!r}.", "messages")
    for name, value in request.items():
        if value is None or name in _IGNORED or name in _READ or name in _PASSED_ON:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"{name} is not known here, got {value!r}: leave it out.", name)
        if value not in _NEUTRAL[name]:
            raise RequestError(f"{name}={value!r} cannot be done here: leave it out.", name)
    n = 1 if request.get("n") is None else request["n"]
    if not isinstance(n, int) or n < 1:
        raise RequestError(f"n must be a positive number of answers, got {n!r}.", "n")
    return list(messages), n


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = list(content)
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise RequestError(f"content must be text, got the part {part!r}.", "messages")
        return "".join(part["text"] for part in parts)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"content must be text or a list of parts, got {content!r}.", "messages")
    return content or ""


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call.get("function", {}).get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _identity(message: Mapping[str, Any]) -> Any:
    """What identifies a message in any client's notation; without thoughts, which clients leave out."""
    calls = [
        (call.get("function", {}).get("name"), _arguments(call))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], _text(message), calls, message.get("tool_call_id")


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that chat templates take."""
    kept = {name: value for name, value in message.items() if value is not None}
    kept["content"] = _text(message)
    kept["role"] = "system" if message["role"] == "developer" else message["role"]
    if message.get("tool_calls"):
        kept["tool_calls"] = [
            {**call, "function": {**call.get("function", {}), "arguments": _arguments(call)}}
            for call in message["tool_calls"]
        ]
    return kept
