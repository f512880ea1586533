"""Images of one entry of one episode: a PNG or JPEG file per row.

Images are ``uint8``, of shape ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]`` with 1, 3 or 4 channels. Where
both of the last two fit, they are taken as ``[H, W, C]``. PNG files read back bit for bit, in the same
layout. JPEG files are lossy, and have no fourth channel: images with four are always PNG files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets._files.entry_files import EntryFiles, errors_named

__all__ = [
    "channels_of",
    "from_picture",
    "image_file",
    "is_image",
    "read_image",
    "to_picture",
    "write_images",
]

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_LONGEST_SIDE = 65_500
"""Pixels: the most that JPEG files can have."""
_MOST_PIXELS = 2**26
"""Pillow takes much larger images for attacks."""
_COMPRESSION = 3
"""zlib's level: files hardly larger than at Pillow's 6, in half the time."""


def is_image(shape: Sequence[int]) -> bool:
    """Whether ``uint8`` values of this shape are an image.

    Examples:
        >>> is_image((84, 84)), is_image((3, 96, 128)), is_image((84, 84, 2)), is_image((10,))
        (True, True, False, False)
    """
    if len(shape) not in (2, 3) or min(shape) < 1 or channels_of(shape) not in _MODES:
        return False
    height, width = _sides(shape)
    return max(height, width) <= _LONGEST_SIDE and height * width <= _MOST_PIXELS


def channels_of(shape: Sequence[int]) -> int:
    """Return the number of channels of an image of this shape."""
    if len(shape) == 2:
        return 1
    return shape[-1] if shape[-1] in _MODES else shape[0]


def to_picture(image: np.ndarray) -> np.ndarray:
    """View an image as ``[H, W]`` or, with several channels, as ``[H, W, C]``."""
    height, width = _sides(image.shape)
    if channels_of(image.shape) == 1:
        return image.reshape(height, width)
    return image if image.shape[-1] in _MODES else image.transpose(1, 2, 0)


def from_picture(picture: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """View what :func:`to_picture` returned as an image of the shape that it had."""
    is_channels_first = picture.ndim == 3 and shape[-1] not in _MODES
    return picture.transpose(2, 0, 1) if is_channels_first else picture.reshape(shape)


def image_file(row: int, shape: Sequence[int], jpeg_quality: int | None) -> str:
    """Return the name of the file of an image."""
    is_jpeg = jpeg_quality is not None and channels_of(shape) != 4
    return f"{row:06d}.{'jpg' if is_jpeg else 'png'}"


def write_images(folder: FilePath, images: Iterable[np.ndarray], jpeg_quality: int | None) -> None:
    """Write one file per image.

    Args:
        folder: a folder that exists.
        images: ``uint8`` arrays.
        jpeg_quality: 1 to 100, or None for PNG files.
    """
    library = _pillow()
    for row, image in enumerate(images):
        file = folder / image_file(row, image.shape, jpeg_quality)
        options: dict[str, Any] = {"compress_level": _COMPRESSION}
        if file.suffix == ".jpg":
            options = {"quality": jpeg_quality}
        library.fromarray(np.ascontiguousarray(to_picture(image))).save(file, **options)


def read_image(
    entry: EntryFiles, row: int, shape: Sequence[int], jpeg_quality: int | None
) -> np.ndarray:
    """Read an image of this shape.

    Raises:
        DatasetError: if it cannot be read; names the file.
    """
    end, library = f"/{image_file(row, shape, jpeg_quality)}", _pillow()
    data = io.BytesIO(entry.data(end))
    with errors_named(entry.path(end)), library.open(data, formats=["PNG", "JPEG"]) as image:
        height, width = _sides(shape)
        expected = (_MODES[channels_of(shape)], (width, height))
        if (image.mode, image.size) != expected:
            raise ValueError(f"it is {(image.mode, image.size)}, expected {expected}.")
        return from_picture(np.asarray(image), shape)


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width."""
    if len(shape) == 3 and shape[-1] not in _MODES:
        return shape[1], shape[2]
    return shape[0], shape[1]


def _pillow() -> Any:
    return import_extra("PIL.Image", "images")
