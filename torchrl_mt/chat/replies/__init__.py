"""Replies of models, parsed into content, reasoning and tool calls."""

from __future__ import annotations

from torchrl_mt.chat.replies.parsing import ParseReply, ReplyParser, parse_tool_calls
from torchrl_mt.chat.replies.reply import ParsedReply

__all__ = ["ParseReply", "ParsedReply", "ReplyParser", "parse_tool_calls"]
