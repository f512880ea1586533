"""Images of rows in forward passes: each row's pixels and positions, wherever the row stands.

Rows whose placeholders do not fit their images are refused: their features would go to other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor, nn

from torchrl_mt.scoring.forward import unwrapped
from torchrl_mt.vision import RowImages
from torchrl_mt.vision.model import VisionModel, check_no_video
from torchrl_mt.vision.rows import COUNT, FIRST, GRIDS, HASH, KEYS, PIXELS

_FIX = (
    "put VisionInputs(processor) after MergeTurns, with the processor of this model, and give all rows' "
    "entries to whoever scores them."
)
_TOWERS = ("visual", "vision_tower")
"""Attributes of transformers' models that hold their vision tower."""


def vision_model(model: nn.Module) -> VisionModel | None:
    """Return what a model's configuration says about images; ``None`` for models of text."""
    return VisionModel.of(getattr(unwrapped(model), "config", None))


def vision_towers(model: nn.Module) -> list[nn.Module]:
    """List the modules that encode a model's pixels.

    Qwen's ``visual`` has the layers that merge patches into tokens; LLaVA's ``vision_tower`` has no
    projector.
    """
    return [m for name, m in model.named_modules() if name.rpartition(".")[-1] in _TOWERS]


def image_keys(*models: object) -> list[NestedKey]:
    """List the keys of the rows' images if one of the models, or a model that it wraps, takes them."""
    inner = (getattr(model, "model", None) for model in models)
    given = [m for m in (*models, *inner) if isinstance(m, nn.Module)]
    return [PIXELS, GRIDS, KEYS, FIRST, COUNT, HASH] if any(map(vision_model, given)) else []


@dataclass(frozen=True)
class RowVision:
    """What a vision-language model takes beside the tokens of ``N`` rows; made by :meth:`of`."""

    images: RowImages | None
    """Their images, if any row shows some."""
    positions: Tensor | None
    """int64 ``[3, N, S]``: M-RoPE positions of each row's attended tokens, which come first; ``None``
    for models whose positions are those of text."""

    @staticmethod
    def of(
        model: nn.Module, tokens: Tensor, attention_mask: Tensor, images: RowImages | None
    ) -> RowVision | None:
        """Check that a model can see the images of rows, and find the positions of their tokens.

        Args:
            model: The model.
            tokens: ``[N, S]`` int64.
            attention_mask: ``[N, S]`` bool, false on padding.
            images: The rows' images; ``None`` for rows without.

        Returns:
            ``None`` for models of text.

        Raises:
            TypeError: If rows show images and the model takes none, or does not say that it does.
            ValueError: If a row's placeholders do not fit its images, or it shows a video.
        """
        vision = vision_model(model)
        if images is not None:
            if len(images.count) != len(tokens):
                raise ValueError(
                    f"images must be those of the {len(tokens)} rows of tokens, got those of "
                    f"{len(images.count)} rows."
                )
            if not bool(images.count.any()):
                images = None
        if vision is None:
            if images is not None:
                raise TypeError(
                    f"images: {type(unwrapped(model)).__name__} takes none, or its config is of no "
                    "supported family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA), but "
                    f"{int((images.count > 0).sum())} of {len(tokens)} rows show images."
                )
            _check_shows_none(model, tokens, attention_mask)
            return None
        check_no_video(vision, "tokens", tokens[attention_mask].unique().tolist())
        is_image = attention_mask & (tokens == vision.image_token_id)
        found = is_image.sum(-1).cpu()
        count = torch.zeros_like(found) if images is None else images.count.cpu()
        _check_counts(vision, found, count)
        if vision.merge_size is None:
            return RowVision(images, None)
        positions = torch.arange(tokens.shape[1], device="cpu").expand(3, *tokens.shape)
        if images is None:
            return RowVision(None, positions.to(tokens.device))
        positions, is_image, attended = positions.clone(), is_image.cpu(), attention_mask.cpu()
        for row in count.nonzero().squeeze(-1).tolist():
            try:
                own = vision.positions(is_image[row][attended[row]], images.grids_of(row))
            except ValueError as error:
                raise ValueError(f"images do not fit tokens in row {row}: {error} {_FIX}") from None
            assert own is not None
            positions[:, row, : own.shape[1]] = own
        return RowVision(images, positions.to(tokens.device))

    def of_no_rows(self) -> RowVision:
        """Return the one of a single token that is not attended."""
        positions = self.positions
        empty = None if positions is None else positions.new_zeros(3, 1, 1)
        return RowVision(None, empty)

    def padded(self, rows: Tensor) -> dict[str, Any]:
        """Return all arguments for rows ``[n]`` whose padding is on the right."""
        given = self.pixels(rows)
        if self.positions is not None:
            given["position_ids"] = self.positions[:, rows]
        return given

    def pixels(self, rows: Tensor) -> dict[str, Any]:
        """Return the model's arguments for the images of rows ``[n]``, in this order; may be empty."""
        return {} if self.images is None else self.images.inputs(rows.to(self.images.first.device))


def _check_shows_none(model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> None:
    """Refuse rows with image tokens if a vision-language model is inside a module without config."""
    configs = (getattr(module, "config", None) for module in model.modules())
    inside = (VisionModel.of(each) for each in configs if hasattr(each, "vision_config"))
    vision = next(filter(None, inside), None)
    if vision is None:
        return
    shows = (attention_mask & (tokens == vision.image_token_id)).any(-1)
    if bool(shows.any()):
        name = type(unwrapped(model)).__name__
        raise TypeError(
            f"images: {name} has no config of a vision-language model and wraps one, and "
            f"{int(shows.sum())} of {len(tokens)} rows have its image tokens: set the config of what "
            f"it wraps, {name}.config, or the rows would be scored as text."
        )


def _check_counts(vision: VisionModel, found: Tensor, count: Tensor) -> None:
    """Refuse rows with placeholders or images alone, or with parts of images.

    Without grids all images have equally many tokens. ``found`` are the rows' placeholders, ``count``
    their images, ``[N]``.
    """
    wrong = (found > 0) != (count > 0)
    if vision.merge_size is None and bool(count.any()):
        usual = (found[count > 0] // count[count > 0]).median()
        wrong |= found != count * usual
    if not bool(wrong.any()):
        return
    row = int(wrong.nonzero()[0])
    raise ValueError(
        f"images do not fit tokens in row {row}: it has {int(found[row])} image tokens "
        f"({vision.image_token_id}) and {int(count[row])} images: {_FIX}"
    )


def check_sampled(vision: VisionModel, tokens: Tensor, mask: Tensor) -> None:
    """Refuse sampled tokens that stand for images or videos, which have no probability."""
    barred = list(vision.barred)
    wrong = (mask & torch.isin(tokens, torch.tensor(barred, device=tokens.device))).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"mask must be false on tokens that stand for images and videos, {barred}: no policy may "
            f"sample them, but row {row} has {int(tokens[row, token])} there, at {token}, and so have "
            f"{len(wrong) - 1} more. Bar them in the sampler, or drop such rows."
        )
