"""What a vision-language model's configuration says about its tokens and positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchrl_mt.vision.positions import grid_positions
from torchrl_mt.vision.processor import VisionProcessor

__all__ = ["VisionModel", "check_no_video"]

_MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_PLAIN = ("llava",)


@dataclass(frozen=True)
class VisionModel:
    """Facts on a model that takes images; see :meth:`of`."""

    image_token_id: int
    """Placeholder of images in its prompts."""
    barred: tuple[int, ...]
    """Tokens that stand for images and videos: nobody may sample them."""
    merge_size: int | None
    """Patches per token along a side, for models with M-RoPE; None for models whose positions are those
    of text."""

    @staticmethod
    def of(config: Any) -> VisionModel | None:
        """Read a configuration; None if its model takes no images, or is of no supported family."""
        kind = getattr(config, "model_type", None)
        if kind not in (*_MROPE, *_PLAIN):
            return None
        # Up to transformers 4, LLaVA's was called image_token_index.
        image: Any = getattr(config, "image_token_id", None)
        image = config.image_token_index if image is None else image
        video = getattr(config, "video_token_id", None)
        merge = config.vision_config.spatial_merge_size if kind in _MROPE else None
        return VisionModel(
            int(image), tuple(int(token) for token in (image, video) if token is not None), merge
        )

    def positions(self, is_image: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Return the positions ``[3, L]`` of a row's tokens; None if they are those of text.

        Args:
            is_image: bool ``[L]``, true on image tokens, without padding.
            grids: patches of each image in time, height and width.
        """
        return grid_positions(is_image, grids, self.merge_size)


def check_no_video(
    facts: VisionModel | VisionProcessor, name: str, token_ids: Iterable[int]
) -> None:
    """Refuse tokens that stand for videos, which nobody fills in.

    Args:
        facts: facts on the model or the processor.
        name: name of the tokens, for the error.
        token_ids: the tokens.

    Raises:
        ValueError: if there is one.
    """
    videos = set(facts.barred) - {facts.image_token_id}
    if not videos.isdisjoint(token_ids):
        raise ValueError(
            f"{name} must have none of the tokens {sorted(videos)}, which stand for videos: these are "
            "not supported. Show frames as images."
        )
