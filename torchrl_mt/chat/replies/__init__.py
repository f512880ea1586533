"""Replies as messages: what a model sampled, taken apart by its family's rule.

The text of a reply is everything that was sampled but the stop token. A reply of which a part cannot
be read is wholly plain content.
"""

from __future__ import annotations

from torchrl_mt.chat.replies.parsing import ReplyParser, parse_tool_calls
from torchrl_mt.chat.replies.reply import ParsedReply

__all__ = ["ParsedReply", "ReplyParser", "parse_tool_calls"]
