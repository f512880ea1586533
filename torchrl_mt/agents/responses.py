"""Responses in OpenAI's format: completions, and the chunks of streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sse_starlette import ServerSentEvent

from torchrl_mt.agents.conversation import Reply
from torchrl_mt.engines import Completion

__all__ = ["chat_completion", "event_stream", "model_list", "text_completion"]


def chat_completion(
    id: str,
    model: str,
    replies: Sequence[Reply],
    prompt_tokens: int,
    *,
    tokenizer: Any = None,
    logprobs: bool = False,
) -> dict[str, Any]:
    """Body of a ``chat.completion``.

    Args:
        id: id of the completion.
        model: the model as the client named it.
        replies: one reply per choice.
        prompt_tokens: number of tokens of the prompt.
        tokenizer: decodes tokens for ``logprobs``.
        logprobs: whether to give the log-probability of each token.
    """
    choices = [
        {
            "index": k,
            "message": {**reply.message, "refusal": None},
            "finish_reason": reply.finish_reason,
            "logprobs": _logprobs(reply.completion, tokenizer) if logprobs else None,
        }
        for k, reply in enumerate(replies)
    ]
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    return _body(id, "chat.completion", model, choices, prompt_tokens, sampled)


def text_completion(
    id: str, model: str, completion: Completion, text: str, prompt_tokens: int
) -> dict[str, Any]:
    """Body of a ``text_completion``; its choice also has the sampled ``token_ids``."""
    token_ids = list(completion.token_ids)
    choice = {
        "index": 0,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    return _body(id, "text_completion", model, [choice], prompt_tokens, len(token_ids))


def chunks(completion: Mapping[str, Any], *, with_usage: bool = False) -> Iterator[dict[str, Any]]:
    """Split the body of a completion into the chunks of a stream.

    Args:
        completion: the body.
        with_usage: whether a last chunk has the usage.
    """
    head = {name: completion[name] for name in ("id", "created", "model")}
    is_chat = completion["object"] == "chat.completion"
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    if with_usage:
        head["usage"] = None
    for choice in completion["choices"]:
        end = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
        if not is_chat:
            yield {**head, "choices": [choice]}
            continue
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": k, **call} for k, call in enumerate(delta["tool_calls"])
            ]
        first = {**end, "logprobs": choice["logprobs"], "finish_reason": None, "delta": delta}
        yield {**head, "choices": [first]}
        yield {**head, "choices": [{**end, "delta": {}}]}
    if with_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}


def event_stream(completion: Mapping[str, Any], *, with_usage: bool = False) -> bytes:
    """The chunks of a completion as server-sent events."""
    events = [json.dumps(chunk) for chunk in chunks(completion, with_usage=with_usage)]
    return b"".join(ServerSentEvent(event, sep="\n").encode() for event in [*events, "[DONE]"])


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """Body of the list of models."""
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 0, "owned_by": "torchrl_mt"}
            for name in names
        ],
    }


def _body(
    id: str, kind: str, model: str, choices: list[dict[str, Any]], prompt: int, sampled: int
) -> dict[str, Any]:
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model or "policy",
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def _logprobs(completion: Completion, tokenizer: Any) -> dict[str, Any]:
    texts = [tokenizer.decode([token]) for token in completion.token_ids]
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
            for text, value in zip(texts, completion.log_probs, strict=True)
        ],
        "refusal": None,
    }
