"""The servers' own forms of requests: vLLM's ``/inference/v1/generate``, SGLang's ``/generate``.

A request is that of OpenAI's completions in other words, and a reply is put back into theirs, so that
one parser checks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from torchrl_mt.engines.completions.api import MalformedAnswerError

__all__ = ["PATHS", "Api", "Request", "make_request"]

Api = Literal["openai", "vllm", "sglang"]
"""Whose form requests have."""

PATHS: Mapping[str, str] = {
    "openai": "/v1/completions",
    "vllm": "/inference/v1/generate",
    "sglang": "/generate",
}
"""Endpoint of each form."""

_UNSENT = ("prompt", "return_token_ids", "return_tokens_as_token_ids")
_VLLM_TOP = ("cache_salt", "kv_transfer_params", "priority", "request_id")
"""Fields of vLLM's request that are no sampling parameters."""
_SGLANG_TOP = (
    "cache_salt",
    "custom_logit_processor",
    "extra_key",
    "lora_path",
    "priority",
    "rid",
    "routing_key",
)
_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""Names of sampling parameters that differ from OpenAI's."""


class Request(NamedTuple):
    """A request for tokens after a prompt."""

    path: str
    """The endpoint."""
    body: dict[str, Any]
    parse: Callable[[Any], Any]
    """Reads the JSON of the reply."""


def make_request(
    api: Api,
    body: Mapping[str, Any],
    prompt: list[int],
    parse: Callable[[Any], Any],
    *,
    features: Mapping[str, Any] | None = None,
    shown: tuple[list[int], list[str], Sequence[tuple[int, int]]] | None = None,
) -> Request:
    """Make a request in a server's form.

    Args:
        api: whose form.
        body: what would be sent for text: OpenAI's completions.
        prompt: the tokens.
        parse: reads a reply of OpenAI's completions.
        features: of the prompt's images, for vLLM.
        shown: of a prompt with images for SGLang: the tokens with one placeholder for each image,
            ``data:`` URIs, and where the tokens of each image are.
    """
    if api == "vllm":
        sent = to_vllm(body, prompt, features)
        return Request(PATHS[api], sent, lambda said: parse(from_vllm(said)))
    if api == "sglang":
        tokens, images, spans = shown or (prompt, [], ())
        convert = partial(from_sglang, prompt=prompt, spans=spans)
        sent = to_sglang(body, tokens, images)
        return Request(PATHS[api], sent, lambda said: parse(convert(said)))
    return Request(PATHS[api], {**body, "prompt": prompt}, parse)


def to_vllm(
    body: Mapping[str, Any], prompt: Sequence[int], features: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Make the body of vLLM's ``/inference/v1/generate``.

    Args:
        body: a request of OpenAI's completions.
        prompt: the tokens.
        features: prepared images and their places.

    Examples:
        >>> to_vllm({"prompt": [5], "max_tokens": 8, "priority": 1}, [5])
        {'token_ids': [5], 'sampling_params': {'max_tokens': 8}, 'stream': False, 'priority': 1}
    """
    params = {name: value for name, value in body.items() if name not in _UNSENT}
    top = {name: params.pop(name) for name in _VLLM_TOP if name in params}
    shown = {} if features is None else {"features": features}
    own = {"token_ids": list(prompt), **shown}
    return {**own, "sampling_params": params, "stream": False, **top}


def to_sglang(
    body: Mapping[str, Any], prompt: Sequence[int], images: Sequence[str] = ()
) -> dict[str, Any]:
    """Make the body of SGLang's ``/generate``.

    Args:
        body: a request of OpenAI's completions.
        prompt: the tokens, with one placeholder for each image.
        images: ``data:`` URIs.

    Examples:
        >>> to_sglang({"prompt": [5], "max_tokens": 8, "logprobs": 1}, [5])
        {'input_ids': [5], 'sampling_params': {'max_new_tokens': 8}, 'return_logprob': True,
         'stream': False}
    """
    params = {name: value for name, value in body.items() if name not in _UNSENT}
    params.pop("logprobs", None)
    scored = {} if params.pop("prompt_logprobs", None) is None else {"logprob_start_len": 0}
    top = {name: params.pop(name) for name in _SGLANG_TOP if name in params}
    # SGLang must tell what it made of a prompt with images.
    shown = {"image_data": list(images), "return_prompt_token_ids": True} if images else {}
    return {
        "input_ids": list(prompt),
        **shown,
        "sampling_params": {_SGLANG_NAMES.get(name, name): params[name] for name in params},
        "return_logprob": True,
        **scored,
        "stream": False,
        **top,
    }


def from_vllm(payload: Any) -> Any:
    """Convert a reply of vLLM's ``/inference/v1/generate``.

    Raises:
        LookupError: if a field is missing.
        TypeError: if a field is of another kind.
    """
    choices = []
    for choice in payload["choices"]:
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None
        if isinstance(content, list):
            logprobs = {
                # Releases before 0.32 have text in place of numbers.
                "tokens": [
                    each.get("token", f"token_id:{each.get('token_id')}") for each in content
                ],
                "token_logprobs": [each.get("logprob") for each in content],
            }
        scored = payload.get("prompt_logprobs")
        choices.append({**choice, "logprobs": logprobs, "prompt_logprobs": scored})
    return {**payload, "choices": choices}


def from_sglang(
    payload: Any, *, prompt: Sequence[int], spans: Sequence[tuple[int, int]] = ()
) -> Any:
    """Convert a reply of SGLang's ``/generate``, and compare the prompt that it saw.

    ``output_ids`` and ``output_token_logprobs`` hold the stop token, which SGLang trims from the text
    alone.

    Args:
        payload: the reply.
        prompt: the tokens that were sent, with those of images.
        spans: first token and number of tokens of each image.

    Raises:
        MalformedAnswerError: if the server saw another prompt.
        LookupError: if a field is missing.
        TypeError: if a field is of another kind.
    """
    info = payload["meta_info"]
    reason = info.get("finish_reason") or {}
    if reason.get("type") != "abort":
        _check_prompt(payload, prompt, spans)
    sampled = info.get("output_token_logprobs")
    token_ids = None if sampled is None else [entry[1] for entry in sampled]
    scored = info.get("input_token_logprobs")
    said = payload.get("output_ids")
    if said is not None and token_ids is not None and list(said) != token_ids:
        raise MalformedAnswerError(
            f"output_ids must be those of meta_info.output_token_logprobs, {token_ids!r:.100}, got "
            f"{said!r:.100}: does the server sample with a speculative or beam mode?"
        )
    choice = {
        "finish_reason": reason.get("type"),
        "matched_stop": reason.get("matched"),
        "token_ids": token_ids,
        "logprobs": None
        if sampled is None
        else {"token_logprobs": [entry[0] for entry in sampled]},
        "prompt_logprobs": scored and [{str(x[1]): {"logprob": x[0]}} for x in scored],
    }
    # The completions API has the same under another name.
    return {**payload, "metadata": info, "choices": [choice]}


def _check_prompt(payload: Any, prompt: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
    """Compare the prompt that SGLang saw."""
    info = payload["meta_info"]
    if not spans:
        count = info.get("prompt_tokens", len(prompt))
        if count != len(prompt):
            raise MalformedAnswerError(
                f"meta_info.prompt_tokens must be the {len(prompt)} that were sent, got {count!r}: does "
                "the server truncate prompts, or add tokens to them?"
            )
        return
    seen = payload.get("prompt_token_ids", info.get("prompt_token_ids"))
    if not isinstance(seen, list):
        raise MalformedAnswerError(
            "prompt_token_ids must have the tokens that the server saw, got none: without them, nobody "
            "knows whether it encoded the prompt again. SGLang 0.5.13 has them."
        )
    shown = list(seen)
    if len(shown) == len(prompt):
        # SGLang may write numbers of its own in place of an image's tokens.
        for first, size in spans:
            shown[first : first + size] = prompt[first : first + size]
    if shown != list(prompt):
        where = next(
            (k for k, (a, b) in enumerate(zip(shown, prompt, strict=False)) if a != b), None
        )
        raise MalformedAnswerError(
            f"prompt_token_ids must be the {len(prompt)} tokens that were sent, got {len(shown)}, which "
            f"first differ at {where}: give the server the same processor, with the same limits of "
            "pixels, and leave SGLANG_MM_AVOID_RETOKENIZE on."
        )
