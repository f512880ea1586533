"""A spare image in passes without images, so that the vision tower runs on all ranks in each pass.

Ranks that exchange gradients or parameters wait for each other's towers. No token of the spare image is
scored: it changes no value, and gives the tower's parameters gradients of zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from torchrl_mt.ranks import is_sharded
from torchrl_mt.scoring.forward import unwrapped
from torchrl_mt.scoring.packing import ForwardPass
from torchrl_mt.scoring.row_vision import vision_model


@dataclass(frozen=True)
class SpareImage:
    """The tokens of one small image."""

    ids: Tensor
    """``[n]`` int64, its placeholders."""
    positions: Tensor | None
    """``[3, n]`` int64 for models with M-RoPE."""
    pixels: dict[str, Tensor]
    """Keyword arguments of the model."""

    @staticmethod
    def of(model: nn.Module) -> SpareImage | None:
        """Make the image; ``None`` for models of text, and for one that no other rank waits for.

        Raises:
            ValueError: If a model's images have no fixed number of tokens.
        """
        vision = vision_model(model)
        waited_for = isinstance(model, DistributedDataParallel) and torch.is_grad_enabled()
        if vision is None or not (waited_for or is_sharded(model)):
            return None
        config = cast(Any, unwrapped(model)).config
        if vision.merge_size is not None:
            pixels, grid = small_image(config.vision_config, vision.merge_size)
            ids = torch.full((2,), vision.image_token_id, device="cpu")
            positions = vision.positions(torch.ones(2, dtype=torch.bool, device="cpu"), [grid])
            grids = torch.tensor([grid], device="cpu")
            return SpareImage(ids, positions, {"pixel_values": pixels, "image_grid_thw": grids})
        pixels = torch.zeros(1, 3, *2 * [config.vision_config.image_size], device="cpu")
        ids = torch.full((_tokens_of_llava(config),), vision.image_token_id, device="cpu")
        return SpareImage(ids, None, {"pixel_values": pixels})

    def added_to(self, step: ForwardPass) -> ForwardPass:
        """Add the image to a pass that has none: as one more row of it."""
        inputs = dict(step.inputs)
        ids, state = inputs["input_ids"], step.state
        count, width = ids.shape
        given = {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}
        given["position_ids"] = self._positions(inputs.get("position_ids"))
        # A packed line may have to stay the only one: attention over lengths takes no batch.
        behind = "attention_mask" not in inputs and count == 1
        wide = max(width, len(self.ids))
        for name in given.keys() & inputs.keys():
            there, new = inputs[name], given[name].to(inputs[name])
            if behind:
                inputs[name] = torch.cat([there, new.unsqueeze(-2)], dim=-1)
            else:
                there, new = pad(there, (0, wide - width)), pad(new, (0, wide - len(self.ids)))
                inputs[name] = torch.cat([there, new.unsqueeze(-2)], dim=-2)
                if name == "input_ids":
                    state = state // width * wide + state % width
        return replace(step, inputs=inputs | self.pixels, state=state)

    def _positions(self, there: Tensor | None) -> Tensor:
        """Positions of the image's tokens, with as many axes as those of the pass."""
        text = torch.arange(len(self.ids), device="cpu")
        if there is None or there.ndim == 2:
            return text
        assert self.positions is not None
        return torch.cat([text[None], self.positions]) if len(there) == 4 else self.positions


def small_image(vision_config: Any, merge_size: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Make an image of two tokens of Qwen's models: patches ``[P, D]``, and their grid."""
    patch = vision_config.in_channels * vision_config.temporal_patch_size
    patch *= vision_config.patch_size**2
    return torch.zeros(2 * merge_size**2, patch, device="cpu"), (1, merge_size, 2 * merge_size)


def _tokens_of_llava(config: Any) -> int:
    """Count the tokens of LLaVA's images."""
    vision = config.vision_config
    classes = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(vision.model_type)
    if classes is None:
        raise ValueError(
            f"a model whose vision tower is a {vision.model_type!r} cannot be trained on several ranks: "
            "passes without images need a spare one, and the number of its tokens is known for CLIP "
            "and SigLIP only."
        )
    patches = (vision.image_size // vision.patch_size) ** 2 + classes
    return patches - (config.vision_feature_select_strategy == "default")
