"""Requests of OpenAI clients: checked once, and read into the terms of engines.

A request is either understood as a whole or refused with an error that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_mt.agents.messages import content_of
from torchrl_mt.collectors.recorder import LIMIT_CODE, LimitReached
from torchrl_mt.engines.sampling import checked_number
from torchrl_mt.engines.stop_strings import checked_stop
from torchrl_mt.strict_json import read_json
from torchrl_mt.vision import StoredImage

__all__ = ["ChatRequest", "RequestError", "TokensRequest", "decoded", "read_chat", "read_tokens"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
"""Fields that are passed to the engine as they are."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}
"""Fields that are not supported, and their values that change nothing."""
# fmt: off
_IGNORED = frozenset((
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "stream", "stream_options", "user", "verbosity",
))
"""Fields that change nothing here."""
_CHAT = frozenset((
    "chat_template_kwargs", "max_completion_tokens", "max_tokens", "messages", "reasoning_effort",
    "tools",
))
_TOKENS = frozenset(("max_tokens", "prompt"))
# fmt: on


class RequestError(Exception):
    """An error response in OpenAI's format.

    Args:
        message: the error message.
        param: the field of the request that is wrong.
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
class _Request:
    model: str
    """The model that it asks for; ``""`` if it names none."""
    sampling: dict[str, Any]
    """Sampling parameters."""
    max_new_tokens: int | None
    stream: bool
    with_usage: bool
    """Whether a stream ends with the usage."""

    @property
    def stops(self) -> Sequence[str]:
        """The strings that end the reply."""
        return self.sampling.get("stop", ())

    def arguments(self, images: Sequence[StoredImage] = ()) -> dict[str, Any]:
        """Arguments for the engine's ``generate``; engines for text need not know of images."""
        shown = {"images": images} if images else {}
        return {"max_new_tokens": self.max_new_tokens, **self.sampling, **shown}

    def refusal(self, error: Exception) -> RequestError:
        """The error of a call that a limit or the engine refused."""
        if isinstance(error, LimitReached):
            return RequestError(str(error), kind="limit_error", code=LIMIT_CODE)
        named = [name for name in self.sampling if str(error).startswith(name)]
        return RequestError(str(error), *named[:1])


@dataclass(frozen=True)
class TokensRequest(_Request):
    """A request to continue tokens."""

    prompt: list[int]


@dataclass(frozen=True)
class ChatRequest(_Request):
    """A request for the next message of a dialogue."""

    messages: list[Mapping[str, Any]]
    template_kwargs: dict[str, Any]
    """Variables of the chat template, ``tools`` among them."""
    may_call: bool
    """Whether the reply may have tool calls."""
    n: int = 1
    """Number of replies."""
    logprobs: bool = False
    """Whether to return the log-probability of each token."""


def decoded(content: bytes) -> dict[str, Any]:
    """Decode a request's body.

    Raises:
        RequestError: if it is no JSON object.
    """
    try:
        body = read_json(content.decode())
    except ValueError as error:
        raise RequestError(f"the body must be JSON: {error}.") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}.")
    return body


def read_chat(body: Mapping[str, Any], *, several: bool = False) -> ChatRequest:
    """Read the body of ``POST /v1/chat/completions``.

    Args:
        body: the decoded JSON.
        several: whether ``n`` and ``logprobs`` are supported.

    Raises:
        RequestError: if a field is unknown or cannot be honoured.
    """
    known = _CHAT | ({"n", "logprobs"} if several else set())
    common = _read_common(body, known)
    messages: Any = body.get("messages")
    _require(_is_list(messages) and messages, "messages must be a list of messages", messages)
    for k, message in enumerate(messages):
        has_role = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        _require(has_role, f"messages[{k}] must be a mapping with a role", message, "messages")
        try:
            content_of(message)
        except ValueError as error:
            raise RequestError(f"messages[{k}]: {error}", "messages") from None
        _check_calls(message.get("tool_calls"), k)
        _check_text(message.get("tool_call_id"), f"messages[{k}].tool_call_id")
    kwargs = body.get("chat_template_kwargs") or {}
    _require(isinstance(kwargs, Mapping), "chat_template_kwargs must be a mapping", kwargs)
    effort = body.get("reasoning_effort")
    if effort is not None:
        _require(isinstance(effort, str), "reasoning_effort must be a string", effort)
        kwargs = {"reasoning_effort": effort, **kwargs}
    tools = body.get("tools")
    are_schemas = tools is None or (
        _is_list(tools)
        and all(isinstance(t, Mapping) and isinstance(t.get("function", t), Mapping) for t in tools)
    )
    _require(are_schemas, "tools must be a list of JSON schemas", tools)
    n = body.get("n") if several else None
    if n is not None:
        _checked("n", checked_number, "n", n)
    return ChatRequest(
        **common,
        messages=list(messages),
        template_kwargs={**kwargs, **({"tools": list(tools)} if tools else {})},
        may_call=body.get("tool_choice") != "none",
        n=n or 1,
        logprobs=several and bool(body.get("logprobs")),
    )


def read_tokens(body: Mapping[str, Any]) -> TokensRequest:
    """Read the body of ``POST /v1/completions``, whose prompt must be token ids.

    Raises:
        RequestError: if a field is unknown or cannot be honoured.
    """
    common = _read_common(body, _TOKENS)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not (isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)):
        raise RequestError(
            "prompt must be a list of token ids, which no tokenizer changes: use chat completions "
            f"for text. Got {_shown(prompt)}.",
            "prompt",
        )
    return TokensRequest(**common, prompt=prompt)


def _read_common(body: Mapping[str, Any], known: frozenset[str] | set[str]) -> dict[str, Any]:
    """Read what both kinds of requests have; refuse unknown fields."""
    for name, value in body.items():
        if value is None or name in _IGNORED or name in known or name in _SAMPLING:
            continue
        if name not in _NEUTRAL:
            raise RequestError(
                f"{name} is not known here, got {_shown(value)}: leave it out.", name
            )
        if not any(value == plain and type(value) in _alike(plain) for plain in _NEUTRAL[name]):
            instead = " or ".join(map(_shown, _NEUTRAL[name]))
            raise RequestError(
                f"{name}={_shown(value)} cannot be done here: leave it out, or give {instead}.",
                name,
            )
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    stop = sampling.pop("stop", None)
    stops = list(_checked("stop", checked_stop, None if stop == "" else stop))
    for name, value in sampling.items():
        _checked(name, checked_number, name, value)
    if stops:
        sampling["stop"] = stops
    model, stream = body.get("model") or "", body.get("stream") or False
    options = body.get("stream_options") or {}
    _require(isinstance(model, str), "model must be a name", model)
    _require(isinstance(stream, bool), "stream must be true or false", stream)
    _require(isinstance(options, Mapping), "stream_options must be a mapping", options)
    return {
        "model": model,
        "sampling": sampling,
        "max_new_tokens": _max_new_tokens(body),
        "stream": stream,
        "with_usage": bool(options.get("include_usage")),
    }


def _max_new_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return _checked(name, checked_number, "max_new_tokens", body[name])
    return None


def _require(is_right: Any, what: str, value: Any, field: str | None = None) -> None:
    """Refuse a request whose field, by default the first word of ``what``, is wrong."""
    if not is_right:
        raise RequestError(f"{what}, got {_shown(value)}.", field or what.partition(" ")[0])


def _checked(field: str, check: Callable[..., Any], *args: Any) -> Any:
    """What a check of the engines returns; its error names the field."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error).replace("max_new_tokens", field), field) from None


def _check_calls(calls: Any, k: int) -> None:
    if calls is None:
        return
    are_calls = _is_list(calls) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    )
    what = f"messages[{k}].tool_calls must be a list of calls of functions"
    _require(are_calls, what, calls, "messages")
    for c, call in enumerate(calls):
        _check_text(call.get("id"), f"messages[{k}].tool_calls[{c}].id")
        name = call["function"].get("name")
        _check_text(name or [], f"messages[{k}].tool_calls[{c}].function.name")


def _check_text(value: Any, what: str) -> None:
    _require(value is None or isinstance(value, str), f"{what} must be text", value, "messages")


def _alike(plain: Any) -> tuple[type, ...]:
    """Types that a neutral value may have: ``0.0`` is a penalty of 0, ``False`` is not."""
    return (int, float) if type(plain) in (int, float) else (type(plain),)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _shown(value: Any) -> str:
    """The beginning of a value as JSON, for errors."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:80]}..."
