"""The OpenAI completions protocol with token ids in and out, as vLLM and SGLang speak it.

An answer is taken token for token or not at all: text is never encoded again, and what is missing or
does not fit together is an error that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_mt.http_client import TryAgainError

__all__ = [
    "OWN_FIELDS",
    "Answer",
    "MalformedAnswerError",
    "completions_url",
    "max_model_len",
    "parse_answer",
]

OWN_FIELDS = frozenset({"prompt", "model", "max_tokens", "n", "best_of", "stream", "echo"})
"""What a request says about itself, and what would change the shape of its answer."""

_TOKEN_ID = "token_id:"
_UNFINISHED = ("abort", "error")
"""Finish reasons of answers that a server gave up, as it does while it takes new weights."""
_MINUS_INFINITY = -9999.0
"""What vLLM sends in place of minus infinity, which JSON does not have."""
_LARGEST_ID = 2**31 - 1


class MalformedAnswerError(ValueError):
    """A server's answer lacks something, or contradicts itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered to one prompt."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    versions: list[int] | None
    """The weight version that sampled each token, if the server says."""


def completions_url(base_url: str) -> str:
    """Where completions are asked for.

    Args:
        base_url: of the server, with or without ``/v1``.

    Raises:
        ValueError: if it is no HTTP address.

    Examples:
        >>> completions_url("http://localhost:8000")
        'http://localhost:8000/v1/completions'
        >>> completions_url("https://host/model/v1/")
        'https://host/model/v1/completions'
    """
    url = base_url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(
            f"base_url must begin with http:// or https://, got {base_url!r}: "
            "for example 'http://localhost:8000/v1'."
        )
    if url.endswith("/v1/completions"):
        return url
    return f"{url}/completions" if url.endswith("/v1") else f"{url}/v1/completions"


def max_model_len(payload: Any, model: str) -> int | None:
    """How many tokens of prompt and answer together a server's list of models says that a model takes.

    Args:
        payload: the JSON of ``GET /v1/models``.
        model: the model's name.

    Returns:
        The number; ``None`` if the server does not say.

    Examples:
        >>> max_model_len({"data": [{"id": "tiny", "max_model_len": 4096}]}, "tiny")
        4096
    """
    models = payload.get("data") if isinstance(payload, Mapping) else None
    for entry in models if isinstance(models, list) else []:
        if isinstance(entry, Mapping) and entry.get("id") == model:
            size = entry.get("max_model_len")
            return size if isinstance(size, int) and size > 0 else None
    return None


def parse_answer(
    payload: Any,
    *,
    max_new_tokens: int,
    prompt: Sequence[int] | None = None,
    vocab_size: int | None = None,
    version_key: str | None = None,
) -> Answer:
    """Take the sampled tokens out of a server's answer.

    Args:
        payload: the JSON that the server sent.
        max_new_tokens: what the request allowed.
        prompt: the tokens that were sent; a server that says which it saw must have seen these.
        vocab_size: how many tokens the model has, if that is known.
        version_key: where the server says which weights sampled, as a dotted path in the choice or at
            the root: a number, or a list with one for each token.

    Raises:
        TryAgainError: if the server gave the answer up.
        MalformedAnswerError: if a field is missing or does not fit.

    Examples:
        >>> choice = {
        ...     "token_ids": [7, 2],
        ...     "logprobs": {"token_logprobs": [-0.5, -0.1]},
        ...     "finish_reason": "stop",
        ... }
        >>> answer = parse_answer({"choices": [choice]}, max_new_tokens=8)
        >>> answer.token_ids, answer.log_probs, answer.finish_reason
        ([7, 2], [-0.5, -0.1], 'stop')
    """
    if not isinstance(payload, Mapping):
        raise MalformedAnswerError(f"the answer must be a JSON object, got {_shown(payload)}.")
    choices = payload.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise MalformedAnswerError(f"choices must hold one completion, got {_shown(choices)}.")
    choice = choices[0]
    reason = choice.get("finish_reason")
    if reason in _UNFINISHED:
        raise TryAgainError(f"the server gave its answer up: finish_reason {_shown(reason)}.")
    if reason not in ("stop", "length"):
        raise MalformedAnswerError(
            f'choices[0].finish_reason must be "stop" or "length", got {_shown(reason)}.'
        )
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise MalformedAnswerError(
            f"choices[0].logprobs must be an object with token_logprobs, got {_shown(logprobs)}: does "
            "the server support logprobs?"
        )
    seen = choice.get("prompt_token_ids")
    if prompt is not None and seen is not None and seen != list(prompt):
        raise MalformedAnswerError(
            f"choices[0].prompt_token_ids must be the {len(prompt)} tokens that were sent, "
            f"{_shown(list(prompt))}, got {_shown(seen)}: does the server truncate prompts, or add "
            "tokens to them?"
        )
    token_ids = _token_ids(choice, logprobs)
    largest = _LARGEST_ID if vocab_size is None else vocab_size - 1
    if any(token > largest for token in token_ids):
        raise MalformedAnswerError(
            f"choices[0].token_ids must be in 0..{largest}, got {max(token_ids)}: does the server "
            "serve another model?"
        )
    log_probs = _log_probs(logprobs, len(token_ids))
    if not token_ids:
        raise MalformedAnswerError("choices[0] must hold at least one sampled token, got none.")
    if len(token_ids) > max_new_tokens:
        raise MalformedAnswerError(
            f"choices[0] must hold at most max_tokens={max_new_tokens} tokens, got {len(token_ids)}."
        )
    versions = None
    if version_key is not None:
        versions = _versions(payload, choice, version_key, len(token_ids))
    return Answer(token_ids, log_probs, reason, versions)


def _token_ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> list[int]:
    """The sampled tokens, from whichever field has them; both must agree where both are given."""
    token_ids, tokens = choice.get("token_ids"), logprobs.get("tokens")
    if token_ids is not None and not (
        isinstance(token_ids, list) and all(_is_token_id(token) for token in token_ids)
    ):
        raise MalformedAnswerError(
            f"choices[0].token_ids must be a list of token ids, got {_shown(token_ids)}."
        )
    named = _named_token_ids(tokens)
    if token_ids is None and named is None:
        raise MalformedAnswerError(
            "choices[0].token_ids is missing and choices[0].logprobs.tokens, "
            f"{_shown(tokens)}, are no token ids: the server answers with text alone, which cannot be "
            "turned back into the tokens that were sampled. It must support return_token_ids or "
            "return_tokens_as_token_ids (vLLM does)."
        )
    if token_ids is not None and named is not None and token_ids != named:
        raise MalformedAnswerError(
            f"choices[0].token_ids {_shown(token_ids)} must be those of choices[0].logprobs.tokens, got "
            f"{_shown(named)}."
        )
    return list(token_ids or named or [])


def _named_token_ids(tokens: Any) -> list[int] | None:
    """Token ids from strings such as ``"token_id:12"``; ``None`` if they are anything else."""
    if not isinstance(tokens, list):
        return None
    ids: list[int] = []
    for token in tokens:
        digits = token[len(_TOKEN_ID) :] if isinstance(token, str) else ""
        if not token or not str(token).startswith(_TOKEN_ID) or not digits.isdecimal():
            return None
        ids.append(int(digits))
    return ids


def _log_probs(logprobs: Mapping[str, Any], size: int) -> list[float]:
    """One finite log-probability for each token."""
    values = logprobs.get("token_logprobs")
    field = "choices[0].logprobs.token_logprobs"
    if not isinstance(values, list) or len(values) != size:
        got = f"{len(values)}" if isinstance(values, list) else _shown(values)
        raise MalformedAnswerError(
            f"{field} must hold a number for each of {size} tokens, got {got}."
        )
    for i, value in enumerate(values):
        if (
            not _is_number(value)
            or not math.isfinite(value)
            or value > 1e-3
            or value <= _MINUS_INFINITY
        ):
            raise MalformedAnswerError(
                f"{field}[{i}] must be a log-probability, got {_shown(value)}."
            )
    return [float(value) for value in values]


def _versions(
    payload: Mapping[str, Any], choice: Mapping[str, Any], key: str, size: int
) -> list[int]:
    """The weight version of each token, as the server says."""
    found = _at(choice, key)
    found = _at(payload, key) if found is None else found
    values: Sequence[Any] = found if isinstance(found, list) else [found] * size
    try:
        versions = [int(value) for value in values]
    except (TypeError, ValueError):
        versions = []
    if len(versions) != size:
        raise MalformedAnswerError(
            f"{key} (version_key) must be a weight version, or one for each of {size} tokens, got "
            f"{_shown(found)}."
        )
    return versions


def _at(value: Any, path: str) -> Any:
    """What lies at a dotted path; ``None`` if nothing does."""
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _is_token_id(value: Any) -> bool:
    """Whether a JSON value is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value as errors name it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
