"""Data sets of LeRobot (v3), read where they are: Parquet files, and MP4 files through PyAV.

Names with dots are nested keys, as TorchRL's reader has them: ``"observation.state"`` is
``("observation", "state")``, ``"observation.images.top"`` is ``("observation", "image", "top")``, and
the indices are ``"episode"``, ``"frame"``, ``"index"`` and ``"task_index"``. The texts of the tasks are
in ``metadata(i)["tasks"]``.

``("next", "observation")`` is the observation of the following frame; after the last frame of an episode
none is recorded, and it is that frame once more. An episode ends truncated, unless ``next.done`` or
``next.terminated`` say that it terminated.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets import DatasetError
from torchrl_mt.datasets.format_parts import (
    DenseRows,
    EpisodeSchema,
    Field,
    Format,
    FormatReader,
    Path,
    Runs,
    StoredRows,
    TextRows,
    array_dtype,
    dtype_of,
    runs_of,
    to_json_text,
)
from torchrl_mt.paths import inside

__all__ = ["FORMAT"]

_logger = logging.getLogger("torchrl_mt")

_INFO = "meta/info.json"
_INDICES = {
    "episode_index": "episode",
    "frame_index": "frame",
    "index": "index",
    "task_index": "task_index",
    "timestamp": "timestamp",
}
_CAMERAS = "observation.images."
_FLAGS = ("terminated", "truncated", "done")
_NEAR = 16
"""Frames that are decoded on the way to the next wanted one, rather than looking for a key frame."""


class _Reader(FormatReader):
    def __init__(self, path: FilePath) -> None:
        self.path = path
        self._arrow = import_extra("pyarrow", "arrow")
        self._parquet = import_extra("pyarrow.parquet", "arrow")
        try:
            self._info = json.loads(inside(path, _INFO).read_bytes())
            version = str(self._info["codebase_version"])
            self._features: dict[str, Any] = self._info["features"]
            self._fps = float(self._info["fps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path / _INFO} is no description of LeRobot: {error!r}."
            ) from error
        if not version.startswith("v3."):
            raise DatasetError(
                f"{path} has LeRobot's layout {version}, expected v3.0: convert older ones with the "
                f"script convert_dataset_v21_to_v30 of LeRobot."
            )
        self._names = {path: name for name, path in _paths_of(self._features).items()}
        self._opened = lru_cache(maxsize=32)(self._open)
        self._group: dict[str, tuple[tuple[FilePath, int], Any]] = {}
        """The part of a file that each column was last read from."""
        self._read_episodes()
        super().__init__(EpisodeSchema(self._fields()), self._lengths)

    def stored(self, path: Path, rows: Runs) -> StoredRows:
        """Read rows of an entry."""
        episodes = np.repeat(rows.episodes, rows.counts)
        steps = runs_of(rows.starts, rows.counts, rows.stride)
        for i in np.unique(rows.episodes).tolist():
            if self._lengths[i] != self._ends[i] - self._starts[i]:
                raise ValueError("its length and its indices in meta/episodes do not agree.")
        if path in [("next", flag) for flag in _FLAGS]:
            return DenseRows(self._flag(path[1], episodes, steps))
        if path[0] == "next" and path not in self._names:
            path, steps = path[1:], np.minimum(steps + 1, self._lengths[episodes] - 1)
        return self._values(path, episodes, steps)

    def metadata(self, i: int) -> dict[str, Any]:
        """Return the number of an episode, and the texts of its tasks."""
        names = [name for name in ("episode_index", "tasks") if name in self._episodes.column_names]
        return {name: self._episodes[name][i].as_py() for name in names}

    def close(self) -> None:
        """Close the files."""
        self._opened.cache_clear()
        self._group.clear()

    # ---- what there is ------------------------------------------------------------------------------

    def _read_episodes(self) -> None:
        """Read the table of the episodes, without its statistics."""
        files = sorted((self.path / "meta" / "episodes").rglob("*.parquet"))
        if not files:
            raise DatasetError(f"{self.path / 'meta' / 'episodes'} has no Parquet files.")
        tables = []
        for file in files:
            try:
                inside(self.path, file.relative_to(self.path))
                names = self._parquet.read_schema(file).names
                wanted = [name for name in names if not name.startswith(("stats/", "meta/"))]
                tables.append(self._parquet.ParquetFile(file).read(wanted))
            except (OSError, ValueError) as error:
                raise DatasetError(f"{file} cannot be read: {error}") from error
        try:
            together = self._arrow.concat_tables(tables, promote_options="default")
            self._episodes = together.sort_by("episode_index")
            self._lengths = self._column_of_episodes("length")
            self._starts = self._column_of_episodes("dataset_from_index")
            self._ends = self._column_of_episodes("dataset_to_index")
            chunks = self._column_of_episodes("data/chunk_index")
            numbers = self._column_of_episodes("data/file_index")
        except (KeyError, ValueError) as error:
            raise DatasetError(f"{self.path / 'meta' / 'episodes'}: {error}") from error
        pairs = np.stack([chunks, numbers], axis=1)
        self._data_files, self._file_of = np.unique(pairs, axis=0, return_inverse=True)
        self._file_of = self._file_of.reshape(-1)
        first = np.full(len(self._data_files), np.iinfo(np.int64).max)
        np.minimum.at(first, self._file_of, self._starts)
        self._first_rows = first
        """Number, among all frames, of the first frame of each file."""

    def _column_of_episodes(self, name: str) -> np.ndarray:
        return np.asarray(self._episodes[name].to_numpy(), dtype=np.int64)

    def _fields(self) -> dict[Path, Field]:
        fields = {}
        for path, name in self._names.items():
            field = _field_of(name, self._features[name])
            fields[path] = field
            if name.split(".")[0] == "observation":
                fields.setdefault(("next", *path), field)
        for flag in _FLAGS:
            fields["next", flag] = Field("dense", (1,), torch.bool)
        return fields

    # ---- values ---------------------------------------------------------------------------------------

    def _flag(self, name: str, episodes: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return a flag of the ends of episodes: bool ``[N, 1]``."""
        said = {
            flag: self._values(("next", flag), episodes, steps).values.reshape(-1, 1)
            for flag in _FLAGS
            if ("next", flag) in self._names
        }
        no = np.zeros((len(steps), 1), dtype=bool)
        truncated, done = said.get("truncated", no), said.get("done", no)
        terminated = said.get("terminated", done & ~truncated)
        is_last = (steps == self._lengths[episodes] - 1)[:, None]
        truncated = truncated | (is_last & ~terminated)
        flags = {"terminated": terminated, "truncated": truncated}
        return flags.get(name, done | terminated | truncated)

    def _values(self, path: Path, episodes: np.ndarray, steps: np.ndarray) -> Any:
        """Read the steps of an entry of the files."""
        name = self._names[path]
        feature, field = self._features[name], self.schema.fields[path]
        if feature["dtype"] == "video":
            return DenseRows(self._frames(name, field, episodes, steps))
        rows = self._starts[episodes] + steps
        parts = [
            (places, _decoded(field, feature, array, self.path))
            for places, array in self._parts(name, self._file_of[episodes], rows)
        ]
        if field.dtype is None:
            texts = [""] * len(rows)
            for places, items in parts:
                for place, item in zip(places.tolist(), items, strict=True):
                    texts[place] = to_json_text(item)
            return TextRows(texts)
        values = np.empty((len(rows), *field.shape), dtype=array_dtype(field))
        for places, items in parts:
            values[places] = items
        return DenseRows(values)

    def _parts(
        self, name: str, files: np.ndarray, rows: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Iterate over the row groups with these rows: places in ``rows``, and their Arrow values."""
        for number in np.unique(files).tolist():
            chunk, index = self._data_files[number].tolist()
            template = self._info["data_path"]
            file = inside(self.path, template.format(chunk_index=chunk, file_index=index))
            source, ends = self._opened(file)
            places = np.flatnonzero(files == number)
            within = rows[places] - self._first_rows[number]
            if within.max() >= ends[-1]:
                raise ValueError(f"{file} has {ends[-1]} rows, and should have row {within.max()}.")
            groups = np.searchsorted(ends, within, side="right")
            for group in np.unique(groups).tolist():
                mine = groups == group
                first = ends[group - 1] if group else 0
                array = self._column(name, file, source, group)
                yield places[mine], array.take(self._arrow.array(within[mine] - first))

    def _column(self, name: str, file: FilePath, source: Any, group: int) -> Any:
        """Read a column of a row group, or return the one that was read last."""
        known, array = self._group.get(name, (None, None))
        if known != (file, group):
            try:
                table = source.read_row_group(group, columns=[name], use_threads=False)
                array = table[name].combine_chunks()
            except (OSError, ValueError, KeyError) as error:
                raise ValueError(f"{name!r} of {file}: {error}") from error
            array = getattr(array, "storage", array)
            self._group[name] = (file, group), array
        return array

    def _open(self, file: FilePath) -> tuple[Any, np.ndarray]:
        """Open a Parquet file; also return the numbers of rows up to the end of each row group."""
        try:
            source = self._parquet.ParquetFile(file, memory_map=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
        groups = source.metadata.num_row_groups
        return source, np.cumsum([source.metadata.row_group(g).num_rows for g in range(groups)])

    def _frames(
        self, name: str, field: Field, episodes: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        """Read frames of the videos of a camera."""
        values = np.empty((len(steps), *field.shape), dtype=np.uint8)
        where = {
            part: self._episodes[f"videos/{name}/{part}"].to_numpy()[episodes]
            for part in ("chunk_index", "file_index", "from_timestamp")
        }
        times = where["from_timestamp"] + steps / self._fps
        pairs = np.stack([where["chunk_index"], where["file_index"]], axis=1).astype(np.int64)
        for chunk, index in np.unique(pairs, axis=0).tolist():
            name_of = self._info["video_path"].format
            file = inside(self.path, name_of(video_key=name, chunk_index=chunk, file_index=index))
            places = np.flatnonzero((pairs == (chunk, index)).all(1))
            wanted, back = np.unique(times[places], return_inverse=True)
            for number, frame in enumerate(_frames_at(file, wanted.tolist(), self._fps)):
                values[places[back == number]] = _shaped(frame, field.shape)
        return values


def _paths_of(features: Mapping[str, Any]) -> dict[str, Path]:
    """Return the keys of the features that can be read."""
    paths: dict[str, Path] = {}
    for name, feature in features.items():
        info = feature.get("info") or {}
        if feature["dtype"] == "video" and (
            info.get("is_depth_map") or info.get("video.is_depth_map")
        ):
            _logger.warning("%r is a video of depths, which is not read.", name)
        elif name in _INDICES:
            paths[name] = (_INDICES[name],)
        elif name.startswith(_CAMERAS):
            paths[name] = ("observation", "image", name.removeprefix(_CAMERAS))
        else:
            paths[name] = tuple(name.split("."))
    taken = set(paths.values())
    for name, path in paths.items():
        # A key cannot have a value and parts.
        if any(path[:n] in taken for n in range(1, len(path))):
            paths[name] = (name,)
    return paths


def _field_of(name: str, feature: Mapping[str, Any]) -> Field:
    """Return the entry that a feature is read as."""
    shape = tuple(int(size) for size in feature.get("shape") or ())
    if feature["dtype"] in ("image", "video"):
        return Field("dense", shape, torch.uint8)
    try:
        dtype = dtype_of(feature["dtype"])
    except ValueError:
        return Field("object")
    return Field("dense", () if name in _INDICES else shape, dtype)


def _decoded(field: Field, feature: Mapping[str, Any], array: Any, root: FilePath) -> Any:
    """Convert Arrow values to an array ``[N, *shape]``, or a list of objects."""
    if field.dtype is None:
        return array.to_pylist()
    if feature["dtype"] == "image":
        library = import_extra("PIL.Image", "images")
        images = []
        for item in array.to_pylist():
            data = item["bytes"]
            if data is None:
                data = inside(root, item["path"]).read_bytes()
            with library.open(io.BytesIO(data)) as image:
                images.append(_shaped(np.asarray(image), field.shape))
        return np.stack(images)
    length = len(array)
    while hasattr(array, "flatten") and hasattr(array.type, "value_type"):
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False).astype(array_dtype(field))
    return values.reshape(length, *field.shape)


def _shaped(image: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Bring an image ``[H, W]`` or ``[H, W, C]`` to the shape of its feature."""
    if image.ndim == 2:
        image = image[:, :, None]
    if image.shape == shape:
        return image
    if image.transpose(2, 0, 1).shape == shape:
        return image.transpose(2, 0, 1)
    if image.shape[:2] == shape[:2] and shape[2:] in ((), (1,)):
        return image[:, :, 0].reshape(shape)
    raise ValueError(f"an image is {image.shape}, expected {shape}.")


def _frames_at(file: FilePath, times: list[float], fps: float) -> Iterator[np.ndarray]:
    """Iterate over the frames of a video at these times, in order.

    Args:
        file: the video.
        times: seconds, ascending.
        fps: frames per second.

    Raises:
        ValueError: if there is no frame at one of them, or the file cannot be read; names it.
    """
    av = import_extra("av", "video")
    near = 0.5 / fps
    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            frames: Iterator[Any] = iter(())
            before = -float("inf")
            for time in times:
                if time - before > _NEAR / fps:
                    container.seek(max(0, int((time - near) / stream.time_base)), stream=stream)
                    frames = container.decode(stream)
                frame = next((each for each in frames if each.time > time - near), None)
                if frame is None or frame.time > time + near:
                    raise ValueError(f"{file} has no frame at {time:.3f} s.")
                yield frame.to_ndarray(format="rgb24")
                before = time
    except (OSError, IndexError, av.FFmpegError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _detect(path: FilePath) -> bool:
    try:
        info = json.loads((path / _INFO).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(info, dict) and "codebase_version" in info


FORMAT = Format("lerobot", _Reader, None, _detect)
