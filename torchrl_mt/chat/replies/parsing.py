"""Parse a model's reply with the tokenizer's response template or by its family's notation.

Parsing never raises: a malformed reply becomes plain content.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.encoding import decode
from torchrl_mt.chat.replies.families import TURN_ENDS, family_of
from torchrl_mt.chat.replies.reply import THOUGHT_FIELDS, MalformedError, ParsedReply
from torchrl_mt.chat.replies.tool_calls import ToolTypes, as_calls
from torchrl_mt.chat.special_tokens import special_tokens
from torchrl_mt.strict_json import check_json

__all__ = ["ParseReply", "ReplyParser", "parse_tool_calls"]

ParseReply: TypeAlias = Callable[[str], ParsedReply]
"""A parser of a reply's text, special tokens included, without the stop token."""


def parse_tool_calls(
    text_or_ids: str | Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    tools: Iterable[Any] | None = None,
    *,
    prefix: str | None = None,
) -> ParsedReply:
    """Parse a reply into content, reasoning and tool calls.

    Uses the tokenizer's response template if transformers supports it, else the notation of the model
    family, which is recognized by marks in the chat template.

    Args:
        text_or_ids: the reply as text, special tokens included, or as token ids; with or without the
            stop token.
        tokenizer: the model's tokenizer.
        tools: the tools that the model was offered (JSON schemas or functions); arguments written
            without quotes get the types that a tool declares.
        prefix: the end of the prompt, which may open the thoughts. Without it, thoughts are recognized
            by their closing mark.

    Returns:
        The reply; all of it is plain content if a part is malformed.

    Examples:
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> tokenizer = tiny_chat_tokenizer("hello")
        >>> tokenizer.chat_template += "{# <tool_call> #}"
        >>> reply = parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', tokenizer)
        >>> reply.tool_calls
        [{'type': 'function', 'function': {'name': 'f', 'arguments': {}}}]
        >>> parse_tool_calls("<tool_call>{", tokenizer).content
        '<tool_call>{'
    """
    text = text_or_ids if isinstance(text_or_ids, str) else decode(tokenizer, text_or_ids)
    for end in (tokenizer.eos_token, *TURN_ENDS):
        if end and text.endswith(end):
            text = text[: -len(end)]
            break
    return ReplyParser(tokenizer, tools).parse(text, prefix)


class ReplyParser:
    """Parses the replies of one model.

    Args:
        tokenizer: the model's tokenizer.
        tools: the tools that the model was offered (JSON schemas or functions).
        parse: parses the text of a reply instead of the tokenizer or the family.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Iterable[Any] | None = None,
        parse: ParseReply | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._parse = parse
        self._tools = None if tools is None else list(tools)
        self._types = ToolTypes(self._tools)
        template = tokenizer.chat_template or ""
        sources = [template] if isinstance(template, str) else [*template.values()]
        self._family = family_of("\n".join([*sources, *sorted(special_tokens(tokenizer))]))

    @property
    def family(self) -> str:
        """Name of the model family."""
        return self._family.name

    def parse(self, text: str, prefix: str | None) -> ParsedReply:
        """Parse a reply.

        Args:
            text: the reply, special tokens included, without the stop token.
            prefix: the end of the prompt; ``None`` if unknown.
        """
        try:
            if self._parse is not None:
                reply = _parse_by(self._parse, text)
            elif self._host() is not None:
                known = _generation_prompt(self._tokenizer) if prefix is None else prefix
                reply = self._parse_by_host(text, known)
            else:
                reply = self._family.parse(text, prefix or "", self._types)
            check_json(reply.tool_calls)
            return reply
        except (ValueError, RecursionError, MemoryError):
            return ParsedReply(text)

    def opened_by(self, prefix: str) -> str:
        """The end of a prompt that opens the thoughts; empty if it opens none."""
        opening = self._family.tags[0].strip() if self._family.tags else None
        if opening is None or not prefix.rstrip().endswith(opening):
            return ""
        return prefix[prefix.rindex(opening) :]

    def is_closed_by(self, prefix: str) -> bool:
        """Whether a prompt ends with the closing mark of thoughts."""
        tags = self._family.tags
        return tags is not None and prefix.rstrip().endswith(tags[1].strip())

    def _host(self) -> Any:
        """The tokenizer's response template, or its schema in earlier releases of transformers."""
        if not hasattr(self._tokenizer, "parse_response"):
            return None
        template = getattr(self._tokenizer, "response_template", None)
        return template or getattr(self._tokenizer, "response_schema", None)

    def _parse_by_host(self, text: str, prefix: str) -> ParsedReply:
        known = inspect.signature(self._tokenizer.parse_response).parameters
        given: dict[str, Any] = {"prefix": prefix, "tools": self._tools}
        try:
            found = self._tokenizer.parse_response(
                text, **{name: value for name, value in given.items() if name in known}
            )
        except Exception as error:  # Any error: the rules come with the model.
            raise MalformedError(str(error)) from error
        if not isinstance(found, Mapping):
            raise MalformedError(f"no message: {type(found).__name__}")
        content = found.get("content") or ""
        thoughts = next((found[name] for name in THOUGHT_FIELDS if name in found), None)
        calls = as_calls(list(found.get("tool_calls") or []))
        if not isinstance(content, str) or not isinstance(thoughts, str | None):
            raise MalformedError("content and thoughts must be text")
        if not content and thoughts is None and not calls:
            return ParsedReply(text)  # transformers drops text that matches no rule.
        return ParsedReply(content, thoughts, calls)


def _parse_by(parse: ParseReply, text: str) -> ParsedReply:
    """Parse by a user's function.

    Raises:
        MalformedError: if it raises, or a call is none.
        TypeError: if it returns anything but a :class:`ParsedReply`.
    """
    try:
        reply = parse(text)
    except Exception as error:
        raise MalformedError(str(error)) from error
    if not isinstance(reply, ParsedReply):
        raise TypeError(
            "a parser of replies must return a torchrl_mt.chat.ParsedReply(content, tool_calls=["
            f"{{'name': ..., 'arguments': {{...}}}}]), got {type(reply).__name__}."
        )
    return ParsedReply(reply.content, reply.reasoning, as_calls(reply.tool_calls))


def _generation_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt by the chat template, ending with its generation prompt; empty if it fails."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True
            )
        )
    except Exception:  # There is no template, or it refuses this dialogue.
        return ""
