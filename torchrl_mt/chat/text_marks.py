"""Marks in the texts of messages: where a chat template writes which message.

A text is rendered once more with marks in it. They count only if the rendering is the same otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_mt.chat.replies.reply import THOUGHT_FIELDS

__all__ = ["BLOCK_BEGIN", "BLOCK_END", "OPENING", "TextMarks", "with_marks"]

BLOCK_BEGIN, BLOCK_END = "\ufdd3", "\ufdd4"
"""Marks around the template's own blocks; noncharacters of Unicode, as all marks."""
_MARK = re.compile(f"\ufdd1([0-9]+)\ufdd2|([{BLOCK_BEGIN}{BLOCK_END}])")
_THOUGHT_TAGS = re.compile(r"</?think>|\[/?THINK\]")
"""Templates look for these in the content, so no mark may touch them."""
OPENING = re.compile(rf"\s*((?:(?:{_THOUGHT_TAGS.pattern})\s*)*)")
"""Matches the tags at the beginning of a content, which have no marks."""


def with_marks(
    message: Mapping[str, Any], i: int, owners: list[tuple[int, bool]]
) -> dict[str, Any]:
    """A message with marks in its texts; the number of each mark is its place in ``owners``.

    They get the message's index, and whether it is a mark of the name of a call.
    """

    def around(text: Any, *, is_name: bool = False) -> Any:
        def mark() -> str:
            owners.append((i, is_name))
            return f"\ufdd1{len(owners) - 1}\ufdd2"

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
        function["name"] = around(function.get("name"), is_name=True)
        calls[-1] = {**calls[-1], "function": function} if "function" in calls[-1] else function
        out["tool_calls"] = calls
    return out


@dataclass
class TextMarks:
    """Positions of the texts of messages and of the template's blocks, in characters."""

    texts: list[tuple[int, bool, int | None]]
    """For each mark: the index of its message, whether it is of the name of a call, which templates may
    write as a part of ids, and its position, if the template has kept it."""
    blocks: list[tuple[int, int]]

    @classmethod
    def found(
        cls, marked: str, text: str, owners: list[tuple[int, bool]], *, has_blocks: bool
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
        texts = [(*owner, places.get(mark)) for mark, owner in enumerate(owners)]
        return cls(texts, list(zip(edges[::2], edges[1::2], strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[TextMarks]) -> TextMarks:
        """Marks of several renderings as one; the blocks of the first."""
        return cls([text for part in parts for text in part.texts], parts[0].blocks)

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
            for owner, _, at in self.texts
            if owner != i and at is not None and at >= after + (owner < i)
        )
        return min(others, default=default)

    def dropped(self, i: int) -> bool:
        """Whether the template has dropped a text of message ``i``."""
        return any(owner == i and at is None and not is_name for owner, is_name, at in self.texts)

    def lost(self) -> set[int]:
        """The messages with marks of which the template has kept none."""
        kept = {owner for owner, _, at in self.texts if at is not None}
        return {owner for owner, _, _ in self.texts} - kept

    def _of(self, i: int) -> list[int]:
        return [at for owner, _, at in self.texts if owner == i and at is not None]
