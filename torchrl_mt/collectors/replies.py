"""Names of :mod:`torchrl_mt.chat.replies`, under their earlier path."""

from torchrl_mt.chat.replies import ParsedReply, ReplyParser, parse_tool_calls

__all__ = ["ParsedReply", "ReplyParser", "parse_tool_calls"]
