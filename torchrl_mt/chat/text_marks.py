"""Marks in the texts of messages: where a chat template writes which message.

A text is rendered once more with marks in it. They count only if the rendering is the same otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_mt.chat.assistant_messages import THOUGHT_FIELDS

__all__ = ["BLOCK_BEGIN", "BLOCK_END", "OPENING", "TextMarks", "with_marks"]

BLOCK_BEGIN, BLOCK_END = "\ufdd3", "\ufdd4"
"""Marks around the template's own blocks; noncharacters of Unicode, as all marks."""
_MARK = re.compile(f"\ufdd1([0-9]+)\ufdd2|([{BLOCK_BEGIN}{BLOCK_END}])")
_THOUGHT_TAGS = re.compile(r"</?think>|\[/?THINK\]")
"""Templates look for these in the content, so no mark may touch them."""
OPENING = re.compile(rf"\s*((?:(?:{_THOUGHT_TAGS.pattern})\s*)*)")
"""Matches the tags at the beginning of a content, which have no marks."""


def with_marks(
    message: Mapping[str, Any], i: int, owners: list[int], names: set[int]
) -> dict[str, Any]:
    """A message with marks in its texts; the number of each mark is its place in ``owners``.

    Marks of the names of calls are added to ``names``.
    """

    def mark() -> str:
        owners.append(i)
        return f"\ufdd1{len(owners) - 1}\ufdd2"

    def around(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        pieces = _THOUGHT_TAGS.split(text)
        tags = [*(tag.group() for tag in _THOUGHT_TAGS.finditer(text)), ""]
        out = ""
        for piece, tag in zip(pieces, tags, strict=True):
            words = piece.strip()
            before, _, after = piece.partition(words) if words else (piece, "", "")
            out += f"{before}{mark()}{words}{mark()}{after}{tag}" if words else piece + tag
        return out

    out = dict(message)
    for name in ("content", *THOUGHT_FIELDS):
        if name in out:
            out[name] = around(out[name])
    if message.get("role") == "assistant" and message.get("tool_calls"):
        calls = [dict(call) for call in message["tool_calls"]]
        function = dict(calls[-1].get("function", calls[-1]))
        texts = len(owners)
        function["name"] = around(function.get("name"))
        names.update(range(texts, len(owners)))
        calls[-1] = {**calls[-1], "function": function} if "function" in calls[-1] else function
        out["tool_calls"] = calls
    return out


@dataclass
class TextMarks:
    """Positions of the texts of messages and of the template's blocks, in characters."""

    owners: list[int]
    """Index of the message of each mark."""
    names: set[int]
    """Marks of the names of calls, which templates may write as a part of ids."""
    places: dict[int, int]
    """Position of each mark that the template has kept."""
    blocks: list[tuple[int, int]]

    @classmethod
    def found(
        cls, marked: str, text: str, owners: list[int], names: set[int], *, has_blocks: bool
    ) -> TextMarks | None:
        """The marks in a text; ``None`` if it differs from ``text`` by more than them."""
        places: dict[int, int] = {}
        edges: list[int] = []
        removed = 0
        for mark in _MARK.finditer(marked):
            at = mark.start() - removed
            removed += len(mark.group())
            if mark.group(1) is not None:
                places.setdefault(int(mark.group(1)), at)
            else:
                edges.append(at)
        if _MARK.sub("", marked) != text or (edges and not has_blocks) or len(edges) % 2:
            return None
        return cls(owners, names, places, list(zip(edges[::2], edges[1::2], strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[TextMarks]) -> TextMarks:
        """Marks of several renderings as one; the blocks of the first."""
        owners = [owner for part in parts for owner in part.owners]
        starts = [sum(len(part.owners) for part in parts[:k]) for k in range(len(parts))]
        places = {
            start + mark: at
            for start, part in zip(starts, parts, strict=True)
            for mark, at in part.places.items()
        }
        names = {
            start + mark for start, part in zip(starts, parts, strict=True) for mark in part.names
        }
        return cls(owners, names, places, parts[0].blocks)

    def first(self, i: int) -> int | None:
        """Where the first text of message ``i`` begins; ``None`` if it is not known."""
        return min(self._of(i), default=None)

    def last(self, i: int, bound: float = math.inf) -> int | None:
        """Where the last text of message ``i`` before ``bound`` ends; ``None`` if it is not known."""
        return max((at for at in self._of(i) if at <= bound), default=None)

    def next(self, i: int, after: int, default: int) -> int:
        """Where the first text of another message begins."""
        others = (
            at
            for mark, at in self.places.items()
            if at >= after + (self.owners[mark] < i) and self.owners[mark] != i
        )
        return min(others, default=default)

    def dropped(self, i: int) -> bool:
        """Whether the template has dropped a text of message ``i``."""
        return any(
            owner == i and mark not in self.places and mark not in self.names
            for mark, owner in enumerate(self.owners)
        )

    def lost(self) -> set[int]:
        """The messages with marks of which the template has kept none."""
        return set(self.owners).difference(self.owners[mark] for mark in self.places)

    def _of(self, i: int) -> list[int]:
        return [at for mark, at in self.places.items() if self.owners[mark] == i]
