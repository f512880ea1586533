"""The names of :mod:`torchrl_mt.chat.replies`, where they were before."""

from torchrl_mt.chat.replies import ParsedReply, ReplyParser, parse_tool_calls

__all__ = ["ParsedReply", "ReplyParser", "parse_tool_calls"]
