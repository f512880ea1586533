"""Model families and their notations of replies, recognized by marks in the chat template.

For a new family, add an entry to the table, and a reader to ``notations.py`` if its notation is new.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.replies import notations as n
from torchrl_mt.chat.replies.reply import MalformedError, ParsedReply
from torchrl_mt.chat.replies.tool_calls import ToolTypes, make_call
from torchrl_mt.chat.special_tokens import special_tokens

__all__ = ["TURN_ENDS", "ReplyFamily", "family_of", "turn_ends"]

TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<end_of_turn>", "<turn|>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>"),
    *("<｜end▁of▁sentence｜>", "<|end_of_sentence|>", "<|endoftext|>", "<|observation|>"),
    *("<|user|>", "<|tool_response>"),
)
"""Tokens that end a turn and may differ from the tokenizer's ``eos_token``."""

_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Opening and closing marks of thoughts."""

_XML = (("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>"))

_NOTATIONS: tuple[tuple[str, tuple[str, ...], n.Read], ...] = (
    ("gemma 4", ("<|tool_call>",), n.gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    (
        "function gemma",
        ("<start_function_call>",),
        n.gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    (
        "deepseek 3.2",
        ("｜DSML｜",),
        n.elements(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
            ('<｜DSML｜parameter name="', '" string="', '">', "</｜DSML｜parameter>"),
        ),
    ),
    ("deepseek", ("<｜tool▁calls▁begin｜>",), n.deepseek),
    ("kimi", ("<|tool_calls_section_begin|>",), n.kimi),
    (
        "minimax",
        ("<minimax:tool_call>",),
        n.elements(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            ('<invoke name="', '">', "</invoke>"),
            ('<parameter name="', '">', "</parameter>"),
        ),
    ),
    (
        "glm",
        ("<arg_key>",),
        n.elements(
            "<tool_call>",
            "</tool_call>",
            None,
            ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    ),
    (
        "seed",
        ("<seed:tool_call>",),
        n.elements("<seed:tool_call>", "</seed:tool_call>", *_XML, lines=True),
    ),
    (
        "qwen xml",
        ("<tool_call>", "<function="),
        n.elements("<tool_call>", "</tool_call>", *_XML, lines=True),
    ),
    *(("cohere", (mark,), n.cohere) for mark in ("<|START_ACTION|>", "<|START_RESPONSE|>")),
    ("mistral", ("[TOOL_CALLS]",), n.mistral),
    ("lfm", ("<|tool_call_start|>",), n.python_block("<|tool_call_start|>", "<|tool_call_end|>")),
    ("phi", ("<|/tool_call|>",), n.json_calls("<|tool_call|>", "<|/tool_call|>")),
    ("granite", ("<|tool_call|>",), n.json_calls("<|tool_call|>", None)),
    ("nemotron", ("<TOOLCALL>",), n.json_calls("<TOOLCALL>", "</TOOLCALL>")),
    ("internlm", ("<|plugin|>",), n.json_calls("<|action_start|><|plugin|>", "<|action_end|>")),
    ("hermes", ("<tool_call>",), n.json_calls("<tool_call>", "</tool_call>")),
    ("olmo", ("<function_calls>",), n.python_block("<function_calls>", "</function_calls>")),
    ("llama 4", ("<|python_start|>",), n.llama_python),
    ("llama 3", ("<|eot_id|>", '"parameters": '), n.llama_json),
    ("llama 3", ("<|python_tag|>",), n.llama_json),
)
"""Name of the family, marks that the template must all have, reader. The first match counts."""


@dataclass(frozen=True)
class ReplyFamily:
    """The notation of replies of a model family."""

    name: str
    parse: Callable[[str, str, ToolTypes], ParsedReply]
    """Parses a text, given the end of the prompt and the tools' types."""
    tags: tuple[str, str] | None = None
    """Opening and closing marks of thoughts."""


def family_of(template: str) -> ReplyFamily:
    """Find the family whose marks a chat template has.

    Args:
        template: source of the template and the names of special tokens.

    Examples:
        >>> family_of("... <think> ... <tool_call> ...").name
        'hermes'
        >>> family_of("{{ message.content }}").name
        'plain'
    """
    if "<|channel|>" in template and "<|message|>" in template:
        return ReplyFamily("harmony", _harmony)
    tags = next((t for t in _THOUGHTS if t[1] in template or t[0].strip() in template), None)
    for name, marks, read in _NOTATIONS:
        if all(mark in template for mark in marks):
            return ReplyFamily(name, _with_thoughts(tags, read), tags)
    name = "plain" if tags is None else "thoughts"
    return ReplyFamily(name, _with_thoughts(tags, n.no_calls), tags)


def _with_thoughts(
    tags: tuple[str, str] | None, read: n.Read
) -> Callable[[str, str, ToolTypes], ParsedReply]:
    """Make a parser of thoughts, if the family has any, followed by content and calls."""

    def parse(text: str, before: str, types: ToolTypes) -> ParsedReply:
        thoughts, rest = (None, text) if tags is None else _split_thoughts(text, before, tags)
        content, calls = read(rest, types)
        if thoughts is not None:
            content = content.strip()
        return ParsedReply(content, thoughts, calls)

    return parse


def _split_thoughts(text: str, before: str, tags: tuple[str, str]) -> tuple[str | None, str]:
    """Split a text into thoughts and the rest.

    A closing mark is enough, since the prompt may have opened the thoughts.
    """
    opening, closing = (tag.strip() for tag in tags)
    inside = text.lstrip()
    if inside.startswith(opening):
        inside = inside[len(opening) :]
    elif not before.rstrip().endswith(opening):
        first, ended, _ = text.partition(closing)
        if not ended or opening in first:
            return None, text
    thoughts, _, rest = inside.partition(closing)
    return thoughts.strip(), rest


_END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>")


def _harmony(text: str, before: str, types: ToolTypes) -> ParsedReply:
    """Parse OpenAI's notation: messages on channels; thoughts are analysis, calls have a recipient."""
    if "<|message|>" not in text:
        return ParsedReply(text)
    said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    calls = []
    for part in filter(str.strip, _END_OF_MESSAGE.split(text)):
        header, begun, body = part.partition("<|message|>")
        if not begun:
            raise MalformedError(f"no message: {part[:80]!r}")
        if recipient := re.search(r"\bto=([^\s<]+)", header):
            calls.append(make_call(recipient[1].removeprefix("functions."), body))
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        if channel is None or channel[1] not in said:
            raise MalformedError(f"no channel: {header[:80]!r}")
        said[channel[1]].append(body)
    content = "\n".join(part.strip() for part in (*said["commentary"], *said["final"]))
    thoughts = "\n".join(map(str.strip, said["analysis"])) if said["analysis"] else None
    return ParsedReply(content, thoughts, calls)


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of a tokenizer's tokens that end a turn.

    Examples:
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> turn_ends(tiny_chat_tokenizer("hello"))
        {'<end>'}
    """
    ends = {tokenizer.eos_token, *special_tokens(tokenizer).intersection(TURN_ENDS)}
    return {str(end) for end in ends if end is not None}
