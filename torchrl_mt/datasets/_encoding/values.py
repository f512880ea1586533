"""Python objects as JSON text that reads back equal, without pickle.

Text, numbers, lists and dicts are ordinary JSON. What JSON lacks (tuples, bytes, dicts with other
keys, NaN and infinities, tensors and arrays, images) is written as an object with the key
``"__type__"``. Images are ``data:`` URIs; in a message's part, the URI is where the image was, so that
others can read it: ``{"type": "image", "image": "data:image/png;base64,...", "__type__": "image"}``.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.data._store.schema import bits
from torchrl_mt.vision import StoredImage

__all__ = ["dtype_name", "dtype_of", "from_json_text", "lost_meaning", "to_json_text"]

_TYPE = "__type__"


def to_json_text(value: Any) -> str:
    """Encode a value as JSON text.

    Args:
        value: None, a bool, number, string, bytes, tensor, array or
            :class:`~torchrl_mt.vision.StoredImage`, or lists, tuples and dicts of these.

    Raises:
        TypeError: for anything else.

    Examples:
        >>> to_json_text({"role": "user", "content": "hi"})
        '{"role": "user", "content": "hi"}'
        >>> from_json_text(to_json_text({1: (2.5, b"x")}))
        {1: (2.5, b'x')}
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def from_json_text(text: str | bytes) -> Any:
    """Decode what :func:`to_json_text` returned.

    Raises:
        ValueError: if the text is no JSON.
    """
    return json.loads(text, object_hook=_value)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name; ``ValueError`` if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch ({torch.__version__}).")
    return dtype


def lost_meaning(value: Any) -> str | None:
    """Say what an array or image would lose if its numbers alone were written, and what to give instead.

    Returns:
        None if it is no more than its numbers.
    """
    dtype = getattr(value, "dtype", None)
    if isinstance(value, np.ma.MaskedArray):
        return (
            "a masked array would lose its mask: give .filled(value), and the mask as an entry of "
            "its own"
        )
    if isinstance(dtype, np.dtype) and dtype.names is not None:
        return "a structured array would lose its fields: give each as an entry of its own"
    if isinstance(dtype, np.dtype) and dtype.kind in "mM":
        return f'{dtype.name} values would lose their unit: give .astype("int64")'
    if getattr(value, "mode", None) in ("P", "PA") and hasattr(value, "getpalette"):
        return f'an image of mode {value.mode!r} would lose its palette: give .convert("RGB")'
    return None


def _plain(value: Any) -> Any:
    """Convert a value to what ``json`` writes."""
    # Subclasses, such as string enums, are written as their base.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        value = str.__str__(value)
        if _is_unicode(value):
            return value
        return {_TYPE: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else {_TYPE: "float", "value": repr(value)}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, tuple):
        return {_TYPE: "tuple", "items": [_plain(each) for each in value]}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and _is_unicode(key) for key in value)
        if plain and _TYPE not in value:
            if isinstance(value.get("image"), StoredImage) and len(value) > 1:
                shown = {key: _plain(each) for key, each in value.items() if key != "image"}
                return {**dict.fromkeys(value), **shown, **_image_record(value["image"])}
            return {str.__str__(key): _plain(each) for key, each in value.items()}
        return {_TYPE: "dict", "items": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "base64": _base64(value)}
    if isinstance(value, StoredImage):
        return _image_record(value)
    lost = lost_meaning(value)
    if lost is not None:
        raise TypeError(f"{lost}.")
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        kind = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return {_TYPE: "array", **kind, "base64": _base64(value.tobytes())}
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = bits(tensor).numpy().tobytes()
        kind = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        return {_TYPE: "tensor", **kind, "base64": _base64(data)}
    raise TypeError(
        f"a {type(value).__name__} cannot be written to a file: give None, bools, numbers, strings, "
        f"bytes, tensors, arrays or images (StoredImage), or lists, tuples and dicts of these."
    )


def _image_record(image: StoredImage) -> dict[str, Any]:
    """An image as a ``data:`` URI, and whether it was pixels."""
    is_raw = image.format == "raw"
    return {"image": image.data_uri(), _TYPE: "pixels" if is_raw else "image"}


def _is_unicode(text: str) -> bool:
    """Whether a string has no lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _value(record: dict[str, Any]) -> Any:
    """Convert an object that ``json`` read back to what it stands for."""
    kind = record.get(_TYPE)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    return record if read is None else read(record)


def _array(record: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(base64.b64decode(record["base64"]), np.dtype(record["dtype"]))
    return data.reshape(record["shape"]).copy()


def _tensor(record: dict[str, Any]) -> Tensor:
    dtype, shape = dtype_of(record["dtype"]), record["shape"]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    data = bytearray(base64.b64decode(record["base64"]))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _image(record: dict[str, Any]) -> Any:
    uri = record["image"]
    if not isinstance(uri, str) or not uri.startswith("data:"):  # A file may name no other file.
        raise ValueError(f"an image must be a data: URI, got {str(uri)[:80]!r}.")
    image = StoredImage.of(uri)
    if record[_TYPE] == "pixels":
        image = StoredImage.of(image.array())
    others = {key: each for key, each in record.items() if key != _TYPE}
    return {**others, "image": image} if len(others) > 1 else image


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda record: float(record["value"]),
    "tuple": lambda record: tuple(record["items"]),
    "dict": lambda record: dict(record["items"]),
    "bytes": lambda record: base64.b64decode(record["base64"]),
    "str": lambda record: base64.b64decode(record["base64"]).decode("utf-8", "surrogatepass"),
    "array": _array,
    "tensor": _tensor,
    "image": _image,
    "pixels": _image,
}
