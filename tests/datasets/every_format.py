"""The formats that the tests of all formats run with."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

LOSSLESS = ["hdf5", "folder", "arrow", "lance", "jsonl"]
ALL = [*LOSSLESS, "video"]
_SUFFIXES = {"hdf5": ".h5", "lance": ".lance", "jsonl": ".jsonl"}


def new_path(folder: Path, format: str, name: Any) -> Path:
    """A path that does not exist, with the usual suffix of the format."""
    return folder / f"{format}-{name}{_SUFFIXES.get(format, '')}"


def process_context(format: str) -> Any:
    """How processes start that use a format: Lance does not work in forks."""
    if format != "lance":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchrl_mt.datasets", "tests.datasets.test_kills"])
    return context
