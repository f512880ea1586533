"""Chat: from messages to tokens without drift, and from sampled tokens back to messages."""

from torchrl_mt.chat.replies import ParsedReply, parse_tool_calls
from torchrl_mt.chat.replies.families import turn_ends
from torchrl_mt.chat.tokens import Answer, ChatTokens

__all__ = ["Answer", "ChatTokens", "ParsedReply", "parse_tool_calls", "turn_ends"]
