"""Where rows of conversations come from: files, folders, tables and iterables, as one sequence of rows.

A source with several splits is refused, since a row does not tell its split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.datasets._files.episode_folder import format_in
from torchrl_mt.datasets._files.episode_lines import checked_line
from torchrl_mt.datasets.dataset import EpisodeDataset
from torchrl_mt.transforms.episode_entries import dialogue_of_rows

__all__ = ["filled_columns", "rows_of"]


def rows_of(source: Any) -> Any:
    """Return a sequence of rows.

    Args:
        source: see :class:`~torchrl_mt.datasets.ConversationDataset`.

    Raises:
        TypeError: if it is none of what it may be.
        ValueError: if a file is damaged or of another kind, or a folder has several splits.
        FileNotFoundError: if there is no file or folder at the path.
        ImportError: if it needs a package that is not installed.
    """
    if isinstance(source, (str, Path)):
        return _rows_at(Path(source).expanduser())
    if isinstance(source, Mapping):
        raise TypeError(
            "source must be one data set, got a mapping with the keys "
            f"{sorted(map(str, source))}: choose a split, such as source['train']."
        )
    if hasattr(source, "iloc"):
        raise TypeError(
            "source must be a datasets.Dataset, an iterable of rows or a path, got a "
            f"{type(source).__name__} of pandas: give datasets.Dataset.from_pandas(source)."
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return source
    if isinstance(source, Iterable):
        return list(source)
    raise TypeError(
        "source must be a datasets.Dataset, an iterable of rows or a path, got "
        f"{type(source).__name__}."
    )


def filled_columns(source: Any) -> dict[str, bool]:
    """Whether Arrow fills in the structs of a column with ``None``, by its name, as far as it is known.

    It does not fill in text and values of the type ``Json``.

    Args:
        source: a ``datasets.Dataset``, or a ``Subset`` of one; anything else is not known.
    """
    while source is not None and not isinstance(getattr(source, "features", None), Mapping):
        source = getattr(source, "dataset", None)
    features = {} if source is None else source.features
    types = {name: repr(_of_calls(features[name])) for name in features}
    return {name: "{" in of_calls and "Json(" not in of_calls for name, of_calls in types.items()}


def _of_calls(feature: Any) -> Any:
    """The type of the tool calls in a column of messages; that of the column if it has none."""
    inner = feature
    while inner is not None and not isinstance(inner, Mapping):
        inner = inner[0] if isinstance(inner, list) else getattr(inner, "feature", None)
    return feature if inner is None else inner.get("tool_calls", feature)


class _JsonLines(Sequence):
    """The lines of a file, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        starts, start = [], 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(start)
                start += len(line)
        self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            return checked_line(line)
        except ValueError as error:
            raise ValueError(f"a line of {self.path} must be JSON, but {error}.") from error


class _Dialogues(Sequence):
    """The dialogues of a data set of episodes, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._episodes = EpisodeDataset(path, keys=["text"])
        except KeyError as error:
            raise ValueError(
                f"source must have messages, but the episodes at {path} have no entry 'text'."
            ) from error

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, index: Any) -> Any:
        episode = self._episodes.episode(index)
        dialogues = dialogue_of_rows(episode, [0] * len(episode), [0])
        tools = self._episodes.metadata(index).get("tools")
        messages = None if dialogues is None else dialogues.tolist()[0]
        return {"messages": messages, "tools": tools if isinstance(tools, list) else None}


def _rows_at(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"source must be a file or a folder, but there is none at {path}.")
    if path.suffix in (".jsonl", ".ndjson"):
        return _JsonLines(path)
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"source must be a file of JSON, but {path} is not: {error}. If it has one JSON value "
                "per line, name it .jsonl."
            ) from error
        if not isinstance(rows, list):
            raise ValueError(f"{path} must be a JSON list of rows, got {type(rows).__name__}.")
        return rows
    if path.is_dir() and format_in(path) is not None:
        return _Dialogues(path)
    datasets = import_extra("datasets", "arrow")
    if path.is_dir() and (path / "dataset_info.json").exists():
        return datasets.load_from_disk(str(path))
    if (path / "dataset_dict.json").exists():
        splits = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise ValueError(
            f"source must be one data set, but {path} has the splits {splits}: choose one, such as "
            f"{str(path / splits[0]) if splits else path!r}."
        )
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or any(file.suffix != ".parquet" for file in files):
        raise ValueError(
            "source must be a .jsonl, .json or .parquet file, or a folder of Parquet files, of "
            f"Dataset.save_to_disk or of open_episodes, got {path}."
        )
    if path.is_dir():
        splits = list(map(str, datasets.data_files.get_data_patterns(str(path))))
        if len(splits) > 1:
            raise ValueError(
                f"source must be one data set, but the files in {path} are of the splits {splits}: "
                f"choose one, such as datasets.load_dataset({str(path)!r}, split={splits[0]!r})."
            )
    parquet = import_extra("pyarrow.parquet", "arrow")
    # Reading them through load_dataset would leave copies in its cache.
    tables = []
    for file in files:
        try:
            tables.append(datasets.Dataset(datasets.table.InMemoryTable(parquet.read_table(file))))
        except (ValueError, OSError) as error:
            raise ValueError(
                f"source must have whole Parquet files, but {file} cannot be read: {error}"
            ) from error
    return datasets.concatenate_datasets(tables)
