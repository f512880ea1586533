"""What a model said, taken apart: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MalformedError", "ParsedReply"]


class MalformedError(ValueError):
    """A part of a reply cannot be read."""


@dataclass(frozen=True)
class ParsedReply:
    """A reply of the model, as a chat message has it.

    Examples:
        >>> ParsedReply("4", reasoning="2 + 2").message()
        {'role': 'assistant', 'content': '4', 'reasoning_content': '2 + 2'}
    """

    content: str
    """What it says; the whole text where the reply has no other parts."""
    reasoning: str | None = None
    """What it thought before; ``None`` if there are no thoughts, ``""`` if they are empty."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls as chat templates take them: ``{"type": "function", "id": ..., "function": {"name": ...,
    "arguments": {...}}}``; ``"id"`` only where the model wrote one."""

    def message(self) -> dict[str, Any]:
        """The chat message, with ``reasoning_content`` and ``tool_calls`` only where there are such."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def is_kept_by(self, written: ParsedReply, *, reasoning: bool = True) -> bool:
        """Whether another reply has all parts of this one and no others.

        Outer white space and the ids of calls do not count, nor do empty thoughts in place of none.

        Args:
            written: the reply to compare with.
            reasoning: whether the thoughts must agree too.
        """
        thoughts = tuple(r.reasoning and r.reasoning.strip() for r in (self, written))
        if reasoning and thoughts[0] != thoughts[1] and thoughts != (None, ""):
            return False
        calls, others = ([c["function"] for c in r.tool_calls] for r in (self, written))
        return self.content.strip() == written.content.strip() and calls == others
