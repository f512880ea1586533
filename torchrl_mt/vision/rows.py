"""The images of training rows.

Each row names its own images, and the inputs made of them are found by content. So rows may be indexed,
shuffled, split, stacked, concatenated and copied: a row gets its own images, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.processor import ImageInputs, VisionProcessor

__all__ = [
    "COUNT",
    "GRIDS",
    "HASH",
    "KEYS",
    "NEW",
    "PIXELS",
    "RAW",
    "RowImages",
    "set_row_images",
    "write_inputs",
]

NEW = ("images", "new")
"""Per turn, a tuple of the :class:`StoredImage` that its prompt adds to that of its parent."""
RAW = ("images", "raw")
"""Per row, a tuple of its :class:`StoredImage`, in the order of its placeholders."""
HASH = ("images", "hash")
"""int64 ``[N]``: hash of each row's images, because not every storage keeps Python objects apart."""
COUNT = ("images", "count")
"""int64 ``[N]``: number of each row's images."""
PIXELS = ("images", "pixel_values")
"""The table: inputs of all images, each once, one after the other; no batch dimension."""
GRIDS = ("images", "grid_thw")
"""int64 ``[M, 3]``, patches of each image of the table; absent for models without."""
KEYS = ("images", "keys")
"""``StoredImage.key`` of each image of the table, a tuple."""

_TOKENS = ("tokens", "full")
_MASK = ("masks", "all_attention_mask")
_Grid: TypeAlias = "tuple[int, int, int] | None"


@dataclass(frozen=True)
class RowImages:
    """The images of ``N`` rows, as models take them; read by :meth:`of`."""

    count: Tensor
    """int64 ``[N]``: number of each row's images."""
    images: Sequence[Sequence[tuple[Tensor, _Grid]]]
    """Of each row's images, the inputs (patches ``[P, D]`` or a picture ``[1, C, H, W]``), and how many
    patches they have in time, height and width (``None`` without grids)."""

    @staticmethod
    def of(rows: TensorDictBase) -> RowImages | None:
        """Read the entries that :class:`~torchrl_mt.transforms.VisionInputs` wrote.

        Returns:
            The images; ``None`` if there are no rows, or they have no such entries and no images.

        Raises:
            KeyError: if rows have images, and nothing was made of them.
            ValueError: if entries belong to other rows.
        """
        if not len(rows):
            return None
        if rows.get(PIXELS, None) is None:
            if any(raw for raw in _of_rows(rows, RAW) or ()):
                raise KeyError(
                    f"rows have images under {RAW}, but not the inputs of models, {PIXELS}: append "
                    "VisionInputs(processor) to the transforms, after MergeTurns."
                )
            return None
        raw, keys, pixels = (_of_rows(rows, key) for key in (RAW, KEYS, PIXELS))
        if raw is None or keys is None or pixels is None:
            missing = RAW if raw is None else KEYS
            raise KeyError(
                f"rows with {PIXELS} must keep {missing}, which tells whose images they are."
            )
        _check_hashes(rows, raw)
        grids = _of_rows(rows, GRIDS) or [None] * len(raw)
        # Rows of one call share a table; rows that were stacked or concatenated have several.
        tables: dict[int, dict[str, tuple[Tensor, _Grid]]] = {}
        found = []
        for row, images in enumerate(raw):
            table = pixels[row]
            known = tables.get(id(table))
            if known is None:
                known = tables[id(table)] = _pieces(table, grids[row], keys[row])
            if not all(image.key in known for image in images):
                raise ValueError(f"{PIXELS} has no inputs of an image of row {row}: {_AGAIN}")
            found.append([known[image.key] for image in images])
        return RowImages(rows[COUNT], found)

    def grids_of(self, row: int) -> list[tuple[int, int, int]]:
        """Return the patches of a row's images in time, height and width; empty without grids."""
        return [grid for _, grid in self.images[row] if grid is not None]

    def inputs(self, rows: Tensor) -> dict[str, Any]:
        """Return a model's arguments for some rows, their images in order: empty if they have none.

        Args:
            rows: int64 ``[n]``, indices of rows.

        Returns:
            ``pixel_values``, and ``image_grid_thw`` for models with grids, on the device of ``count``.
        """
        chosen = [image for row in rows.tolist() for image in self.images[row]]
        if not chosen:
            return {}
        device = self.count.device
        out = {"pixel_values": torch.cat([pixels for pixels, _ in chosen]).to(device)}
        grids = [grid for _, grid in chosen if grid is not None]
        if grids:
            out["image_grid_thw"] = torch.tensor(grids, device=device)
        return out


_AGAIN = "make the inputs again from the stored images, by VisionInputs(processor)(rows)."


def set_row_images(rows: TensorDictBase, images: Sequence[tuple[StoredImage, ...]]) -> None:
    """Write each row's images, without inputs."""
    rows.set(RAW, NonTensorStack(*(NonTensorData(each) for each in images)))
    rows.set(HASH, torch.tensor([_hash(each) for each in images], device=rows.device))


def write_inputs(rows: TensorDictBase, vision: VisionProcessor) -> None:
    """Make a model's inputs of the rows' images, and write them into the rows.

    Args:
        rows: ``[N]`` rows with ``("tokens", "full")`` and :data:`RAW`.
        vision: prepares the images.

    Raises:
        KeyError: if an entry is missing.
        ValueError: if a row's images and placeholders disagree.
    """
    raw = _of_rows(rows, RAW)
    if raw is None:
        raise KeyError(
            f"VisionInputs needs {RAW}, which MergeTurns writes where the collector has a processor: "
            "MultiTurnCollector(..., processor=processor)."
        )
    tokens = rows.get(_TOKENS, None)
    if tokens is None:
        raise KeyError(f"VisionInputs needs {_TOKENS} in the rows: append it after MergeTurns.")
    _check_hashes(rows, raw)
    table: dict[str, ImageInputs] = {}
    for image in (image for images in raw for image in images):
        if image.key not in table:
            table[image.key] = vision.inputs(image)
    mask = rows.get(_MASK, None)
    attended = tokens if mask is None else tokens.where(mask, -1)
    for row, (images, ids) in enumerate(zip(raw, attended.tolist(), strict=True)):
        try:
            vision.spans(ids, [len(table[image.key].token_ids) for image in images])
        except ValueError as error:
            raise ValueError(
                f"row {row}: {error} Was the row cut, or another processor used where it was sampled?"
            ) from None
    device = tokens.device
    count = torch.tensor([len(images) for images in raw], device=device)
    made = [inputs.pixel_values for inputs in table.values()] or [torch.empty(0, 0)]
    shared: dict[tuple[str, str], Any] = {PIXELS: torch.cat(made).to(device), KEYS: tuple(table)}
    if vision.merge_size is not None:
        grids = [inputs.grid for inputs in table.values()]
        shared[GRIDS] = torch.tensor(grids, dtype=torch.int64, device=device).view(-1, 3)
    set_row_images(rows, raw)
    rows.set(COUNT, count)
    for key, value in shared.items():
        rows.set(key, NonTensorData(value, batch_size=rows.batch_size))


def _check_hashes(rows: TensorDictBase, raw: Iterable[Sequence[StoredImage]]) -> None:
    """Refuse images that are not those of the row beside which they lie."""
    hashes = rows.get(HASH, None)
    for row, (images, known) in enumerate(
        zip(raw, () if hashes is None else hashes.tolist(), strict=hashes is not None)
    ):
        if _hash(images) != known:
            raise ValueError(
                f"{RAW} of row {row} has images of another row: the rows were in a storage that keeps "
                "one Python object for all (LazyMemmapStorage does). Use ListStorage or "
                "LazyStackStorage."
            )


def _pieces(pixels: Tensor, grids: Tensor | None, keys: Sequence[str]) -> dict[str, Any]:
    """Cut a table into its images."""
    if grids is None:
        parts: Sequence[Tensor] = pixels.split(1)
        of_image: list[_Grid] = [None] * len(keys)
    else:
        parts = pixels.split(grids.prod(-1).tolist())
        of_image = [(t, h, w) for t, h, w in grids.tolist()]
    if not len(parts) == len(of_image) == len(keys) or sum(map(len, parts)) != len(pixels):
        raise ValueError(f"{PIXELS}, {GRIDS} and {KEYS} are not of one batch of rows: {_AGAIN}")
    return dict(zip(keys, zip(parts, of_image, strict=True), strict=True))


def _of_rows(rows: TensorDictBase, key: tuple[str, str]) -> list[Any] | None:
    """Read a non-tensor entry: one object for each row; ``None`` without the entry."""
    value = rows.get(key, None)
    if isinstance(value, NonTensorData):
        return [value.data] * len(rows)
    return value.tolist() if isinstance(value, NonTensorStack) else None


def _hash(images: Iterable[StoredImage]) -> int:
    """Hash of images in order; 63 bits."""
    digest = sha256("".join(image.key for image in images).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
