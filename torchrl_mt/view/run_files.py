"""The files of a run's folder, read: numbers by step, and the facts of its start.

A step that was logged again counts once, with what was logged last; an incomplete last line is left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

__all__ = ["EPISODES", "FACTS", "METRICS", "Run", "flat_numbers", "read_run"]

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
    def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Steps ``[k]`` int64 and values ``[k]`` float64 of each number, by name."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for step, row in self.rows.items():
            for name, value in row.items():
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        return {
            name: (np.array(steps), np.array(values)) for name, (steps, values) in found.items()
        }

    def series(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """Get steps and values ``[k]`` of the first name that the run has; empty if it has none."""
        found = (self.columns[name] for name in names if name in self.columns)
        return next(found, (np.zeros(0, dtype=np.int64), np.zeros(0)))

    def growth(self, *names: str) -> np.ndarray:
        """Compute by how much the sum of counters grew in each step, ``[K]``.

        A counter that is not there has not grown; one that fell was begun anew, at 0.
        """
        total = np.zeros(len(self.rows))
        for name in names:
            steps, values = self.series(name)
            grown = np.diff(values, prepend=0.0)
            total[np.searchsorted(self.steps, steps)] += np.where(grown < 0, values, grown)
        return total

    def matching(self, pattern: str) -> dict[str, str]:
        """Find the names of a pattern; with what ``*`` is, one part: ``reward/*/mean``, or the rest."""
        rest = re.sub(r"\\\*$", "(.+)", re.escape(pattern))
        shape = re.compile(rest.replace(r"\*", "([^/]+)"), re.DOTALL)
        found = {name: shape.fullmatch(name) for name in sorted(self.columns)}
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


def flat_numbers(given: Any, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Iterate over the numbers of a nested dict or TensorDict, with their names joined by ``/``.

    Examples:
        >>> dict(flat_numbers({"a": {"b": 1, "c": "text"}, "d": torch.tensor(2.0)}))
        {'a/b': 1, 'd': 2.0}
    """
    for key, value in given.items():
        name = prefix + "/".join(map(str, key if isinstance(key, tuple) else (key,)))
        if isinstance(value, (Mapping, TensorDictBase)):
            yield from flat_numbers(value, f"{name}/")
            continue
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
            value = value.item()
        if isinstance(value, Real):
            yield name, int(value) if isinstance(value, Integral) else float(value)
