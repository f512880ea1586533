"""The files of a run's folder, read: numbers by step, and the facts of its start.

A step that was logged again counts once, with what was logged last; an incomplete last line is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

__all__ = ["EPISODES", "FACTS", "METRICS", "Run", "read_run", "replace_file"]

METRICS = "metrics.jsonl"
FACTS = "run.json"
EPISODES = "episodes"
RESERVED = ("step", "session", "time")
"""Fields of a line that are no metrics."""


@dataclass(frozen=True)
class Run:
    """The numbers and facts of a run, as they lie in its folder."""

    folder: Path
    facts: Mapping[str, Any]
    """What ``run.json`` holds."""
    rows: Mapping[int, Mapping[str, float]]
    """The numbers of each step, by name, in the order of steps."""

    @cached_property
    def steps(self) -> np.ndarray:
        """The logged steps ``[K]`` int64, ascending."""
        return np.array(list(self.rows), dtype=np.int64)

    @cached_property
    def names(self) -> set[str]:
        """The names of all numbers."""
        return {name for row in self.rows.values() for name in row}

    def series(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """Get steps and values ``[k]`` of the first name that the run has; empty if it has none."""
        for name in names:
            if name in self.names:
                found = [(step, row[name]) for step, row in self.rows.items() if name in row]
                steps, values = zip(*found, strict=True)
                return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)
        return np.zeros(0, dtype=np.int64), np.zeros(0)

    def growth(self, *names: str) -> np.ndarray:
        """Compute by how much the sum of counters grew in each step, ``[K]``.

        A counter that is not there has not grown; one that fell was begun anew, at 0.
        """
        total = np.zeros(len(self.rows))
        for name in names:
            last = 0.0
            for i, row in enumerate(self.rows.values()):
                now = row.get(name, last)
                total[i] += now - last if now >= last else now
                last = now
        return total

    def matching(self, pattern: str) -> dict[str, str]:
        """Find the names of a pattern; with what ``*`` is, one part: ``reward/*/mean``, or the rest."""
        rest = re.sub(r"\\\*$", "(.+)", re.escape(pattern))
        shape = re.compile(rest.replace(r"\*", "([^/]+)"), re.DOTALL)
        found = {name: shape.fullmatch(name) for name in sorted(self.names)}
        return {name: "".join(match.groups()) for name, match in found.items() if match}

    @property
    def pages(self) -> dict[int, Path]:
        """The pages of episodes, by step."""
        found = (self.folder / EPISODES).glob("*.html")
        return dict(sorted((int(path.stem), path) for path in found if path.stem.isdecimal()))


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the folder of a :class:`~torchrl_mt.view.RunLog`, also while it is written.

    Raises:
        FileNotFoundError: if it is no folder of a run.
        ValueError: if one of its files is damaged; names the line.
    """
    folder = Path(folder).expanduser()
    try:
        facts = json.loads((folder / FACTS).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"folder must be that of a RunLog, got {str(folder)!r}, which has no {FACTS}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder / FACTS} is damaged: {error}.") from error
    path, rows = folder / METRICS, dict[int, tuple[float, dict[str, float]]]()
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = {name: float(value) for name, value in json.loads(line).items()}
            step, session, _ = (row.pop(name) for name in RESERVED)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged at line {number}: {error!r}.") from error
        before = rows.get(int(step), (session, {}))
        # Several lines of one session belong together; those of a session that was cut off do not.
        rows[int(step)] = session, (before[1] if before[0] == session else {}) | row
    return Run(folder, facts, {step: rows[step][1] for step in sorted(rows)})


def replace_file(path: Path, content: bytes) -> Path:
    """Write a file; an error leaves what was there. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
