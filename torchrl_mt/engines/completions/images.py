"""Prompts with images for servers that take token ids, in the forms of vLLM and SGLang.

A server sees exactly the tokens of the prompt: what it would make of them itself is compared, and
another number of image tokens, or another token anywhere, is an error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

from torchrl_mt.engines.completions.api import MalformedAnswerError
from torchrl_mt.http_client import HttpClient
from torchrl_mt.vision import StoredImage, VisionProcessor

__all__ = ["ImageApi", "ImageRequests", "Request", "barring"]

ImageApi = Literal["vllm", "sglang"]
"""Whose form a server takes prompts with images in."""

_BARRED = -100.0
"""Added to the logits of tokens that must not be sampled: the least that servers take."""
_KEPT = 32
"""Images that vLLM has prepared and that are kept for the next turns."""

_UNSENT = ("model", "prompt", "return_token_ids", "return_tokens_as_token_ids")
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
    """A request for tokens after a prompt with images."""

    client: HttpClient
    body: dict[str, Any]
    parse: Callable[[Any], Any]
    """Reads the JSON of the answer."""


class _Prepared(NamedTuple):
    """An image as vLLM's renderer prepared it."""

    hash: str
    data: str
    metadata: str | None


class ImageRequests:
    """Makes requests of prompts with images.

    Args:
        api: the server's form.
        vision: prepares the images as the server does; makes the prompts' image tokens.
        make_client: makes a client of the path of an endpoint, such as ``"/generate"``.
    """

    def __init__(self, api: ImageApi, vision: VisionProcessor, make_client: Any) -> None:
        self._vision = vision
        path = "/generate" if api == "sglang" else "/inference/v1/generate"
        self._api = api
        self._client: HttpClient = make_client(path)
        self._renderer: HttpClient | None = None
        if api == "vllm":
            self._renderer = make_client("/v1/chat/completions/render")
        self._prepared: OrderedDict[str, _Prepared] = OrderedDict()
        self._lock = Lock()

    async def make(
        self,
        body: Mapping[str, Any],
        prompt: list[int],
        images: Sequence[StoredImage],
        parse: Callable[[Any], Any],
    ) -> Request:
        """Make a request.

        Args:
            body: what would be sent for text: OpenAI's completions.
            prompt: the tokens.
            images: all of the prompt's images, in order.
            parse: reads an answer of OpenAI's completions.

        Raises:
            ValueError: if the prompt's image tokens are not those of the images.
            CompletionsError: if the server cannot prepare an image, or prepares it otherwise.
        """
        # In a thread, since the first look at an image takes milliseconds.
        sizes = await asyncio.to_thread(
            lambda: [len(self._vision.size(image).token_ids) for image in images]
        )
        try:
            spans = self._vision.spans(prompt, sizes)
        except ValueError as error:
            raise ValueError(f"prompt_ids do not fit images: {error}") from None
        rest = {name: value for name, value in body.items() if name not in _UNSENT}
        if self._api == "sglang":
            sent = _to_sglang(rest, self._vision.collapsed(prompt, images), images)
            convert = partial(_from_sglang, prompt=prompt, spans=spans)
            return Request(self._client, sent, lambda payload: parse(convert(payload)))
        prepared = [
            await self._prepare(body["model"], image, size)
            for image, size in zip(images, sizes, strict=True)
        ]
        sent = _to_vllm(rest, body["model"], prompt, prepared, spans)
        return Request(self._client, sent, lambda payload: parse(_from_vllm(payload)))

    def close(self) -> None:
        """Fail all open requests and close every connection."""
        self._client.close()
        if self._renderer is not None:
            self._renderer.close()

    async def _prepare(self, model: str, image: StoredImage, size: int) -> _Prepared:
        """Have the server prepare an image, which only its own release can."""
        with self._lock:
            known = self._prepared.get(image.key)
            if known is not None:
                self._prepared.move_to_end(image.key)
                return known
        part = {"type": "image_url", "image_url": {"url": image.data_uri()}}
        request = {"model": model, "messages": [{"role": "user", "content": [part]}]}
        assert self._renderer is not None
        made = await self._renderer.post(request, partial(_rendered, size=size))
        with self._lock:
            self._prepared[image.key] = made
            if len(self._prepared) > _KEPT:
                self._prepared.popitem(last=False)
        return made


def barring(vision: VisionProcessor, bias: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return OpenAI's ``logit_bias`` that bars the tokens of images and videos.

    Args:
        vision: knows the tokens.
        bias: what the request itself asks for.
    """
    return {**(bias or {}), **{str(token): _BARRED for token in vision.barred}}


def _to_vllm(
    body: dict[str, Any],
    model: str,
    prompt: list[int],
    prepared: Sequence[_Prepared],
    spans: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Make the body of vLLM's ``/inference/v1/generate``."""
    features: dict[str, Any] = {
        "mm_hashes": {"image": [each.hash for each in prepared]},
        "mm_placeholders": {"image": [{"offset": at, "length": size} for at, size in spans]},
        "kwargs_data": {"image": [each.data for each in prepared]},
    }
    if any(each.metadata is not None for each in prepared):
        features["mm_metadata"] = {"image": [each.metadata for each in prepared]}
    top = {name: body.pop(name) for name in _VLLM_TOP if name in body}
    own = {"model": model, "token_ids": prompt, "features": features, "stream": False}
    return {**own, "sampling_params": body, **top}


def _to_sglang(
    body: dict[str, Any], prompt: list[int], images: Sequence[StoredImage]
) -> dict[str, Any]:
    """Make the body of SGLang's ``/generate``; the prompt has one placeholder for each image."""
    body.pop("logprobs", None)
    top = {name: body.pop(name) for name in _SGLANG_TOP if name in body}
    return {
        "input_ids": prompt,
        "image_data": [image.data_uri() for image in images],
        "sampling_params": {_SGLANG_NAMES.get(name, name): body[name] for name in body},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "stream": False,
        **top,
    }


def _rendered(payload: Any, *, size: int) -> _Prepared:
    """Read what vLLM's renderer made of one image."""
    features = payload.get("features") if isinstance(payload, Mapping) else None
    if not isinstance(features, Mapping):
        raise MalformedAnswerError(
            "features must describe the image, got none: does the server's model take images?"
        )
    (key,) = _images_of(features, "mm_hashes")
    (place,) = _images_of(features, "mm_placeholders")
    (data,) = _images_of(features, "kwargs_data")
    if not isinstance(data, str):
        raise MalformedAnswerError(
            f"features.kwargs_data must have the image's data, got {data!r}."
        )
    length = place.get("length") if isinstance(place, Mapping) else None
    if length != size:
        raise MalformedAnswerError(
            f"the server makes {length} tokens of an image that has {size} here: give both "
            "the same processor, with the same limits of pixels (vLLM: --mm-processor-kwargs)."
        )
    metadata = (features.get("mm_metadata") or {}).get("image") or [None]
    return _Prepared(key, data, metadata[0])


def _images_of(features: Mapping[str, Any], name: str) -> list[Any]:
    """The entry of the one image in a field of features."""
    found = (features.get(name) or {}).get("image")
    if not isinstance(found, list) or len(found) != 1:
        raise MalformedAnswerError(
            f"features.{name}.image must have one entry, got {found!r:.100}."
        )
    return found


def _from_vllm(payload: Any) -> Any:
    """Convert an answer of vLLM's ``/inference/v1/generate``."""
    choices = []
    for choice in payload["choices"]:
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None
        if isinstance(content, list):
            logprobs = {
                "tokens": [each.get("token") for each in content],
                "token_logprobs": [each.get("logprob") for each in content],
            }
        choices.append({**choice, "logprobs": logprobs})
    return {**payload, "choices": choices}


def _from_sglang(payload: Any, *, prompt: Sequence[int], spans: Sequence[tuple[int, int]]) -> Any:
    """Convert an answer of SGLang's ``/generate``, and compare the prompt that it saw."""
    info = payload["meta_info"]
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
    reason = info.get("finish_reason") or {}
    sampled = info.get("output_token_logprobs")
    choice = {
        "finish_reason": reason.get("type"),
        "matched_stop": reason.get("matched"),
        "token_ids": None if sampled is None else [entry[1] for entry in sampled],
        "logprobs": None
        if sampled is None
        else {"token_logprobs": [entry[0] for entry in sampled]},
    }
    # The completions API has the same under another name.
    return {**payload, "metadata": info, "choices": [choice]}
