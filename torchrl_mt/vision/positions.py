"""Multimodal rotary positions (M-RoPE) of Qwen's vision-language models.

Text tokens have the same position in time, height and width. The tokens of an image have the place of
its patches, all after the text before it; the text after it goes on behind the image's longer side.
As in Qwen2-VL (Wang et al. 2024, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["rope_positions"]


def rope_positions(is_image: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the positions of one row's tokens.

    Args:
        is_image: bool ``[L]``, true on the tokens of images, without padding.
        sizes: the images' tokens in time, height and width, in order.

    Returns:
        int64 ``[3, L]``: time, height, width.

    Raises:
        ValueError: if the images have more or fewer tokens than are marked.

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
    first = 0
    begins = []
    for count in counts:
        begins.append(first)
        first += count
    starts = places[begins].tolist() if counts else []
    positions = torch.arange(len(is_image), device=device).expand(3, -1).clone()
    shift = 0
    for start, count, size in zip(starts, counts, sizes, strict=True):
        end = start + count
        grid = torch.cartesian_prod(*(torch.arange(side, device=device) for side in size))
        positions[:, start:end] = grid.view(-1, 3).T + start + shift
        # What follows begins behind the longer side.
        shift += max(size[1:]) - count
        positions[:, end:] = torch.arange(end, len(is_image), device=device) + shift
    return positions
