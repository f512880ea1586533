"""Images as a processor prepares them: placeholder tokens for prompts, pixels for models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.positions import grid_positions

__all__ = ["FAMILIES", "ImageInputs", "VisionProcessor", "with_processor"]

FAMILIES = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "LlavaProcessor")
"""Classes of processors whose models are supported."""

_KEPT = 1 << 28
"""Bytes of inputs that are kept, because the next turn shows the images again."""

_PROCESSORS = 4
"""Processors whose images are kept."""


@dataclass(frozen=True)
class ImageInputs:
    """What a model takes for one image."""

    token_ids: tuple[int, ...]
    """Its placeholder tokens in a prompt."""
    pixel_values: Tensor
    """float32: patches ``[P, D]``, or one picture ``[1, C, H, W]``."""
    grid: tuple[int, int, int] | None
    """Patches in time, height and width; None for models without."""


class ImageSize(NamedTuple):
    """How large an image is for a model."""

    token_ids: tuple[int, ...]
    """Its placeholder tokens in a prompt."""
    grid: tuple[int, int, int] | None
    """Patches in time, height and width; None for models without."""


class VisionProcessor:
    """A Hugging Face processor of one of the supported :data:`FAMILIES`.

    Args:
        processor: has ``tokenizer`` and ``image_processor``.

    Raises:
        TypeError: if it is of no supported family.

    Examples:
        >>> from torchrl_mt.testing import tiny_vl_model
        >>> import numpy as np
        >>> _, processor = tiny_vl_model()
        >>> vision = VisionProcessor(processor)
        >>> image = StoredImage.of(np.zeros((8, 24, 3), np.uint8))
        >>> vision.inputs(image).grid, len(vision.inputs(image).token_ids)
        ((1, 2, 6), 3)
    """

    def __init__(self, processor: Any) -> None:
        names = [kind.__name__ for kind in type(processor).__mro__]
        self.family = next((name for name in names if name in FAMILIES), "")
        """Name of the processor's class."""
        if not self.family:
            raise TypeError(
                f"processor must be one of {', '.join(FAMILIES)} of transformers, got "
                f"{type(processor).__name__}: models with images of another family are not supported."
            )
        self._processor = processor
        self.tokenizer = processor.tokenizer
        self.image_token_id = int(processor.image_token_id)
        """The placeholder: once per image in a rendered text, several times in a prompt."""
        video = getattr(processor, "video_token_id", None)
        self.barred = tuple(int(t) for t in (self.image_token_id, video) if t is not None)
        """Tokens that stand for images and videos: nobody may sample them."""
        found = (getattr(processor, name, None) for name in ("image_token", "video_token"))
        self.placeholders = {token for token in found if isinstance(token, str)}
        """Names of the tokens that stand for images and videos."""
        token = str(processor.image_token)
        marked = "Qwen" in self.family
        self.mark = f"<|vision_start|>{token}<|vision_end|>" if marked else token
        """The text that stands for an image in prompts without a chat template."""
        template = getattr(processor, "chat_template", None)
        self.chat_template: str | None = (
            template.get("default") if isinstance(template, dict) else template
        )
        """The processor's own; None if it uses the tokenizer's."""
        self.merge_size: int | None = getattr(processor.image_processor, "merge_size", None)
        """Patches per token along a side; None for models without grids."""
        self._sizes: dict[tuple[int, int], ImageSize] = {}
        """By height and width, on which alone they depend."""
        self._kept: OrderedDict[str, ImageInputs] = OrderedDict()
        self._bytes = 0
        self._lock, self._sizing = Lock(), Lock()

    @staticmethod
    def of(processor: Any) -> VisionProcessor:
        """Return the one for a processor; those who share a processor share the inputs kept."""
        if isinstance(processor, VisionProcessor):
            return processor
        # Its limits of pixels may have been changed.
        images: Any = getattr(processor, "image_processor", None)
        return _of(processor, images.to_json_string() if hasattr(images, "to_json_string") else "")

    @property
    def beginning(self) -> list[int]:
        """Tokens that the processor writes before every text, such as that of its beginning."""
        # The placeholder is a word that every tokenizer of a processor has.
        word = self._processor.image_token
        whole = list(self.tokenizer(word)["input_ids"])
        alone = list(self.tokenizer(word, add_special_tokens=False)["input_ids"])
        return whole[: -len(alone)] if whole[-len(alone) :] == alone else []

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer is the processor's.

        Raises:
            ValueError: if its vocabulary is another one.
        """
        ours = self.tokenizer
        if tokenizer is not ours and tokenizer.get_vocab() != ours.get_vocab():
            raise ValueError(
                f"tokenizer and processor must belong together, got a {type(tokenizer).__name__} of "
                f"{len(tokenizer)} tokens and a processor whose tokenizer has {len(ours)}, or others: "
                "give the model's own processor, and processor.tokenizer as the tokenizer."
            )

    def inputs(self, image: StoredImage) -> ImageInputs:
        """Return the inputs of an image; those of the latest images are kept."""
        with self._lock:
            found = self._kept.get(image.key)
            if found is not None:
                self._kept.move_to_end(image.key)
                return found
        made = self._inputs(image)
        with self._lock:
            found = self._kept.setdefault(image.key, made)
            if found is made:
                self._bytes += made.pixel_values.nbytes
                while self._bytes > _KEPT and len(self._kept) > 1:
                    self._bytes -= self._kept.popitem(last=False)[1].pixel_values.nbytes
            return found

    def size(self, image: StoredImage) -> ImageSize:
        """Return the tokens and patches of an image; prepares the first of each size."""
        sides = image.height, image.width
        if sides not in self._sizes:
            with self._sizing:  # The members of a group begin with the same image.
                if sides not in self._sizes:
                    inputs = self.inputs(image)
                    self._sizes[sides] = ImageSize(inputs.token_ids, inputs.grid)
        return self._sizes[sides]

    def knows_size(self, image: StoredImage) -> bool:
        """Whether :meth:`size` takes no time: an image of this size was seen before."""
        return (image.height, image.width) in self._sizes

    def positions(self, token_ids: Tensor, images: Sequence[StoredImage]) -> Tensor | None:
        """Return the positions ``[3, L]`` of a row's tokens; None if they are those of text.

        Args:
            token_ids: int64 ``[L]``, without padding.
            images: those of its placeholders, in order.
        """
        grids = (self.size(image).grid or (0, 0, 0) for image in images)
        return grid_positions(token_ids == self.image_token_id, grids, self.merge_size)

    def __reduce__(self) -> Any:
        return VisionProcessor.of, (self._processor,)

    def expanded(self, token_ids: Sequence[int], images: Sequence[StoredImage]) -> list[int]:
        """Replace each placeholder by the tokens of its image.

        Args:
            token_ids: a rendered text, encoded.
            images: one for each placeholder, in order.

        Raises:
            ValueError: if there are more or fewer placeholders than images.
        """
        found = sum(token == self.image_token_id for token in token_ids)
        if found != len(images):
            raise ValueError(
                f"the chat template must write one image token for each image, got {found} for "
                f"{len(images)} images: does it take content as a list of parts?"
            )
        left = iter(images)
        out: list[int] = []
        for token in token_ids:
            if token == self.image_token_id:
                out += self.size(next(left)).token_ids
            else:
                out.append(token)
        return out

    def collapsed(self, token_ids: Sequence[int], images: Sequence[StoredImage]) -> list[int]:
        """Invert :meth:`expanded`: one placeholder for each image."""
        left = iter(images)
        out: list[int] = []
        skipped = 0
        for token in token_ids:
            if token == self.image_token_id:
                skipped = skipped or len(self.size(next(left)).token_ids)
                skipped -= 1
                if skipped:
                    continue
            out.append(token)
        return out

    def spans(self, token_ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Find the tokens of each image in a prompt.

        Args:
            token_ids: a prompt, with one placeholder for each token of an image.
            sizes: number of tokens of each of its images, in order.

        Returns:
            The place of each image's first token, and how many tokens it has.

        Raises:
            ValueError: if the prompt has more or fewer placeholders than the images have tokens, or
                those of an image are not side by side.
        """
        places = [k for k, token in enumerate(token_ids) if token == self.image_token_id]
        if len(places) != sum(sizes):
            raise ValueError(
                f"there must be one image token (id {self.image_token_id}) for each token of the "
                f"images, got {len(places)} for {len(sizes)} images with {sum(sizes)} tokens."
            )
        spans, done = [], 0
        for number, size in enumerate(sizes):
            first = places[done]
            done += size
            if places[done - 1] != first + size - 1:
                raise ValueError(
                    f"the {size} tokens of image {number} must be side by side, got fewer at {first}: "
                    "the images are in another order, or of other sizes."
                )
            spans.append((first, size))
        return spans

    def batch(self, images: Sequence[StoredImage]) -> dict[str, Tensor]:
        """Return the model's arguments for images: ``pixel_values``, and ``image_grid_thw`` of Qwen."""
        found = [self.inputs(image) for image in images]
        if not found:
            return {}
        out = {"pixel_values": torch.cat([each.pixel_values for each in found])}
        grids = [each.grid for each in found if each.grid is not None]
        if grids:
            out["image_grid_thw"] = torch.tensor(grids, device="cpu")
        return out

    def _inputs(self, image: StoredImage) -> ImageInputs:
        try:
            made = self._processor(
                images=[image.pil()],
                text=[self._processor.image_token],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except ValueError as error:
            raise ValueError(
                f"an image of {image.height} x {image.width} pixels (height x width) is refused by "
                f"{type(self._processor).__name__}: {error}"
            ) from error
        grid = made["image_grid_thw"][0].tolist() if "image_grid_thw" in made else None
        ids = tuple(made["input_ids"][0].tolist())
        if set(ids) != {self.image_token_id}:
            raise ValueError(
                f"processor must replace {self._processor.image_token!r} by itself repeated, got the "
                f"tokens {sorted(set(ids))}."
            )
        return ImageInputs(ids, made["pixel_values"], None if grid is None else tuple(grid))


def with_processor(tokenizer: Any, processor: Any) -> tuple[Any, VisionProcessor | None]:
    """Pair a tokenizer with its processor.

    Args:
        tokenizer: the tokenizer, or its processor; the processor's if ``None``.
        processor: the processor, if there is one and it is not ``tokenizer``.

    Returns:
        The tokenizer, and the processor if there is one.

    Raises:
        TypeError: if the processor is of no supported family.
        ValueError: if it is another tokenizer's.
    """
    # Of the two, only a processor has a tokenizer. Its class would import Pillow.
    if hasattr(tokenizer, "tokenizer"):
        tokenizer, processor = None, tokenizer if processor is None else processor
    if processor is None:
        return tokenizer, None
    vision = VisionProcessor.of(processor)
    tokenizer = vision.tokenizer if tokenizer is None else tokenizer
    vision.check_tokenizer(tokenizer)
    return tokenizer, vision


@lru_cache(_PROCESSORS)
def _of(processor: Any, settings: str) -> VisionProcessor:
    return VisionProcessor(processor)
