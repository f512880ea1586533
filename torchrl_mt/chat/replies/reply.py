"""A parsed reply: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["THOUGHT_FIELDS", "MalformedError", "ParsedReply"]

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates, tokenizers and data sets have thoughts."""


class MalformedError(ValueError):
    """A part of a reply cannot be parsed."""


@dataclass(frozen=True)
class ParsedReply:
    """A parsed reply of the model.

    Examples:
        >>> ParsedReply("4", reasoning="2 + 2").message()
        {'role': 'assistant', 'content': '4', 'reasoning_content': '2 + 2'}
    """

    content: str
    """The content; the whole text if the reply has no other parts."""
    reasoning: str | None = None
    """The thoughts; ``None`` if there are none, ``""`` if they are empty."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls in the form of chat templates: ``{"type": "function", "id": ..., "function": {"name": ...,
    "arguments": {...}}}``; with ``"id"`` only if the model wrote one. A parser of your own may give
    ``{"name": ..., "arguments": {...}}``."""

    def message(self) -> dict[str, Any]:
        """The chat message, with ``reasoning_content`` and ``tool_calls`` if there are any."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def is_kept_by(self, written: ParsedReply, *, reasoning: bool = True) -> bool:
        """Whether another reply has the same content, calls and thoughts.

        Outer white space, ids of calls, and empty thoughts instead of none are no difference.

        Args:
            written: the reply to compare with.
            reasoning: whether the thoughts must be the same.
        """
        thoughts = tuple(r.reasoning and r.reasoning.strip() for r in (self, written))
        if reasoning and thoughts[0] != thoughts[1] and thoughts != (None, ""):
            return False
        calls, others = ([c["function"] for c in r.tool_calls] for r in (self, written))
        return self.content.strip() == written.content.strip() and calls == others
