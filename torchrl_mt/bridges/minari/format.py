"""Data sets of Minari (0.5 and later), read where they are: HDF5, Arrow or Parquet.

An episode of ``T`` steps has ``T + 1`` observations: ``"observation"`` are the first ``T``, and
``("next", "observation")`` the last ``T``. The same holds for infos (``"info"``); those that came with
steps alone are in ``("next", "info")``. Parts of dict and tuple spaces are nested keys, such as
``("observation", "0")``; texts are Python strings. Rewards and flags are ``[T, 1]``. ``metadata(i)`` has
``"id"``, ``"total_steps"``, and ``"seed"`` and ``"options"`` of the reset if they are known.
"""

from __future__ import annotations

import io
import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets import DatasetError
from torchrl_mt.datasets.format_parts import (
    DenseRows,
    EpisodeSchema,
    EpisodicReader,
    Field,
    Format,
    Path,
    StoredRows,
    TextRows,
    own_node,
    to_json_text,
)
from torchrl_mt.paths import inside

__all__ = ["FORMAT"]

_HDF5 = "main_data.hdf5"
_NAMES = {
    "observations": ("observation",),
    "actions": ("action",),
    "rewards": ("next", "reward"),
    "terminations": ("next", "terminated"),
    "truncations": ("next", "truncated"),
    "infos": ("info",),
}
_DONE: Path = ("next", "done")
_FLAGS = ("terminations", "truncations")
_PER_STEP = ("rewards", *_FLAGS)


@dataclass(frozen=True)
class _Leaf:
    """An array of an episode."""

    names: tuple[str, ...]
    """Where it is in the files, such as ``("observations", "position")``."""
    extra: int
    """Number of its rows beyond the steps of its episode."""
    shape: tuple[int, ...]
    dtype: np.dtype | None
    """None for Python objects."""
    is_jpeg: bool = False

    @property
    def field(self) -> Field:
        """The entry that it is read as."""
        if self.dtype is None:
            return Field("object")
        shape = (1,) if self.names[0] in _PER_STEP else self.shape
        native = self.dtype.newbyteorder("=")
        return Field("dense", shape, torch.from_numpy(np.empty(0, native)).dtype)


class _Reader(EpisodicReader):
    """A data set of Minari.

    Args:
        folder: that of its files.
        episodes: how many there are.
        spaces: describe its ``"observations"`` and ``"actions"``.
    """

    def __init__(self, folder: FilePath, episodes: int, spaces: Mapping[str, Any]) -> None:
        self.folder, self.spaces = folder, spaces
        self._open()
        lengths = np.array([self._length(i) for i in range(episodes)], dtype=np.int64)
        self._leaves: dict[Path, _Leaf] = {}
        super().__init__(EpisodeSchema(self._first_fields(lengths)), lengths)

    @abstractmethod
    def _open(self) -> None:
        """Import what the files need, and open them."""

    @abstractmethod
    def length(self, episode: int) -> int:
        """Return the number of steps of an episode."""

    @abstractmethod
    def leaves(self, episode: int) -> Iterator[_Leaf]:
        """Iterate over the arrays of an episode."""

    @abstractmethod
    def values(self, leaf: _Leaf, episode: int, rows: np.ndarray) -> Any:
        """Read rows ``a, a + k, a + 2 k, ...``: an array, or a list of JPEG files or objects."""

    def take(self, path: Path, episode: int, rows: np.ndarray) -> StoredRows:
        """Read rows of one episode."""
        if path == _DONE:
            flags = [self._array_of(("next", _NAMES[name][1]), episode, rows) for name in _FLAGS]
            return DenseRows(flags[0] | flags[1])
        leaf = self._leaves[path]
        if leaf.dtype is None:
            return TextRows([to_json_text(item) for item in self.values(leaf, episode, rows)])
        return DenseRows(self._array_of(path, episode, rows))

    def _array_of(self, path: Path, episode: int, rows: np.ndarray) -> np.ndarray:
        leaf = self._leaves[path]
        found = self.values(leaf, episode, rows)
        if leaf.is_jpeg:
            images = [_decoded(item, leaf.shape) for item in found]
            return np.stack(images) if images else np.empty((0, *leaf.shape), np.uint8)
        assert leaf.dtype is not None
        values = np.array(found, dtype=leaf.dtype.newbyteorder("="))
        if values.shape[1:] != leaf.shape:
            raise ValueError(
                f"{'/'.join(leaf.names)} has shape {values.shape[1:]} per step, expected {leaf.shape}, "
                f"as in the first episode."
            )
        return values.reshape(len(rows), *leaf.field.shape)

    def _length(self, episode: int) -> int:
        """Return the number of steps of an episode; 0 if it is not there."""
        try:
            return self.length(episode)
        except (OSError, ValueError, KeyError):
            return 0

    def _first_fields(self, lengths: np.ndarray) -> dict[Path, Field]:
        """Return the entries of the first episode that can be read, and note their arrays."""
        cause: Exception | None = None
        for i in np.flatnonzero(lengths).tolist():
            try:
                return self._fields_of([*self.leaves(i)])
            except (OSError, ValueError, KeyError, TypeError) as error:
                cause = cause or error
        if len(lengths):
            raise DatasetError(
                f"{self.folder}: none of its {len(lengths)} episodes can be read: {cause}"
            )
        return {}

    def _fields_of(self, leaves: list[_Leaf]) -> dict[Path, Field]:
        fields: dict[Path, Field] = {}
        for leaf in leaves:
            root, *inner = leaf.names
            path = (*_NAMES.get(root, ()), *map(_plain_name, inner))
            if root == "observations" and leaf.extra != 1:
                raise ValueError(
                    f"{'/'.join(leaf.names)} has not one row more than there are steps."
                )
            if not path or (root == "infos" and leaf.extra not in (0, 1)):
                continue
            is_after_steps = root == "infos" and leaf.extra == 0
            if is_after_steps:
                path = ("next", *path)
            following = ("next", *path)
            self._leaves[path] = leaf
            fields[path] = leaf.field
            if root in ("observations", "infos") and not is_after_steps:
                fields[following] = replace(leaf.field, shared=True)
        fields[_DONE] = Field("dense", (1,), torch.bool)
        return fields

    def _space(self, names: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the space that an array is from; empty if it is not known."""
        space = self.spaces.get(names[0], {})
        for name in names[1:]:
            parts = space.get("subspaces", {})
            space = (
                parts[int(_plain_name(name))] if isinstance(parts, list) else parts.get(name, {})
            )
        return dict(space)


class _Hdf5Reader(_Reader):
    def _open(self) -> None:
        self._h5py = import_extra("h5py", "hdf5")
        self._file = self._h5py.File(inside(self.folder, _HDF5), "r")

    def length(self, episode: int) -> int:
        # The attributes of h5py's objects are slower than its lower level.
        name = b"episode_%d" % episode
        links = self._file.id.links
        if not links.exists(name) or links.get_info(name).type != self._h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name.decode()} is missing, or a link, which is not followed.")
        group = self._h5py.h5g.open(self._file.id, name)
        found = np.empty((), dtype=np.int64)
        self._h5py.h5a.open(group, b"total_steps").read(found)
        return int(found)

    def metadata(self, i: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in own_node(self._file, f"episode_{i}").attrs.items():
            *outer, last = name.split("/")
            place = found
            for each in outer:
                place = place.setdefault(each, {})
            if isinstance(value, (np.ndarray, np.generic)):
                value = value.tolist()
            place[last] = None if isinstance(value, self._h5py.Empty) else value
        return found

    def leaves(self, episode: int) -> Iterator[_Leaf]:
        yield from self._leaves_of(
            own_node(self._file, f"episode_{episode}"), (), self.length(episode)
        )

    def _leaves_of(self, group: Any, names: tuple[str, ...], steps: int) -> Iterator[_Leaf]:
        for name in group:
            node, where = own_node(group, name), (*names, name)
            if isinstance(node, self._h5py.Group):
                yield from self._leaves_of(node, where, steps)
            elif node.ndim:
                leaf = _Leaf(where, len(node) - steps, node.shape[1:], node.dtype)
                shape = _shape_of(self._space(where))
                # JPEG files of one size make a table of bytes.
                if (
                    node.dtype == np.uint8
                    and shape != leaf.shape
                    and len(shape) > 1 >= len(leaf.shape)
                ):
                    leaf = replace(leaf, shape=shape, is_jpeg=True)
                elif self._h5py.check_vlen_dtype(node.dtype) == np.uint8 and len(shape) > 1:
                    leaf = replace(leaf, shape=shape, dtype=np.dtype("u1"), is_jpeg=True)
                elif node.dtype.kind not in "biufc":
                    leaf = replace(leaf, shape=(), dtype=None)
                yield leaf

    def values(self, leaf: _Leaf, episode: int, rows: np.ndarray) -> Any:
        node = own_node(self._file, f"episode_{episode}/{'/'.join(leaf.names)}")
        _check_rows(leaf, len(node), self.length(episode))
        if self._h5py.check_string_dtype(node.dtype) is not None:
            node = node.asstr()
        values = node[_slice_of(rows)]
        return [*values] if leaf.is_jpeg else values.tolist() if leaf.dtype is None else values

    def close(self) -> None:
        self._file.close()


class _ArrowReader(_Reader):
    suffix = "arrow"

    def _open(self) -> None:
        self._arrow = import_extra("pyarrow", "arrow")

    def length(self, episode: int) -> int:
        return int(self.metadata(episode)["total_steps"])

    def metadata(self, i: int) -> dict[str, Any]:
        text = inside(self.folder, f"{i}/metadata.json").read_bytes()
        return dict(json.loads(text))

    def leaves(self, episode: int) -> Iterator[_Leaf]:
        table = self._table(episode, None)
        for field in table.schema:
            if field.name in _NAMES:
                # Whatever is per step has one row more here, which means nothing.
                extra = len(table) - self.length(episode)
                yield from self._leaves_of(field, (field.name,), extra)

    def _leaves_of(self, field: Any, names: tuple[str, ...], extra: int) -> Iterator[_Leaf]:
        types, kind = self._arrow.types, field.type
        shape = _shape_of(self._space(names))
        if types.is_struct(kind):
            for each in kind:
                yield from self._leaves_of(each, (*names, each.name), extra)
        elif types.is_binary(kind) and len(shape) > 1:
            yield _Leaf(names, extra, shape, np.dtype("u1"), is_jpeg=True)
        elif types.is_fixed_size_list(kind) and _is_number(types, kind.value_type):
            sizes = (field.metadata or {}).get(b"shape")
            if sizes is not None:
                shape = tuple(int(size) for size in sizes.split(b",") if size)
            if math.prod(shape) != kind.list_size:
                shape = (kind.list_size,)
            yield _Leaf(names, extra, shape, np.dtype(kind.value_type.to_pandas_dtype()))
        elif _is_number(types, kind):
            yield _Leaf(names, extra, (), np.dtype(kind.to_pandas_dtype()))
        else:
            yield _Leaf(names, extra, (), None)

    def values(self, leaf: _Leaf, episode: int, rows: np.ndarray) -> Any:
        table = self._table(episode, leaf.names[0])
        _check_rows(leaf, len(table), self.length(episode))
        array = table.column(0).combine_chunks()
        for name in leaf.names[1:]:
            array = array.field(name)
        part = _slice_of(rows)
        array = array.slice(part.start, part.stop - part.start)
        if leaf.is_jpeg or leaf.dtype is None:
            return array.to_pylist()[:: part.step]
        if self._arrow.types.is_fixed_size_list(array.type):
            values = array.flatten().to_numpy(zero_copy_only=False)
        else:
            values = array.to_numpy(zero_copy_only=False)
        return values.reshape(-1, *leaf.shape)[:: part.step]

    def _table(self, episode: int, column: str | None) -> Any:
        """Read a column of an episode, or all."""
        names = None if column is None else [column]
        files = sorted((self.folder / str(episode)).glob(f"*.{self.suffix}"))
        if not files:
            raise ValueError(f"there is no *.{self.suffix} in {self.folder / str(episode)}.")
        tables = []
        for file in files:
            inside(self.folder, file.relative_to(self.folder))
            tables.append(self._read_file(file, names))
        return self._arrow.concat_tables(tables)

    def _read_file(self, file: FilePath, names: list[str] | None) -> Any:
        with self._arrow.memory_map(str(file)) as mapped:
            table = self._arrow.ipc.open_file(mapped).read_all()
        return table if names is None else table.select(names)


class _ParquetReader(_ArrowReader):
    suffix = "parquet"

    def _read_file(self, file: FilePath, names: list[str] | None) -> Any:
        parquet = import_extra("pyarrow.parquet", "arrow")
        return parquet.ParquetFile(file).read(names, use_threads=False)


_READERS: dict[str, Callable[..., _Reader]] = {
    "hdf5": _Hdf5Reader,
    "arrow": _ArrowReader,
    "parquet": _ParquetReader,
}


def _reader(path: FilePath) -> _Reader:
    folder = _data_folder(path)
    assert folder is not None
    inside(path, (folder / "metadata.json").relative_to(path))
    file = folder / "metadata.json"
    try:
        about = json.loads(file.read_bytes())
        episodes, layout = int(about["total_episodes"]), about.get("data_format", "hdf5")
        given = {"observations": "observation_space", "actions": "action_space"}
        spaces = {name: json.loads(about[key]) for name, key in given.items() if key in about}
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path} was written by a Minari before 0.5: load it with Minari 0.5 and save it again."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file} is no metadata of Minari: {error!r}.") from error
    if layout not in _READERS:
        raise DatasetError(f"{file}: data_format is {layout!r}, expected hdf5, arrow or parquet.")
    return _READERS[layout](folder, episodes, spaces)


def _check_rows(leaf: _Leaf, found: int, steps: int) -> None:
    """Refuse an array of another length than its episode's steps require."""
    if found != steps + leaf.extra:
        raise ValueError(
            f"{'/'.join(leaf.names)} has {found} rows, expected {steps + leaf.extra} for {steps} steps."
        )


def _slice_of(rows: np.ndarray) -> slice:
    """Return the slice that has evenly spaced rows."""
    if not len(rows):
        return slice(0, 0, 1)
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    return slice(int(rows[0]), int(rows[-1]) + 1, step)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _plain_name(name: str) -> str:
    """Name of a part; those of tuples are numbered in both layouts."""
    return re.sub(r"^_index_(\d+)$", r"\1", name)


def _shape_of(space: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the arrays of a space."""
    if "nvec" in space:
        return np.shape(space["nvec"])
    if space.get("type") == "MultiBinary":
        return tuple(np.atleast_1d(space["n"]).tolist())
    return tuple(space.get("shape", ()))


def _decoded(data: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Decode a JPEG file."""
    library = import_extra("PIL.Image", "images")
    with library.open(io.BytesIO(bytes(data)), formats=["JPEG"]) as image:
        array = np.array(image, dtype=np.uint8)
    if array.shape != shape:
        raise ValueError(f"an image is {array.shape}, expected {shape}.")
    return array


def _data_folder(path: FilePath) -> FilePath | None:
    """Return the folder with the data of a Minari data set; None if it is none."""
    for folder in (path / "data", path):
        if (folder / _HDF5).is_file():
            return folder
        try:
            about = json.loads((folder / "metadata.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and {"total_episodes", "data_format"} <= about.keys():
            return folder
    return None


def _detect(path: FilePath) -> bool:
    return path.is_dir() and _data_folder(path) is not None


FORMAT = Format("minari", _reader, None, _detect)
