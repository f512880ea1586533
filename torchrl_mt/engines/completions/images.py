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
from torchrl_mt.engines.completions.native import (
    PATHS,
    from_sglang,
    from_vllm,
    to_sglang,
    to_vllm,
)
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.images import read_images
from torchrl_mt.vision.model import check_no_video

__all__ = ["ImageApi", "ImageRequests", "Request", "barring", "stored_images"]

ImageApi = Literal["vllm", "sglang"]
"""Whose form a server takes prompts with images in."""

_BARRED = -100.0
"""Added to the logits of tokens that must not be sampled: the least that servers take."""
_RENDER = "/v1/chat/completions/render"
_KEPT = 32
"""Images that vLLM has prepared and that are kept for the next turns."""


class Request(NamedTuple):
    """A request for tokens after a prompt."""

    path: str
    """The endpoint."""
    body: dict[str, Any]
    parse: Callable[[Any], Any]
    """Reads the JSON of the reply."""


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
        try:
            spans = self._vision.spans(prompt, sizes)
        except ValueError as error:
            raise ValueError(f"prompt_ids do not fit images: {error}") from None
        path = PATHS[self._api]
        if self._api == "sglang":
            uris = [image.data_uri() for image in images]
            sent = to_sglang(body, self._vision.collapsed(prompt, images), uris)
            convert = partial(from_sglang, prompt=prompt, spans=spans)
            return Request(path, sent, lambda payload: parse(convert(payload)))
        shown = zip(images, sizes, strict=True)
        prepared = [await self._prepare(image, size) for image, size in shown]
        sent = to_vllm(body, prompt, _features(prepared, spans))
        return Request(path, sent, lambda payload: parse(from_vllm(payload)))

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


def barring(vision: VisionProcessor, bias: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return OpenAI's ``logit_bias`` that bars the tokens of images and videos.

    Args:
        vision: knows the tokens.
        bias: what the request itself asks for.
    """
    return {**(bias or {}), **{str(token): _BARRED for token in vision.barred}}


def stored_images(
    prompt: list[int], images: Sequence[Any], vision: VisionProcessor | None, *, is_sent: bool
) -> list[StoredImage]:
    """Read the images of a prompt.

    Args:
        prompt: the tokens.
        images: in any form that :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes.
        vision: the model's processor, if there is one.
        is_sent: whether images can be sent.

    Raises:
        TypeError: if ``images`` are no list, one is no image, or they cannot be sent.
        ValueError: if an image cannot be read, or a prompt that shows images comes without any.
    """
    if not isinstance(images, (list, tuple)):
        raise TypeError(f"images must be a list of a prompt's images, got {type(images).__name__}.")
    if vision is not None:
        check_no_video(vision, "prompt_ids", prompt)
    if not images:
        token = None if vision is None else vision.image_token_id
        if token is not None and token in prompt:
            raise ValueError(
                f"images must hold the images that prompt_ids show, got none for "
                f"{prompt.count(token)} image tokens (id {token})."
            )
        return []
    if not is_sent:
        raise TypeError(
            "images cannot be sent to /v1/completions with token ids: make the engine with "
            "processor= and image_api='vllm' or 'sglang', for a server that takes them."
        )
    return read_images(images)


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
