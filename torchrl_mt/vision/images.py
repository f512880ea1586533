"""Images, each kept once in memory however many turns, episodes and copies of them show it.

An image is what it was given as: the bytes of a PNG or JPEG file, or pixels. Two images with the same
bytes are the same object, also after they were copied or pickled.
"""

from __future__ import annotations

import base64
import os
import sys
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from torchrl_mt.checks import import_extra

if TYPE_CHECKING:
    from PIL import Image as PIL

__all__ = ["StoredImage", "is_image", "kept_image"]

_RAW = "raw"

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read: none that starts another program, as EPS does."""


class StoredImage:
    """An image in memory; made by :meth:`of`.

    Examples:
        >>> pixels = np.zeros((16, 24, 3), np.uint8)
        >>> image = StoredImage.of(pixels)
        >>> image
        StoredImage(height=16, width=24, format='raw', nbytes=1152)
        >>> StoredImage.of(pixels.copy()) is image
        True
        >>> image.array().shape
        (16, 24, 3)
    """

    __slots__ = ("__weakref__", "data", "format", "height", "key", "width")

    data: bytes
    """The bytes of the file, or of the pixels."""
    format: str
    """``"png"``, ``"jpeg"``, ...; ``"raw"`` for pixels: uint8 ``[height, width, 3]``, RGB."""
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    key: str
    """Hash of the content."""

    _known: ClassVar[WeakValueDictionary[str, StoredImage]] = WeakValueDictionary()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        raise TypeError("a StoredImage is made by StoredImage.of(image).")

    @classmethod
    def of(cls, image: Any) -> StoredImage:
        """Take an image.

        Args:
            image: a PIL image, uint8 pixels (array or tensor ``[H, W]``, ``[H, W, C]`` or
                ``[C, H, W]`` with 1, 3 or 4 channels), the path of a file, a ``data:`` URI, or the bytes
                of a file. Transparency is dropped, and pictures are turned as their EXIF data say.

        Raises:
            TypeError: if it is none of these, or pixels are not uint8.
            ValueError: if it cannot be read: no such file, no image, an address on the internet, or a
                file with more pixels than ``PIL.Image.MAX_IMAGE_PIXELS`` (89 million), which is not
                decoded.
            ImportError: if Pillow is not installed and is needed.
        """
        if isinstance(image, StoredImage):
            return image
        if isinstance(image, (np.ndarray, torch.Tensor)):
            return cls._of_pixels(_pixels(image))
        if isinstance(image, (str, os.PathLike)):
            image = _read(os.fspath(image))
        if isinstance(image, (bytes, bytearray, memoryview)):
            return cls._of_file(bytes(image))
        pil = import_extra("PIL.Image", "images")
        if isinstance(image, pil.Image):
            return cls._of_pixels(np.asarray(_upright(image)))
        raise TypeError(
            f"image must be a PIL image, uint8 pixels, a path, a data: URI or the bytes of a file, got "
            f"{type(image).__name__}."
        )

    def pil(self) -> PIL.Image:
        """Return it as a PIL image in RGB."""
        pil = import_extra("PIL.Image", "images")
        if self.format == _RAW:
            image: PIL.Image = pil.fromarray(self.array())
            return image
        with pil.open(BytesIO(self.data)) as opened:
            return opened.convert("RGB")

    def array(self) -> np.ndarray:
        """Return its pixels: uint8 ``[height, width, 3]``, RGB."""
        if self.format == _RAW:
            return np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 3).copy()
        return np.array(self.pil())

    def file(self) -> tuple[str, bytes]:
        """Return it as a file: the name of its format and its bytes; pixels become a PNG file."""
        if self.format != _RAW:
            return self.format, self.data
        file = BytesIO()
        self.pil().save(file, "PNG")
        return "png", file.getvalue()

    def data_uri(self) -> str:
        """Return it as a ``data:`` URI, as chat APIs take it; pixels become a PNG file."""
        form, data = self.file()
        return f"data:image/{form};base64,{base64.b64encode(data).decode()}"

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return len(self.data)

    @classmethod
    def _of_pixels(cls, pixels: np.ndarray) -> StoredImage:
        height, width, _ = pixels.shape
        return kept_image(pixels.tobytes(), _RAW, height, width)

    @classmethod
    def _of_file(cls, data: bytes) -> StoredImage:
        pil = import_extra("PIL.Image", "images")
        try:
            with pil.open(BytesIO(data), formats=_FORMATS) as opened:
                form, (width, height) = opened.format.lower(), opened.size
                form = "jpeg" if form == "mpo" else form  # A JPEG file with further pictures.
                known = cls._known.get(_key(data, form, height, width))
                if known is not None:
                    return known
                fault = _too_deep(opened.mode) or _too_large(height, width, pil.MAX_IMAGE_PIXELS)
                if not fault:
                    # A file that is cut off fails here, not while training.
                    upright = _upright(opened)
                    if _is_plain(opened):
                        return kept_image(data, form, height, width)
        except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
            raise ValueError(f"image must have fewer pixels: {error}") from error
        except Exception as error:
            # Pillow's own texts name objects and files of this process, and clients may see ours.
            raise ValueError(
                f"image must be a file that Pillow can read, got {len(data)} bytes that are no whole "
                f"file of {', '.join(_FORMATS)} ({type(error).__name__})."
            ) from error
        if fault:
            raise ValueError(fault)
        # Others than us might turn it otherwise, or put another colour behind what is transparent.
        file = BytesIO()
        upright.save(file, "PNG", compress_level=1)
        return kept_image(file.getvalue(), "png", upright.height, upright.width)

    def __reduce__(self) -> Any:
        return kept_image, (self.data, self.format, self.height, self.width)

    def __copy__(self) -> StoredImage:
        return self

    def __deepcopy__(self, memo: Any) -> StoredImage:
        return self

    def __repr__(self) -> str:
        return (
            f"StoredImage(height={self.height}, width={self.width}, format={self.format!r}, "
            f"nbytes={self.nbytes})"
        )


def is_image(value: Any) -> bool:
    """Whether a value is a :class:`StoredImage` or a PIL image; Pillow is not imported for it.

    Examples:
        >>> is_image(StoredImage.of(np.zeros((8, 8), np.uint8))), is_image("a.png")
        (True, False)
    """
    pil = sys.modules.get("PIL.Image")
    return isinstance(value, StoredImage) or (pil is not None and isinstance(value, pil.Image))


def _too_large(height: int, width: int, most: int | None) -> str:
    """Say what is wrong with a file whose header tells of too many pixels; empty for others."""
    if most is None or height * width <= most:
        return ""
    return (
        f"image must have at most {most} pixels (PIL.Image.MAX_IMAGE_PIXELS), got {height} x {width}: "
        "make it smaller."
    )


def _too_deep(mode: str) -> str:
    """Say what is wrong with images of a Pillow mode; empty for those of 8 bits."""
    if not mode.startswith(("I", "F")):
        return ""
    return f"image must have 8 bits for each colour, got mode {mode!r}: scale and convert it."


def _is_plain(image: PIL.Image) -> bool:
    """Whether everyone sees the same: nothing is transparent, and it is upright."""
    see_through = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    return not see_through and image.getexif().get(_ORIENTATION, 1) == 1


def _upright(image: PIL.Image) -> PIL.Image:
    """Return an image in RGB, turned as its EXIF data say."""
    if fault := _too_deep(image.mode):
        raise ValueError(fault)
    operations = import_extra("PIL.ImageOps", "images")
    turned: PIL.Image = operations.exif_transpose(image).convert("RGB")
    return turned


_ORIENTATION = 0x0112
"""Number of EXIF's orientation."""


def kept_image(data: bytes | torch.Tensor, form: str, height: int, width: int) -> StoredImage:
    """Return the image of these bytes: the one that is in memory, or a new one."""
    data = data if isinstance(data, bytes) else data.numpy().tobytes()
    key = _key(data, form, height, width)
    with StoredImage._lock:
        image = StoredImage._known.get(key)
        if image is None:
            image = object.__new__(StoredImage)
            image.data, image.format, image.key = data, form, key
            image.height, image.width = height, width
            StoredImage._known[key] = image
    return image


def _key(data: bytes, form: str, height: int, width: int) -> str:
    """Hash of an image's content."""
    content = sha256(f"{form} {height} {width} ".encode())
    content.update(data)
    return content.hexdigest()


def _pixels(image: np.ndarray | torch.Tensor) -> np.ndarray:
    """Return pixels as uint8 ``[H, W, 3]``."""
    array = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else image
    if array.dtype != np.uint8:
        raise TypeError(
            f"image must have uint8 pixels from 0 to 255, got {array.dtype}: scale and convert them."
        )
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        if array.shape[-1] not in (1, 3, 4):
            array = array.transpose(1, 2, 0)
        elif isinstance(image, torch.Tensor):
            raise ValueError(
                f"image must not leave open which dimension has its channels, got a tensor of shape "
                f"{list(image.shape)}: give an array [H, W, C], image.permute(1, 2, 0).numpy()."
            )
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise ValueError(
            f"image must have shape [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, got "
            f"{list(image.shape)}."
        )
    return np.broadcast_to(array[..., :3], (*array.shape[:2], 3))


def _read(place: str) -> bytes:
    """Read a file or a ``data:`` URI."""
    head, comma, content = place.partition(",")
    if head[:5].lower() == "data:":
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError(
                f"image must be a base64 data: URI (data:image/png;base64,...), got {head[:80]!r}."
            )
        try:
            return base64.b64decode("".join(content.split()), validate=True)
        except ValueError as error:
            raise ValueError(f"image must be a valid base64 data: URI, but {error}.") from error
    place = place.removeprefix("file://")
    if "://" in place[:12]:
        raise ValueError(
            f"image must be in memory, in a file or in a data: URI, got the address {place[:80]!r}: "
            "download it first."
        )
    try:
        return Path(place).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"image must be a file that can be read, got {place[:80]!r}: {reason}."
        ) from error
