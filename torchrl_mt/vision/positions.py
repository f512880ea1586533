"""Multimodal rotary positions (M-RoPE) of Qwen's vision-language models.

Text tokens have the same position in time, height and width. The tokens of an image have the place of
its patches, all after the text before it; the text after it goes on behind the image's longer side.
As in Qwen2-VL (Wang et al. 2024, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["grid_positions", "rope_positions"]


def grid_positions(
    is_image: Tensor, grids: Iterable[tuple[int, int, int]], merge_size: int | None
) -> Tensor | None:
    """Return the positions ``[3, L]`` of one row's tokens; None if they are those of text.

    Args:
        is_image: bool ``[L]``, true on the tokens of images, without padding.
        grids: the images' patches in time, height and width, in order.
        merge_size: patches per token along a side; None for models without M-RoPE.
    """
    if merge_size is None:
        return None
    return rope_positions(is_image, [(t, h // merge_size, w // merge_size) for t, h, w in grids])


def rope_positions(is_image: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the positions of one row's tokens.

    Args:
        is_image: bool ``[L]``, true on the tokens of images, without padding.
        sizes: the images' tokens in time, height and width, in order.

    Returns:
        int64 ``[3, L]``: time, height, width.

    Raises:
        ValueError: if the images have more or fewer tokens than are marked, or those of an image are not
            side by side.

    Examples:
        >>> rope_positions(torch.tensor([0, 1, 1, 1, 1, 0]).bool(), [(1, 2, 2)])
        tensor([[0, 1, 1, 1, 1, 3],
                [0, 1, 1, 2, 2, 3],
                [0, 1, 2, 1, 2, 3]])
    """
    device = is_image.device
    places = is_image.nonzero().squeeze(-1)
    counts = [time * height * width for time, height, width in sizes]
    if sum(counts) != len(places):
        raise ValueError(
            f"the images have {sum(counts)} tokens, and the row has {len(places)} placeholders."
        )
    positions = torch.arange(len(is_image), device=device).expand(3, -1)
    if not counts:
        return positions.clone()
    size = torch.tensor(counts, device=device)
    ends = size.cumsum(0) - 1
    if bool((places[ends] - places[ends - size + 1] != size - 1).any()):
        raise ValueError("the tokens of an image must be side by side: are the images in order?")
    # What follows an image begins behind its longer side.
    shift = torch.zeros(len(is_image) + 1, dtype=torch.int64, device=device)
    sides = [max(height, width) for _, height, width in sizes]
    shift[places[ends] + 1] = torch.tensor(sides, device=device) - size
    positions = positions + shift[:-1].cumsum(0)
    positions[:, places] += torch.cat([_within(each) for each in sizes], 1).to(device)
    return positions


@lru_cache(1024)
def _within(size: tuple[int, int, int]) -> Tensor:
    """Places of an image's tokens in its grid, less their numbers: int64 ``[3, n]``."""
    grid = torch.cartesian_prod(*map(torch.arange, size)).view(-1, 3).T
    return grid - torch.arange(grid.shape[1], device="cpu")
