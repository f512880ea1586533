"""OpenAI's completions protocol with token ids in and out, as vLLM and SGLang implement it.

Replies are read token for token; text is never encoded again. A missing or inconsistent field is an
error that names it.
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
    "max_model_len",
    "parse_answer",
]

OWN_FIELDS = frozenset({"prompt", "model", "max_tokens", "n", "best_of", "stream", "echo"})
"""Request fields that the engine sets, and fields that would change the shape of the reply."""

_TOKEN_ID = "token_id:"
_UNFINISHED = ("abort", "error")
"""Finish reasons of answers that a server aborted, for example to load new weights."""
_MINUS_INFINITY = -9999.0
"""What vLLM sends for minus infinity, which JSON lacks."""
_LARGEST_ID = 2**31 - 1
_CHOICE = "choices[0]"


class MalformedAnswerError(ValueError):
    """A field of a server's reply is missing or contradicts another."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's reply to one prompt."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    versions: list[int] | None
    """Weight version that sampled each token; ``None`` if the server does not report it."""
    stopped_by: Any = None
    """The stop string or stop token that ended it, as far as the server says."""
    prompt_log_probs: list[float] | None = None
    """Log-probability of each token of the prompt, 0 of the first; ``None`` if not asked for."""


def max_model_len(payload: Any, model: str) -> int | None:
    """Read a model's limit of prompt and response together from a server's list of models.

    Args:
        payload: the JSON of ``GET /v1/models``.
        model: the model's name.

    Returns:
        The limit in tokens; ``None`` if the server does not report it. An adapter has that of its base
        model (``parent``); a model that is not listed yet, that of all models.

    Examples:
        >>> max_model_len({"data": [{"id": "tiny", "max_model_len": 4096}]}, "tiny")
        4096
    """
    models = payload.get("data") if isinstance(payload, Mapping) else None
    listed = [x for x in models if isinstance(x, Mapping)] if isinstance(models, list) else []
    entry = next((x for x in listed if x.get("id") == model), None)
    # An adapter has its base model's limit, and is not listed before it is loaded.
    base = listed if entry is None else [x for x in listed if x.get("id") == entry.get("parent")]
    for asked in ([] if entry is None else [entry], base):
        sizes = {
            size for x in asked if isinstance(size := x.get("max_model_len"), int) and size > 0
        }
        if len(sizes) == 1:
            return sizes.pop()
    return None


def parse_answer(
    payload: Any,
    *,
    max_new_tokens: int,
    prompt: Sequence[int] | None = None,
    vocab_size: int | None = None,
    version_key: str | None = None,
    scores_prompt: bool = False,
) -> Answer:
    """Read the sampled tokens from a server's reply.

    Args:
        payload: the JSON that the server sent.
        max_new_tokens: maximum length of the response that the request allowed.
        prompt: the tokens that were sent; compared with ``prompt_token_ids`` if the reply has them.
        vocab_size: size of the model's vocabulary; ``None`` if unknown.
        version_key: dotted path of the weight version, in the choice or at the root of the reply: one
            number, or a list with one per token.
        scores_prompt: whether the reply must have the log-probabilities of the prompt's tokens.

    Raises:
        TryAgainError: if the server aborted the response.
        MalformedAnswerError: if a field is missing or inconsistent.

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
    _require(isinstance(payload, Mapping), "the reply", "a JSON object", payload)
    choices = payload.get("choices")
    is_one = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping)
    _require(is_one, "choices", "a list of one completion", choices)
    choice = choices[0]
    reason = choice.get("finish_reason")
    if reason in _UNFINISHED:
        raise TryAgainError(f"the server gave its reply up: finish_reason {_shown(reason)}.")
    _require(reason in ("stop", "length"), f"{_CHOICE}.finish_reason", '"stop" or "length"', reason)
    logprobs = choice.get("logprobs")
    _require(
        isinstance(logprobs, Mapping),
        f"{_CHOICE}.logprobs",
        "an object with token_logprobs",
        logprobs,
        "does the server support logprobs?",
    )
    seen = choice.get("prompt_token_ids")
    _require(
        prompt is None or seen is None or seen == list(prompt),
        f"{_CHOICE}.prompt_token_ids",
        f"the {len(prompt or ())} tokens that were sent, {_shown(list(prompt or ()))}",
        seen,
        "does the server truncate prompts, or add tokens to them?",
    )
    token_ids = _token_ids(choice, logprobs)
    largest = _LARGEST_ID if vocab_size is None else vocab_size - 1
    _require(
        max(token_ids) <= largest,
        f"{_CHOICE}.token_ids",
        f"in 0..{largest}",
        max(token_ids),
        "does the server serve another model?",
    )
    expected = f"at most max_tokens={max_new_tokens} tokens"
    _require(len(token_ids) <= max_new_tokens, _CHOICE, expected, len(token_ids))
    log_probs = _log_probs(logprobs, len(token_ids))
    versions = None
    if version_key is not None:
        versions = _versions(payload, choice, version_key, len(token_ids))
    # vLLM's name, and SGLang's.
    stopped_by = choice.get("stop_reason", choice.get("matched_stop"))
    entries = choice.get("prompt_logprobs")
    scores = _prompt_log_probs(entries, prompt or ()) if scores_prompt else None
    return Answer(token_ids, log_probs, reason, versions, stopped_by, scores)


def _require(holds: bool, field: str, expected: str, got: Any, advice: str = "") -> None:
    """Raise an error that names the field, unless the condition holds."""
    if not holds:
        end = f": {advice}" if advice else "."
        raise MalformedAnswerError(f"{field} must be {expected}, got {_shown(got)}{end}")


def _token_ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> list[int]:
    """Read the sampled tokens; where two fields have them, both must agree."""
    token_ids, tokens = choice.get("token_ids"), logprobs.get("tokens")
    field = f"{_CHOICE}.token_ids"
    fits = token_ids is None or (
        isinstance(token_ids, list) and all(_is_token_id(token) for token in token_ids)
    )
    _require(fits, field, "a list of token ids", token_ids)
    parsed = _parse_token_strings(tokens)
    if token_ids is None and parsed is None:
        raise MalformedAnswerError(
            f"{field} is missing and {_CHOICE}.logprobs.tokens, {_shown(tokens)}, are no token ids: the "
            "server answers with text alone, which cannot be turned back into the tokens that were "
            "sampled. It must support return_token_ids or return_tokens_as_token_ids (vLLM does)."
        )
    if token_ids is not None and parsed is not None:
        _require(
            token_ids == parsed, field, f"those of {_CHOICE}.logprobs.tokens, {parsed}", token_ids
        )
    found = list(token_ids or parsed or [])
    _require(bool(found), field, "at least one sampled token", found)
    return found


def _parse_token_strings(tokens: Any) -> list[int] | None:
    """Parse strings such as ``"token_id:12"``; ``None`` if one is anything else."""
    if not isinstance(tokens, list):
        return None
    digits = [
        token.removeprefix(_TOKEN_ID)
        if isinstance(token, str) and token.startswith(_TOKEN_ID)
        else ""
        for token in tokens
    ]
    return [int(each) for each in digits] if all(each.isdecimal() for each in digits) else None


def _log_probs(logprobs: Mapping[str, Any], size: int) -> list[float]:
    """Read one finite log-probability per token."""
    values, field = logprobs.get("token_logprobs"), f"{_CHOICE}.logprobs.token_logprobs"
    fits = isinstance(values, list) and len(values) == size
    _require(fits, field, f"a list of {size} numbers, one for each token", values)
    for i, value in enumerate(values or ()):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # A NaN compares false, so it fails this test.
        is_log_prob = is_number and _MINUS_INFINITY < value <= 1e-3
        _require(is_log_prob, f"{field}[{i}]", "a log-probability", value)
    return [float(value) for value in values or ()]


def _prompt_log_probs(entries: Any, prompt: Sequence[int]) -> list[float]:
    """Read the log-probability of each token of the prompt; nothing predicts the first."""
    field, size = f"{_CHOICE}.prompt_logprobs", len(prompt)
    _require(
        isinstance(entries, list) and len(entries) == size,
        field,
        f"a list with one entry for each of {size} tokens",
        entries,
        "does the server support prompt_logprobs, as vLLM does? SGLang needs api='sglang'.",
    )
    found = [0.0]
    for i in range(1, size):
        value = _at(entries[i], f"{prompt[i]}.logprob")
        fits = isinstance(value, (int, float)) and value <= 1e-3
        _require(fits, f"{field}[{i}]", f"a log-probability of token {prompt[i]}", entries[i])
        found.append(float(value) if value > _MINUS_INFINITY else -math.inf)
    return found


def _versions(
    payload: Mapping[str, Any], choice: Mapping[str, Any], key: str, size: int
) -> list[int]:
    found = _at(choice, key)
    found = _at(payload, key) if found is None else found
    try:
        versions = [int(value) for value in (found if isinstance(found, list) else [found] * size)]
    except (TypeError, ValueError):
        versions = []
    expected = f"a weight version, or one for each of {size} tokens"
    _require(len(versions) == size, f"{key} (version_key)", expected, found)
    return versions


def _at(value: Any, path: str) -> Any:
    """Value at a dotted path; ``None`` if there is none."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: Any) -> str:
    """A value in at most about 100 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
