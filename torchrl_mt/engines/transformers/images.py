"""Images in prompts: each has tokens of its own, and the model's features of it.

In a prompt, all images share one placeholder. In the engine, an image's tokens are numbers that no other
image and no word has. So prompts share cache exactly as far as they show the same images, and whatever
compares, cuts or keeps tokens needs to know nothing of images.

An image goes through the vision tower once, whole, however a prompt is cut into forward passes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedModel

from torchrl_mt._hosts.transformers import image_features
from torchrl_mt.engines.model_facts import input_device
from torchrl_mt.engines.request_checks import checked_images, image_spans
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.model import VisionModel

__all__ = ["ImageFeatures", "ImagePrompts", "PromptImages", "check_processor"]

_BITS = 32
"""An image's token is its number, and in the lowest bits a place; other tokens have number 0."""
_REMEMBERED = 65_536
"""Images whose numbers are remembered, so that later prompts find them in the cache."""


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt, and the positions that they give to its tokens."""

    images: Mapping[int, StoredImage]
    """By number."""
    positions: torch.Tensor | None
    """int64 ``[3, L]``, positions of the prompt's tokens; None if they are those of text."""
    shift: int
    """What to add to the place of a later token for its position."""

    def positions_of(self, begin: int, end: int) -> torch.Tensor:
        """Return the positions ``[3, end - begin]`` of tokens, also of those after the prompt."""
        places = torch.arange(begin, end, device="cpu").expand(3, -1) + self.shift
        if self.positions is not None:
            known = self.positions[:, begin:end]
            places[:, : known.shape[1]] = known
        return places


class ImagePrompts:
    """Checks the images of prompts and gives them tokens; any thread may use it.

    Args:
        model: facts on the model; None if it takes no images.
        processor: the model's; None if there is none.
        name: name of the model's class, for error messages.
    """

    def __init__(
        self, model: VisionModel | None, processor: VisionProcessor | None, name: str
    ) -> None:
        self._model, self._processor = model, processor
        self._refusal = ""
        if model is None:
            self._refusal = (
                f"images cannot be given to {name}, which takes text alone or is of no supported family "
                "of vision-language models."
            )
        elif processor is None:
            self._refusal = (
                "images need the model's processor: make the engine with processor=, "
                "for example AutoProcessor.from_pretrained(...)."
            )
        count = itertools.count(1)
        self._number_of = lru_cache(_REMEMBERED)(lambda key: next(count))
        self._lock = Lock()

    def takes_time(self, images: Sequence[Any] | None) -> bool:
        """Whether :meth:`read` has to decode or prepare an image."""
        vision = self._processor
        if vision is None or not isinstance(images, (list, tuple)):
            return False
        return not all(isinstance(each, StoredImage) and vision.knows_size(each) for each in images)

    def read(
        self, prompt: list[int], images: Sequence[Any] | None
    ) -> tuple[list[int], PromptImages | None]:
        """Give the images of a prompt tokens of their own.

        Args:
            prompt: its tokens, with as many placeholders as the images have tokens.
            images: all of its images, in order; ``None`` is none.

        Returns:
            The prompt with the images' tokens in place of the placeholders, and its images.

        Raises:
            TypeError: if the model takes no images, the engine has no processor, or an image is none.
            ValueError: if an image cannot be read, or the placeholders are not those of the images.
        """
        stored = checked_images(prompt, images, self._model, self._refusal)
        if not stored:
            return prompt, None
        assert self._model is not None
        assert self._processor is not None
        sizes = [self._processor.size(image) for image in stored]
        spans = image_spans(self._processor, prompt, [len(size.token_ids) for size in sizes])
        with self._lock:
            numbers = [self._number_of(image.key) for image in stored]
        is_image = torch.zeros(len(prompt) + 1, dtype=torch.bool, device="cpu")
        tokens = prompt[:]
        for number, (begin, size) in zip(numbers, spans, strict=True):
            first = number << _BITS
            tokens[begin : begin + size] = range(first, first + size)
            is_image[begin : begin + size] = True
        grids = [size.grid for size in sizes if size.grid is not None]
        # The token after the prompt tells how the later ones are shifted.
        positions = self._model.positions(is_image, grids)
        shift = 0
        if positions is not None:
            shift, positions = int(positions[0, -1]) - len(prompt), positions[:, :-1]
        return tokens, PromptImages(dict(zip(numbers, stored, strict=True)), positions, shift)


class ImageFeatures:
    """What a model sees of images; kept until :meth:`forget` and within a limit, the latest used.

    Args:
        model: the model in evaluation mode.
        processor: prepares the images.
        max_batch_tokens: most image tokens in a pass of the vision tower, unless one image has more.
        max_tokens: most image tokens whose features are kept between forward passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: VisionProcessor,
        *,
        max_batch_tokens: int,
        max_tokens: int,
    ) -> None:
        self._model, self._processor = model, processor
        self._batch, self._room = max_batch_tokens, max_tokens
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()

    def forget(self) -> None:
        """Forget all features, because the weights changed."""
        self._kept.clear()

    def embed(
        self, tokens: torch.Tensor, images: Mapping[int, StoredImage]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Turn tokens into what the language model takes instead.

        Args:
            tokens: int64 ``[B, Q]`` with the images' own tokens.
            images: by number, at least those of the tokens.

        Returns:
            Embeddings ``[B, Q, H]``, which of them are of images (bool ``[B, Q]``), and for each of the
            first layers whose output images are added to (Qwen3-VL), what is added ``[images, H]``.
        """
        numbers = tokens >> _BITS
        is_image = numbers > 0
        embedded = self._model.get_input_embeddings()(tokens.masked_fill(is_image, 0))
        wanted, order = numbers[is_image].unique(return_inverse=True)
        if not len(wanted):
            return embedded, is_image, []
        features = self._features(wanted.tolist(), images)
        sizes = torch.tensor([len(each) for each in features], device=tokens.device)
        first = sizes.cumsum(0) - sizes
        places = tokens[is_image] & (1 << _BITS) - 1
        chosen = torch.cat(features)[first[order] + places].to(embedded.device, embedded.dtype)
        own, *layers = chosen.unbind(1)
        embedded[is_image] = own
        return embedded, is_image, layers

    def _features(
        self, numbers: Sequence[int], images: Mapping[int, StoredImage]
    ) -> list[torch.Tensor]:
        """Return the features of images, each ``[tokens, 1 + layers, H]``."""
        new = [number for number in numbers if number not in self._kept]
        for group in self._grouped(new, images):
            inputs = self._processor.batch([images[number] for number in group])
            sizes = [len(self._processor.size(images[number]).token_ids) for number in group]
            inputs = {name: value.to(input_device(self._model)) for name, value in inputs.items()}
            found = image_features(self._model, inputs, sizes)
            self._kept.update(zip(group, found, strict=True))
        for number in numbers:
            self._kept.move_to_end(number)
        features = [self._kept[number] for number in numbers]
        total = sum(len(each) for each in self._kept.values())
        while total > self._room and len(self._kept) > 1:
            total -= len(self._kept.popitem(last=False)[1])
        return features

    def _grouped(
        self, numbers: Iterable[int], images: Mapping[int, StoredImage]
    ) -> Iterable[list[int]]:
        """Group images for the vision tower."""
        group: list[int] = []
        total = 0
        for number in numbers:
            size = len(self._processor.size(images[number]).token_ids)
            if group and total + size > self._batch:
                yield group
                group, total = [], 0
            group.append(number)
            total += size
        if group:
            yield group


def check_processor(
    found: VisionProcessor, vision: VisionModel | None, model: PreTrainedModel
) -> None:
    """Refuse a processor that does not belong to a model (``ValueError``)."""
    name = type(model).__name__
    if vision is None:
        raise ValueError(
            f"processor must belong to a model that takes images, got {found.family} and {name}: "
            "give the tokenizer alone."
        )
    if found.image_token_id != vision.image_token_id:
        raise ValueError(
            f"processor must have the model's image token {vision.image_token_id}, got "
            f"{found.image_token_id}: do {found.family} and {name} belong together?"
        )
