"""How a chat template lays out answers, and the forms of messages that it reads.

Both are found by trial, on short dialogues.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.assistant_messages import (
    name_tool_results,
    trial_call,
    with_call_ids,
)
from torchrl_mt.chat.replies.families import turn_ends
from torchrl_mt.chat.replies.reply import THOUGHT_FIELDS, ParsedReply
from torchrl_mt.chat.special_tokens import SpecialTokenNames
from torchrl_mt.chat.template import USER, ChatTemplate, common_length
from torchrl_mt.chat.text_marks import BLOCK_BEGIN, BLOCK_END

__all__ = ["AnswerLayout", "as_template_reads", "completed", "find_layout"]

Message = Mapping[str, Any]

_BLOCK = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_OF_BLOCK = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")


@dataclass
class AnswerLayout:
    """How a template lays out answers."""

    source: str
    prompt: str
    """The generation prompt."""
    header: str
    """The part of the generation prompt that precedes answers anywhere in a dialogue."""
    gap: str
    """White space between the generation prompt and the content."""
    closing: str
    """The end of a turn after its content, up to the last special token."""
    ends: re.Pattern[str]
    """Matches the tokens that end a turn."""
    special: re.Pattern[str]
    """Matches all special tokens."""
    names: SpecialTokenNames
    """Names of the tokens that end a turn or begin an answer."""
    thoughts: str | None
    """The template's field for thoughts."""
    arguments: type | None
    """Type that arguments of calls must have; ``None`` if the template takes text and mappings."""
    family: str
    marked: str = field(repr=False)
    """The template with marks around its ``{% generation %}`` blocks."""

    @property
    def has_blocks(self) -> bool:
        """Whether the template says itself what is trained."""
        return self.marked != self.source


def find_layout(
    tokenizer: PreTrainedTokenizerBase, special: SpecialTokenNames, source: str
) -> AnswerLayout:
    """Find how a template lays out answers.

    Args:
        tokenizer: the tokenizer.
        special: the names of its special tokens.
        source: the template.

    Raises:
        ValueError: if it does not write the assistant's content, or refuses the shortest dialogues.
    """
    template = ChatTemplate(tokenizer, source=source)
    word = "ANSWER-OF-THE-ASSISTANT"
    asked = template.render(template.question)
    unasked = template.render(template.question, add_generation_prompt=False)
    answered = [*template.question, {"role": "assistant", "content": word}]
    last = template.render(answered, add_generation_prompt=False)
    earlier = template.renders([*answered, USER]) or last
    start = common_length(unasked, asked)
    prompt = asked[start:]
    known = max(min(common_length(asked, text) for text in (last, earlier)) - start, 0)
    # The header ends with whole tokens.
    split = (name.start() for name in special.pattern.finditer(prompt) if name.end() > known)
    header = prompt[: min(known, next(split, known))]
    between = last[len(asked) : last.find(word)] if last.startswith(asked) else ""
    stops = [name.end() for name in special.pattern.finditer(template.closing)]
    closing = template.closing[: stops[-1]] if stops else template.closing
    ends = turn_ends(tokenizer) | {*special.pattern.findall(closing)}
    return AnswerLayout(
        source=source,
        prompt=prompt,
        header=header,
        gap="" if between.strip() else between,
        closing=closing,
        ends=re.compile("|".join(map(re.escape, sorted(ends)))),
        special=special.pattern,
        names=SpecialTokenNames(tokenizer, {*ends, *special.pattern.findall(header)}),
        thoughts=template.answers.thought_field,
        arguments=_argument_type(template),
        family=template.parser.family,
        marked=_with_marked_blocks(source),
    )


def _argument_type(template: ChatTemplate) -> type | None:
    """Type that the arguments of calls must have; ``None`` if any does, or there are no calls."""
    if template.answers.argument_type is not dict:
        return template.answers.argument_type
    call = trial_call(0, template.parser.family)
    function = call["function"]
    as_text = {**function, "arguments": json.dumps(function["arguments"])}
    shown = {
        template.renders(
            [*template.question, {"role": "assistant", "content": "", "tool_calls": [each]}]
        )
        for each in (call, {**call, "function": as_text})
    }
    return None if len(shown) == 1 else dict


def _with_marked_blocks(source: str) -> str:
    """A template that writes marks around its blocks, by tags with the same control of white space."""
    source = _BLOCK.sub(r"{%\1 set trained_block \2%}", source)
    shown = f"{{{{ '{BLOCK_BEGIN}' ~ trained_block ~ '{BLOCK_END}' }}}}"
    return _END_OF_BLOCK.sub(rf"{{%\1 endset %}}{shown}{{% set trained_block = '' \2%}}", source)


def as_template_reads(message: Message, layout: AnswerLayout) -> dict[str, Any]:
    """A message without empty entries, thoughts and arguments as the template reads them."""
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content")
    if isinstance(content, (list, tuple)):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) == len(content):
            out["content"] = "".join(texts)
    if not out.get("tool_calls", True):
        del out["tool_calls"]
    if out.get("role") != "assistant":
        return out
    if layout.thoughts is not None:
        thoughts = [out.pop(name) for name in THOUGHT_FIELDS if name in out]
        if thoughts:
            out[layout.thoughts] = thoughts[0]
    if "tool_calls" in out:
        out["tool_calls"] = [_with_arguments(call, layout.arguments) for call in out["tool_calls"]]
    return out


def _with_arguments(call: Any, form: type | None) -> Any:
    """A call whose arguments are a mapping or text, as the template wants them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if form is str and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif form is dict and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def completed(messages: Sequence[Message], family: str) -> list[dict[str, Any]]:
    """Messages with contents, and with ids and names for all calls and their results."""
    out: list[dict[str, Any]] = []
    last: Message = {}
    for message in messages:
        message = {"content": "", **message}
        if message.get("role") == "assistant":
            calls = [
                {"type": "function", **(call if "function" in call else {"function": call})}
                for call in message.get("tool_calls") or ()
            ]
            if calls:
                reply = with_call_ids(ParsedReply("", None, calls), out, family)
                message["tool_calls"] = reply.tool_calls
            last = {"tool_calls": list(message.get("tool_calls") or ())}
        elif message.get("role") == "tool" and last.get("tool_calls"):
            (named,) = name_tool_results(last, [message])
            left = [call for call in last["tool_calls"] if call["id"] != named["tool_call_id"]]
            last = {"tool_calls": left}
            message = dict(named)
        out.append(message)
    return out
