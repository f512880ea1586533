"""The images of training rows: all in one table, and for each row which of them it shows.

Rows may be indexed, shuffled and repeated like any batch: their images follow, because each row names
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

__all__ = ["COUNT", "FIRST", "GRIDS", "PIXELS", "RAW", "RowImages"]

RAW = ("images", "raw")
"""Per row, a tuple of its :class:`StoredImage`, in the order of its placeholders."""
PIXELS = ("images", "pixel_values")
"""The table: inputs of all images, one after the other; no batch dimension."""
GRIDS = ("images", "grid_thw")
"""int64 ``[M, 3]``, patches of each image of the table; absent for models without."""
FIRST = ("images", "first")
"""int64 ``[N]``: where each row's first image is in the table."""
COUNT = ("images", "count")
"""int64 ``[N]``: number of each row's images."""


@dataclass(frozen=True)
class RowImages:
    """The images of ``N`` rows."""

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
        """Read the entries that ``VisionInputs`` wrote; None if there are none, or no rows."""
        pixels = rows.get(PIXELS, None)
        if pixels is None or not len(rows):
            return None
        grids, first = rows.get(GRIDS, None), rows[FIRST]
        if isinstance(pixels, NonTensorData):
            return RowImages(pixels.data, None if grids is None else grids.data, first, rows[COUNT])
        # Rows of several tables, stacked or concatenated: each counts in its own.
        own = pixels.tolist()
        tables = {
            id(table): (table, grid)
            for table, grid in zip(
                own, [None] * len(own) if grids is None else grids.tolist(), strict=True
            )
        }
        sizes = [len(table if grid is None else grid) for table, grid in tables.values()]
        begins = dict(zip(tables, accumulate(sizes, initial=0), strict=False))
        shift = torch.tensor([begins[id(table)] for table in own], device=first.device)
        return RowImages(
            torch.cat([table for table, _ in tables.values()]),
            None if grids is None else torch.cat([grid for _, grid in tables.values()]),
            first + shift,
            rows[COUNT],
        )

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
        """
        first, count = self.first[rows].tolist(), self.count[rows].tolist()
        spans = [range(begin, begin + size) for begin, size in zip(first, count, strict=True)]
        chosen = [i for span in spans for i in span]
        if not chosen:
            return {}
        if self.grids is None:
            return {"pixel_values": self.pixel_values[chosen]}
        ends = [0, *self.grids.prod(-1).cumsum(0).tolist()]
        return {
            "pixel_values": torch.cat([self.pixel_values[ends[i] : ends[i + 1]] for i in chosen]),
            "image_grid_thw": self.grids[chosen],
        }
