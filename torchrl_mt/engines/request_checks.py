"""Checks that all engines make of their sizes, of requests, and of the images of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_mt.checks import check_positive, check_token_ids
from torchrl_mt.engines.sampling import checked_number
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.model import VisionModel, check_no_video

__all__ = ["checked_images", "checked_request", "image_spans", "require_positive"]


def require_positive(**numbers: float | None) -> None:
    """Require numbers above 0; ``None`` passes.

    Raises:
        ValueError: names the first number that is not above 0.
    """
    for name, value in numbers.items():
        if value is not None:
            check_positive(name, value)


def checked_request(
    prompt_ids: Sequence[int],
    max_new_tokens: int | None,
    *,
    longest: int,
    total: int | None,
    bound: str,
    vocab_size: int | None = None,
) -> tuple[list[int], int]:
    """Check a request, and set the length of its response where none is given.

    Args:
        prompt_ids: tokens of the prompt.
        max_new_tokens: maximum length of the response; if ``None``, ``longest`` or the room that the
            prompt leaves, whichever is less.
        longest: the engine's limit of a response.
        total: limit of prompt and response together; ``None`` is no limit.
        bound: the limit ``total`` in words, for the error message.
        vocab_size: size of the vocabulary; ``None`` if unknown.

    Returns:
        The prompt as a list, and the maximum length of its response.

    Raises:
        TypeError: if ``prompt_ids`` are no integers, or ``max_new_tokens`` is none.
        ValueError: if the prompt is empty or not in the vocabulary, ``max_new_tokens`` is below 1, or
            both together exceed ``total``.

    Examples:
        >>> checked_request([1, 2], None, longest=9, total=8, bound="8 tokens")
        ([1, 2], 6)
    """
    prompt, limit = check_token_ids(prompt_ids), max_new_tokens
    if limit is None:
        limit = longest if total is None else min(longest, max(1, total - len(prompt)))
    if not prompt:
        raise ValueError("prompt_ids must hold at least one token, got none.")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        known = "from 0 on" if vocab_size is None else f"in 0..{vocab_size - 1}"
        raise ValueError(
            f"prompt_ids must be token ids {known}, got {lowest if lowest < 0 else highest}: do model "
            "and tokenizer belong together?"
        )
    limit = checked_number("max_new_tokens", limit)
    if total is not None and len(prompt) + limit > total:
        raise ValueError(
            f"prompt_ids of {len(prompt)} tokens and max_new_tokens={limit} exceed {bound}."
        )
    return prompt, limit


def checked_images(
    prompt: Sequence[int], images: Any, facts: VisionModel | VisionProcessor | None, refusal: str
) -> list[StoredImage]:
    """Read the images of a prompt.

    Args:
        prompt: its tokens.
        images: all of its images, in order, in any form that
            :meth:`StoredImage.of <torchrl_mt.vision.StoredImage.of>` takes; ``None`` is none.
        facts: facts on the model or the processor; ``None`` if the model takes no images.
        refusal: why the engine takes no images; empty if it does.

    Raises:
        TypeError: if ``images`` are no list, one is no image, or they are refused.
        ValueError: if an image cannot be read, a prompt that shows images comes without any, or it has
            tokens that stand for videos, which nobody fills in.
    """
    images = () if images is None else images
    if not isinstance(images, (list, tuple)):
        raise TypeError(f"images must be a list of a prompt's images, got {type(images).__name__}.")
    if images and refusal:
        raise TypeError(refusal)
    stored = []
    for k, image in enumerate(images):
        try:
            stored.append(StoredImage.of(image))
        except (TypeError, ValueError) as error:
            raise type(error)(f"images[{k}]: {error}") from error
    if facts is None:
        return stored
    check_no_video(facts, "prompt_ids", prompt)
    token = facts.image_token_id
    if not stored and token in prompt:
        raise ValueError(
            f"images must hold the images that prompt_ids show, got none for {prompt.count(token)} "
            f"image tokens (id {token})."
        )
    return stored


def image_spans(
    vision: VisionProcessor, prompt: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Find the tokens of a prompt's images, as :meth:`VisionProcessor.spans` does."""
    try:
        return vision.spans(prompt, sizes)
    except ValueError as error:
        raise ValueError(f"prompt_ids do not fit images: {error}") from None
