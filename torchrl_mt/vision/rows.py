"""The images of training rows.

The inputs of all images of a batch are one table, and each row names its place there. So rows may be
indexed, shuffled, split, stacked, concatenated and copied: a row gets its own images, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.processor import VisionProcessor

__all__ = [
    "COUNT",
    "FIRST",
    "GRIDS",
    "HASH",
    "KEYS",
    "NEW",
    "PIXELS",
    "RAW",
    "RowImages",
    "compact_images",
    "set_row_images",
    "write_inputs",
]

NEW = ("images", "new")
"""Per turn, a tuple of the :class:`StoredImage` that its prompt adds to that of its parent."""
RAW = ("images", "raw")
"""Per row, a tuple of its :class:`StoredImage`, in the order of its placeholders."""
HASH = ("images", "hash")
"""int64 ``[N]``: hash of each row's images: not every storage keeps the Python objects of rows apart."""
PIXELS = ("images", "pixel_values")
"""The table: inputs of all rows' images, one after the other; no batch dimension."""
GRIDS = ("images", "grid_thw")
"""int64 ``[M, 3]``, patches of each image of the table; absent for models without."""
KEYS = ("images", "keys")
"""``StoredImage.key`` of each image of the table, a tuple."""
FIRST = ("images", "first")
"""int64 ``[N]``: where each row's first image is in the table."""
COUNT = ("images", "count")
"""int64 ``[N]``: number of each row's images."""

_TOKENS = ("tokens", "full")
_MASK = ("masks", "all_attention_mask")


@dataclass(frozen=True)
class _Tables:
    """The tables of rows, and where each row's images are."""

    pixels: list[Tensor]
    """Each table once."""
    grids: Tensor | None
    """int64 ``[M, 3]``, of all tables one after the other."""
    keys: tuple[str, ...] | None
    """Of all tables one after the other; None if unknown."""
    first: Tensor
    """int64 ``[N]``, among the images of all tables."""


@dataclass(frozen=True)
class RowImages:
    """The images of ``N`` rows, as models take them. Pickles have the images of these rows alone."""

    pixel_values: Tensor
    """float, the entry :data:`PIXELS`: ``[ΣP, D]`` patches or ``[M, C, H, W]``."""
    grids: Tensor | None
    """int64 ``[M, 3]``, the entry :data:`GRIDS`."""
    first: Tensor
    """int64 ``[N]``, the entry :data:`FIRST`."""
    count: Tensor
    """int64 ``[N]``, the entry :data:`COUNT`."""

    @staticmethod
    def of(rows: TensorDictBase) -> RowImages | None:
        """Read the entries that :class:`~torchrl_mt.transforms.VisionInputs` wrote.

        Without :data:`FIRST`, a table must have the images of exactly its rows, in order.

        Returns:
            The images; ``None`` if there are no rows, or no such entries and no images.

        Raises:
            KeyError: if rows have images, and nothing was made of them.
            TypeError: if a table is no tensor in a non-tensor entry.
            ValueError: if the entries belong to other rows, or a table and its grids disagree.
        """
        found = _tables(rows)
        if found is None:
            return None
        return RowImages(_joined(found.pixels), found.grids, found.first, rows[COUNT])

    @staticmethod
    def grids_in(rows: TensorDictBase) -> Tensor | None:
        """Return int64 ``[M, 3]``, patches of the rows' images in order, without reading the pixels.

        ``None`` without images or grids. Raises what :meth:`of` raises.
        """
        found = _tables(rows)
        if found is None or found.grids is None:
            return None
        chosen = _places(found.first, rows[COUNT])
        return found.grids[chosen] if chosen else None

    def __reduce__(self) -> Any:
        chosen, first = _chosen(self.first, self.count)
        own = _images_at(self.pixel_values, self.grids, chosen)
        return RowImages, (*own, first, self.count.clone())

    def grids_of(self, row: int) -> list[tuple[int, int, int]]:
        """Return the patches of a row's images in time, height and width; empty without grids."""
        if self.grids is None:
            return []
        first, count = int(self.first[row]), int(self.count[row])
        return [(t, h, w) for t, h, w in self.grids[first : first + count].tolist()]

    def inputs(self, rows: Tensor) -> dict[str, Any]:
        """Return a model's arguments for some rows, their images in order: empty if they have none.

        Args:
            rows: int64 ``[n]``, indices of rows.

        Returns:
            ``pixel_values``, and ``image_grid_thw`` for models with grids.
        """
        chosen = _places(self.first[rows], self.count[rows])
        if not chosen:
            return {}
        pixels, grids = _images_at(self.pixel_values, self.grids, chosen)
        if grids is None:
            return {"pixel_values": pixels}
        return {"pixel_values": pixels, "image_grid_thw": grids}


def compact_images(rows: TensorDictBase) -> TensorDictBase:
    """Return rows whose tables have the images of these rows alone, to send them to other processes.

    Parts of rows share the whole table, which is of no cost in a process; each pickle of one has all of
    it. Images that several rows show at one place of the table stay at one place.

    Args:
        rows: ``[N]`` rows with the entries that :class:`~torchrl_mt.transforms.VisionInputs` wrote.

    Returns:
        A shallow copy; the same rows if they have no such entries.

    Raises:
        TypeError, ValueError: as :meth:`RowImages.of`.

    Examples:
        >>> from tensordict import TensorDict
        >>> rows = TensorDict({COUNT: torch.tensor([1, 2])}, [2])
        >>> _ = rows.set(PIXELS, NonTensorData(torch.zeros(3, 3, 8, 8), batch_size=[2]))
        >>> part = compact_images(rows.set(FIRST, torch.tensor([0, 1])))[:1]
        >>> part[PIXELS].shape, compact_images(part)[PIXELS].shape
        (torch.Size([3, 3, 8, 8]), torch.Size([1, 3, 8, 8]))
    """
    found = _tables(rows) if _of_rows(rows, PIXELS) else None
    out, table = rows.copy(), dict[tuple[str, str], Any]()
    if found is not None:
        chosen, first = _chosen(found.first, rows[COUNT])
        out.set(FIRST, first)
        table[PIXELS], table[GRIDS] = _images_at(_joined(found.pixels), found.grids, chosen)
        table[KEYS] = None if found.keys is None else tuple(found.keys[i] for i in chosen)
    elif len(rows) == 0:
        kept = {key: rows.get(key, None) for key in (PIXELS, GRIDS, KEYS)}
        given = {key: kept[key].data for key in kept if isinstance(kept[key], NonTensorData)}
        table = {k: v[:0].clone() if isinstance(v, Tensor) else () for k, v in given.items()}
    for key, value in table.items():
        if value is not None:
            out.set(key, NonTensorData(value, batch_size=rows.batch_size))
    return out if table else rows


def _tables(rows: TensorDictBase) -> _Tables | None:
    """Find and check the tables of rows; None as in :meth:`RowImages.of`."""
    tables = _of_rows(rows, PIXELS)
    if not tables:
        if any(_of_rows(rows, RAW) or ()):
            raise KeyError(
                f"rows have images under {RAW}, but not the inputs of models, {PIXELS}: append "
                "VisionInputs(processor) to the transforms, after MergeTurns."
            )
        return None
    grids, keys = _of_rows(rows, GRIDS), _of_rows(rows, KEYS)
    # Rows of one call share a table; rows that were stacked or concatenated have several.
    own = {id(table): row for row, table in enumerate(tables)}
    sizes = {
        name: _number_of_images(tables[row], None if grids is None else grids[row])
        for name, row in own.items()
    }
    first = rows.get(FIRST, None)
    if first is None:
        first, keys = _in_order([id(table) for table in tables], rows[COUNT], sizes), None
    elif keys is not None:
        _check_keys(rows, keys, first)
    begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    shift = torch.tensor([begins[id(table)] for table in tables], device=first.device)
    return _Tables(
        [tables[row] for row in own.values()],
        None if grids is None else _joined([grids[row] for row in own.values()]),
        None if keys is None else tuple(key for row in own.values() for key in keys[row]),
        first + shift,
    )


def _places(first: Tensor, count: Tensor) -> list[int]:
    """List the places of rows' images in the table, in order."""
    spans = zip(first.tolist(), count.tolist(), strict=True)
    return [i for begin, size in spans for i in range(begin, begin + size)]


def _chosen(first: Tensor, count: Tensor) -> tuple[list[int], Tensor]:
    """List the images that rows show, and where each row's first is in this list."""
    chosen: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for span in zip(first.tolist(), count.tolist(), strict=True):
        if span not in places:
            places[span] = len(chosen)
            chosen += range(span[0], sum(span))
    spans = zip(first.tolist(), count.tolist(), strict=True)
    where = [places[span] for span in spans]
    return chosen, torch.tensor(where, dtype=torch.int64, device=first.device)


def _images_at(
    pixels: Tensor, grids: Tensor | None, chosen: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Copy images out of a table, with memory of their own."""
    if grids is None:
        return pixels[list(chosen)], None
    ends = [0, *grids.prod(-1).cumsum(0).tolist()]
    parts = [pixels[ends[i] : ends[i + 1]] for i in chosen]
    return torch.cat(parts or [pixels[:0]]), grids[list(chosen)]


_AGAIN = "make the inputs again from the stored images, by VisionInputs(processor)(rows)."


def set_row_images(rows: TensorDictBase, images: Sequence[tuple[StoredImage, ...]]) -> None:
    """Write each row's images, without inputs."""
    rows.set(RAW, NonTensorStack(*(NonTensorData(each) for each in images)))
    hashes = [_hash(image.key for image in each) for each in images]
    rows.set(HASH, torch.tensor(hashes, device=rows.device))


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
    # Not every image is kept by the processor, and members of a group show the same.
    prepared = {image: vision.inputs(image) for image in {i for images in raw for i in images}}
    mask = rows.get(_MASK, None)
    kept = (torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask).cpu()
    for row, (images, ids) in enumerate(zip(raw, tokens.cpu(), strict=True)):
        try:
            # Padding may lie anywhere, also between the tokens of an image.
            own = ids[kept[row]].tolist()
            vision.spans(own, [len(prepared[image].token_ids) for image in images])
        except ValueError as error:
            raise ValueError(
                f"row {row}: {error} Was the row cut, or another processor used where it was sampled?"
            ) from None
    device = tokens.device
    count = torch.tensor([len(images) for images in raw], device=device)
    table = [prepared[image] for images in raw for image in images]
    pixels = torch.cat([each.pixel_values for each in table] or [torch.empty(0, 0, device="cpu")])
    keys = tuple(image.key for images in raw for image in images)
    shared: dict[tuple[str, str], Any] = {PIXELS: pixels.to(device), KEYS: keys}
    if vision.merge_size is not None:
        grids = [each.grid for each in table]
        shared[GRIDS] = torch.tensor(grids, dtype=torch.int64, device=device).view(-1, 3)
    set_row_images(rows, raw)
    rows.set(COUNT, count)
    rows.set(FIRST, count.cumsum(0) - count)
    for key, value in shared.items():
        rows.set(key, NonTensorData(value, batch_size=rows.batch_size))


def _check_hashes(rows: TensorDictBase, raw: Iterable[Sequence[StoredImage]]) -> None:
    """Refuse images that are not those of the row beside which they lie."""
    hashes = rows.get(HASH, None)
    for row, (images, known) in enumerate(
        zip(raw, () if hashes is None else hashes.tolist(), strict=hashes is not None)
    ):
        # Rows that tensordict.pad added have neither.
        if (known or images) and _hash(image.key for image in images) != known:
            raise ValueError(
                f"{RAW} of row {row} has images of another row: the rows were in a storage that keeps "
                "one Python object for all (LazyMemmapStorage does). Use ListStorage or "
                "LazyStackStorage."
            )


def _check_keys(rows: TensorDictBase, keys: Sequence[Sequence[str]], first: Tensor) -> None:
    """Refuse a table that lacks a row's images where the row looks for them."""
    hashes = rows.get(HASH, None)
    if hashes is None:
        return
    for row, (begin, size, known) in enumerate(
        zip(first.tolist(), rows[COUNT].tolist(), hashes.tolist(), strict=True)
    ):
        if size and _hash(keys[row][begin : begin + size]) != known:
            raise ValueError(f"{PIXELS} has no inputs of the images of row {row}: {_AGAIN}")


def _number_of_images(pixels: Any, grids: Any) -> int:
    """Check a table, and count its images."""
    for key, table in ((PIXELS, pixels), (GRIDS, pixels if grids is None else grids)):
        if not isinstance(table, Tensor):
            raise TypeError(f"{key} must be a tensor, got {type(table).__name__}: {_AGAIN}")
    if grids is None:
        return len(pixels)
    if grids.ndim != 2 or grids.shape[1] != 3 or int(grids.prod(-1).sum()) != len(pixels):
        raise ValueError(
            f"{GRIDS} {list(grids.shape)} must be the patches [M, 3] of the images in {PIXELS}, got "
            f"{len(pixels)} patches there: {_AGAIN}"
        )
    return len(grids)


def _in_order(tables: Sequence[int], count: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Return where each row's first image is, if tables have the images of their rows in order."""
    used = dict.fromkeys(sizes, 0)
    first = []
    for table, number in zip(tables, count.tolist(), strict=True):
        first.append(used[table])
        used[table] += number
    if used != sizes:
        raise ValueError(
            f"{PIXELS} must have the images of exactly these rows where {FIRST} is missing, got "
            f"{sum(sizes.values())} for {sum(used.values())}: {_AGAIN}"
        )
    return torch.tensor(first, dtype=torch.int64, device=count.device)


def _joined(tables: Sequence[Tensor]) -> Tensor:
    """Join tables; one alone is not copied, since it may be large."""
    filled = [table for table in tables if len(table)] or tables[:1]
    return filled[0] if len(filled) == 1 else torch.cat(list(filled))


def _of_rows(rows: TensorDictBase, key: tuple[str, str]) -> list[Any] | None:
    """Read a non-tensor entry: one object for each row; ``None`` without the entry."""
    value = rows.get(key, None)
    if isinstance(value, Tensor):
        raise TypeError(
            f"{key} must be a non-tensor entry, which has no dimension of rows, got a tensor: set it by "
            "rows.set_non_tensor(key, value)."
        )
    if isinstance(value, NonTensorData):
        return [value.data] * len(rows)
    if not isinstance(value, NonTensorStack):
        return None
    found = value.tolist()
    # Rows that tensordict.pad added have no table of their own; they need none.
    some = next((each for each in found if each is not None), ()) if key != RAW else ()
    return [some if each is None else each for each in found]


def _hash(keys: Iterable[str]) -> int:
    """Hash of images in order, by their keys; 63 bits."""
    return int.from_bytes(sha256("".join(keys).encode()).digest()[:8], "big") >> 1
