"""Images in chat messages, in the forms of Hugging Face's chat templates and of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.processor import VisionProcessor

__all__ = [
    "for_template",
    "image_source",
    "images_of",
    "is_image_part",
    "refuse_videos",
    "with_data_uris",
    "with_stored_images",
]

_SOURCES = ("image", "image_url", "url", "path", "base64")
"""Where a part of type ``image`` has its image."""

_VIDEOS = ("video", "video_url", "input_video")
"""Types of parts that are videos."""

_SETTINGS = ("max_pixels", "min_pixels", "resized_height", "resized_width")
"""What a part may ask for elsewhere."""


def with_stored_images(
    messages: Iterable[Mapping[str, Any]], vision: VisionProcessor | None = None
) -> list[Mapping[str, Any]]:
    """Replace the images of messages by :class:`StoredImage`; messages without images stay as they are.

    Args:
        messages: chat messages.
        vision: the processor that expands their placeholders later. It looks at images of a new size
            now, so that expanding takes no time.

    Raises:
        TypeError, ValueError: if an image cannot be read, the processor refuses its size, or there is a
            video; names the message and the part.

    Examples:
        >>> import numpy as np
        >>> part = {"type": "image", "image": np.zeros((8, 8, 3), np.uint8)}
        >>> (message,) = with_stored_images([{"role": "user", "content": [part]}])
        >>> message["content"]
        [{'type': 'image', 'image': StoredImage(height=8, width=8, format='raw', nbytes=192)}]
    """
    return [_stored(message, k, vision) for k, message in enumerate(messages)]


def with_data_uris(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Replace the images of messages by ``data:`` URIs, for JSON.

    Raises:
        TypeError, ValueError: if an image cannot be read; names the message and the part.
    """

    def written(message: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = [
            {"type": "image", "image": part["image"].data_uri()} if is_image_part(part) else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    stored = with_stored_images(messages)
    return [written(each) if any(_image_parts(each)) else each for each in stored]


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[StoredImage]:
    """List the images of messages in order, as :func:`with_stored_images` left them."""
    return [part["image"] for message in messages for part in _image_parts(message)]


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave only ``{"type": "image"}`` of the images, which is all that a chat template reads."""
    return [
        {
            **message,
            "content": [{"type": "image"} if is_image_part(p) else p for p in message["content"]],
        }
        if any(_image_parts(message))
        else message
        for message in messages
    ]


def is_image_part(part: Any) -> bool:
    """Whether a part of a message's content is an image, in any form."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def refuse_videos(message: Mapping[str, Any], number: int) -> None:
    """Refuse a message with a video, of which a template writes a placeholder or nothing.

    Args:
        message: the message.
        number: its place in the dialogue, for the error.

    Raises:
        ValueError: if a part of its content is a video; names it.
    """
    content = message.get("content")
    for k, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
        if isinstance(part, Mapping) and part.get("type") in _VIDEOS:
            raise ValueError(
                f"messages[{number}]['content'][{k}] must be text or an image, got a part of type "
                f"{part['type']!r}: videos are not supported. Show frames as images."
            )


def refuse_links(message: Mapping[str, Any], number: int) -> None:
    """Refuse a message from elsewhere that names an image, instead of having it as a data URI.

    Args:
        message: the message.
        number: its place in the dialogue, for the error.

    Raises:
        ValueError: if an image is a path, an address or none; names it. No file is opened.
    """
    content = message.get("content")
    for k, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
        if not is_image_part(part):
            continue
        where = f"messages[{number}].content[{k}]"
        try:
            source = image_source(part)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(source, str) or not source.startswith("data:"):
            shown = source[:80] if isinstance(source, str) else type(source).__name__
            raise ValueError(
                f"{where}: {part['type']} must be a base64 data: URI (data:image/png;base64,...), got "
                f"{shown!r}: nothing is downloaded and no file is opened for it."
            )


def _image_parts(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        yield from filter(is_image_part, content)


def _stored(
    message: Mapping[str, Any], number: int, vision: VisionProcessor | None
) -> Mapping[str, Any]:
    refuse_videos(message, number)
    if not any(_image_parts(message)):
        return message
    parts = []
    for k, part in enumerate(message["content"]):
        if is_image_part(part):
            try:
                image = StoredImage.of(image_source(part))
                if vision is not None:
                    vision.size(image)
                part = {"type": "image", "image": image}
            except (TypeError, ValueError) as error:
                raise type(error)(f"messages[{number}]['content'][{k}]: {error}") from error
        parts.append(part)
    return {**message, "content": parts}


def image_source(part: Mapping[str, Any]) -> Any:
    """Return what a part gives as its image.

    Raises:
        ValueError: if it gives none.

    Examples:
        >>> image_source({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})
        'data:image/png;base64,AA=='
    """
    own = sorted(set(part) & set(_SETTINGS))
    if own:
        raise ValueError(f"a part must have no {own} of its own: set them in the processor.")
    for name in _SOURCES:
        if part.get(name) is not None:
            found = part[name]
            if name == "base64" and isinstance(found, str) and not found.startswith("data:"):
                return f"data:image/png;base64,{found}"
            if isinstance(found, Mapping):  # of OpenAI, or a row of a Hugging Face data set
                kinds = (found.get(kind) for kind in ("url", "bytes", "path"))
                return next((each for each in kinds if each is not None), None)
            return found
    raise ValueError(
        f"a part of type {part['type']!r} must have its image under one of {_SOURCES}, got "
        f"{sorted(part)}."
    )
