"""Shared by the benchmarks: medians of alternating contenders, and tables for screen and docs."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Part", "Row", "medians", "show"]

Row = tuple[str, ...]


class Part(NamedTuple):
    """One table."""

    header: Row
    widths: tuple[int, ...]
    """Widths of the columns, in per cent of the page."""
    rows: Callable[[argparse.Namespace], Iterable[Row]]


def medians(device: str, repeats: int, *contenders: Callable[[], object]) -> list[float]:
    """Median seconds of each; they alternate, so disturbances affect all."""
    times: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for contender, seconds in zip(contenders, times, strict=True):
            begin = time.perf_counter()
            contender()
            if device != "cpu":
                torch.cuda.synchronize(device)
            if turn:  # the first turn allocates and fills caches
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]


def show(parts: Iterable[Part], args: argparse.Namespace, rst: Path | None) -> None:
    """Print tables row by row, and write them for the documentation if asked to."""
    tables = []
    for part in parts:
        rows = []
        _print(part.header)
        for row in part.rows(args):
            _print(row)
            rows.append(row)
        print()
        tables.append(_as_rst(part, rows))
    if rst is not None:
        rst.write_text("\n".join(tables))


def _print(row: Row) -> None:
    """Print a row of a table."""
    first, *others = row
    print(f"{first:<56}" + "".join(f"{cell:>15}" for cell in others), flush=True)


def _as_rst(part: Part, rows: Iterable[Row]) -> str:
    """A table for the documentation."""
    widths = " ".join(map(str, part.widths))
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (part.header, *rows):
        lines += [f"   {'  -' if column else '* -'} {cell}" for column, cell in enumerate(row)]
    return "\n".join(lines) + "\n"
