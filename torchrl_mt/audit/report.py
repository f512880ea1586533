"""What an audit found: of each check whether it passed, and the first place where it did not.

A check that lacks what it needs says so: it has not passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchrl_mt.audit.rows import Rows

__all__ = ["AuditReport", "Finding", "Place", "finding", "not_checked"]

_NOT_CHECKED = "not checked: "


@dataclass(frozen=True)
class Place:
    """A token of a row."""

    row: int
    """The row; of ``sampled``, if the check counts the sampler's tokens."""
    episode: int | None
    turn: int | None
    token: int
    """Its index in the row, padding not counted."""
    token_id: int
    text: str | None = None
    """The token's text; ``None`` without a tokenizer."""

    def __str__(self) -> str:
        """One line, without what is not known."""
        names = ("row", "episode", "turn", "token")
        known = [
            f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None
        ]
        return f"{', '.join(known)}: {self.token_id if self.text is None else repr(self.text)}"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """Name of the check."""
    ok: bool | None
    """Whether it passed; ``None`` if it was not checked, or counts what is no fault by itself."""
    count: int
    """Number of places."""
    text: str
    """What was counted, or why it was not checked."""
    first: Place | None = None
    """The first place."""

    def __str__(self) -> str:
        """A line of the table, and a second one for the first place."""
        why = self.text.removeprefix(_NOT_CHECKED)
        unknown = "noted" if why == self.text else "not checked"
        status = unknown if self.ok is None else "passed" if self.ok else "failed"
        count = "" if status == "not checked" else self.count
        line = f"{status:13}{self.check:21}{count:>7}  {why}"
        return line if self.first is None else f"{line}\n{'':43}first: {self.first}"


@dataclass(frozen=True)
class AuditReport:
    """All findings of an audit; ``str(report)`` is a table."""

    findings: tuple[Finding, ...]
    """In the order of the checks."""

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(found.ok is not False for found in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def finding(
    check: str, rows: Rows, bad: np.ndarray, text: str, *, ok: bool | None = False
) -> Finding:
    """Make a finding of the places where a check failed: it passed if there are none.

    Args:
        check: its name.
        rows: the rows.
        bad: ``[M]`` bool.
        text: what the places are.
        ok: the result if there are places; ``None`` if they are no fault by themselves.
    """
    if not bad.any():
        return Finding(check, None if ok is None else True, 0, text)
    k = bad.argmax()
    turn = None if rows.turn is None else int(rows.turn[k])
    episode = None if rows.episode is None else int(rows.episode[rows.row[k]])
    first = Place(int(rows.row[k]), episode, turn, int(rows.token[k]), int(rows.id[k]))
    return Finding(check, ok, int(bad.sum()), text, first)


def not_checked(check: str, why: str) -> Finding:
    """Make the finding of a check that lacks what it needs."""
    return Finding(check, None, 0, _NOT_CHECKED + why)
