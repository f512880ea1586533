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
from torchrl_mt.engines.completions.native import Request, make_request
from torchrl_mt.engines.request_checks import image_spans
from torchrl_mt.vision import StoredImage, VisionProcessor

__all__ = ["ImageApi", "ImageRequests"]

ImageApi = Literal["vllm", "sglang"]
"""Whose form a server takes prompts with images in."""

_RENDER = "/v1/chat/completions/render"
_KEPT = 32
"""Images that vLLM has prepared and that are kept for the next turns."""


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
        post: sends a request and returns what its ``parse`` makes of the reply's JSON.
    """

    def __init__(self, api: ImageApi, vision: VisionProcessor, post: Callable[..., Any]) -> None:
        self._vision = vision
        self._api = api
        self._post = post
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
            parse: reads a reply of OpenAI's completions.

        Raises:
            ValueError: if the prompt's image tokens are not those of the images.
            CompletionsError: if the server cannot prepare an image, or prepares it otherwise.
        """
        # In a thread, since the first look at an image takes milliseconds.
        sizes = await asyncio.to_thread(
            lambda: [len(self._vision.size(image).token_ids) for image in images]
        )
        spans = image_spans(self._vision, prompt, sizes)
        if self._api == "sglang":
            uris = [image.data_uri() for image in images]
            shown = self._vision.collapsed(prompt, images), uris, spans
            return make_request("sglang", body, prompt, parse, shown=shown)
        pairs = zip(images, sizes, strict=True)
        prepared = [await self._prepare(image, size) for image, size in pairs]
        features = _features(prepared, spans)
        return make_request("vllm", body, prompt, parse, features=features)

    async def _prepare(self, image: StoredImage, size: int) -> _Prepared:
        """Have the server prepare an image, which only its own release can."""
        with self._lock:
            known = self._prepared.get(image.key)
            if known is not None:
                self._prepared.move_to_end(image.key)
                return known
        part = {"type": "image_url", "image_url": {"url": image.data_uri()}}
        request = {"messages": [{"role": "user", "content": [part]}]}
        made = await self._post(Request(_RENDER, request, partial(_rendered, size=size)))
        with self._lock:
            self._prepared[image.key] = made
            if len(self._prepared) > _KEPT:
                self._prepared.popitem(last=False)
        return made


def _features(prepared: Sequence[_Prepared], spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Describe images to vLLM's ``/inference/v1/generate``."""
    features: dict[str, Any] = {
        "mm_hashes": {"image": [each.hash for each in prepared]},
        "mm_placeholders": {"image": [{"offset": at, "length": size} for at, size in spans]},
        "kwargs_data": {"image": [each.data for each in prepared]},
    }
    if any(each.metadata is not None for each in prepared):
        features["mm_metadata"] = {"image": [each.metadata for each in prepared]}
    return features


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
