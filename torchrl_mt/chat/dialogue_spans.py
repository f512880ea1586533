"""Where the answers are in a rendered dialogue: the text that a policy would sample there.

An answer begins after the generation prompt and ends with the token that ends its turn. Positions come
from a second rendering with marks in the messages, which counts only if it is the same text otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.assistant_messages import (
    THOUGHT_FIELDS,
    name_tool_results,
    trial_call,
    with_call_ids,
)
from torchrl_mt.chat.encoding import RenderedTextEncoder
from torchrl_mt.chat.replies import ParsedReply
from torchrl_mt.chat.replies.families import TURN_ENDS
from torchrl_mt.chat.special_tokens import BREAK, SpecialTokenNames, special_tokens
from torchrl_mt.chat.template import USER, ChatTemplate, RefusedDialogueError, common_length

__all__ = ["DialogueRenderer", "RenderedDialogue"]

Message = Mapping[str, Any]
Span = tuple[int, int]

_MARK = re.compile("\ufdd1([0-9]+)\ufdd2|([\ufdd3\ufdd4])")
"""Marks of messages, with their numbers, and of the template's blocks. They are noncharacters."""
_THOUGHT_TAGS = re.compile(r"</?think>|\[/?THINK\]")
"""Templates look for these in the content, so no mark may touch them."""
_OPENING = re.compile(rf"\s*((?:(?:{_THOUGHT_TAGS.pattern})\s*)*)")
_BLOCK = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END_OF_BLOCK = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")


@dataclass(frozen=True)
class RenderedDialogue:
    """The text of a dialogue, and where its answers are."""

    text: str
    """What the template renders, with a break in every name of a special token that is not its own."""
    said: list[int]
    """Indices of the assistant messages."""
    answers: list[Span]
    """For each of them, the range of characters that a policy would sample."""
    trained: list[list[Span]]
    """For each of them, the parts of that range which the template says are trained; by default all."""
    dropped: list[int]
    """Indices of the assistant messages of which the template drops a part."""
    broken: list[int]
    """Indices of the assistant messages that name a token which ends a turn or begins an answer."""


class DialogueRenderer:
    """Renders whole dialogues and finds the answers in them.

    Messages are rendered as they are, except that entries ``None`` are left out, lists of text parts are
    joined, and thoughts and the arguments of tool calls have the field and the form that the template
    reads. Ids and names of calls and empty contents are added if the template refuses the dialogue
    without them.

    Names of special tokens in messages are ordinary text; in answers, only those that end a turn or
    begin an answer, since models write others, such as the marks of tool calls.

    Args:
        tokenizer: a tokenizer with a chat template and an end-of-turn token.

    Attributes:
        encoder: encodes the rendered text.

    Raises:
        ValueError: if it lacks one of them, or the template does not write the assistant's content.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None or tokenizer.eos_token is None:
            lacks = "chat template" if tokenizer.chat_template is None else "eos_token"
            raise ValueError(
                f"tokenizer ({type(tokenizer).__name__}) must have a chat template and an eos_token, "
                f"but it has no {lacks}: set it, or use a chat model's tokenizer."
            )
        self._tokenizer = tokenizer
        self._names = SpecialTokenNames(tokenizer)
        names = special_tokens(tokenizer)
        ids: set[Any] = set(map(tokenizer.convert_tokens_to_ids, names))
        self.encoder = RenderedTextEncoder(tokenizer, ids)
        self._layouts: dict[str, _Layout] = {}
        self._layout(None)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> RenderedDialogue:
        """Render a dialogue without a generation prompt.

        Args:
            messages: the dialogue.
            tools: JSON schemas of tools, for the template.

        Raises:
            ValueError: if the template refuses a message, or it cannot be told where an answer begins.
            TypeError: if a message holds anything but plain data.
        """
        layout = self._layout(tools)
        if tools is not None:
            tools = self._names.split(list(tools), "tools")
        dialogue = self._accepted(layout, messages, tools)
        answers: list[Span] = []
        end = 0
        for i in dialogue.said:
            begin = dialogue.beginning(i, end)
            end = dialogue.end(i, begin)
            answers.append((begin, end))
        has_breaks = BREAK in dialogue.text
        return RenderedDialogue(
            dialogue.text,
            dialogue.said,
            answers,
            trained=[dialogue.trained(begin, end) for begin, end in answers],
            dropped=[i for i in dialogue.said if dialogue.marks.dropped(i)],
            broken=[i for i in dialogue.said if has_breaks and _has_break(dialogue.messages[i])],
        )

    def _accepted(self, layout: _Layout, messages: Sequence[Message], tools: Any) -> _Dialogue:
        """The dialogue in the first form that the template accepts."""
        given = [_as_template_reads(message, layout) for message in messages]
        split: list[dict[str, Any]] = []
        error: Exception | None = None
        for form in (given, _completed(given, layout.family)):
            split = [
                (layout.names if each.get("role") == "assistant" else self._names).split(
                    each, f"messages[{i}]"
                )
                for i, each in enumerate(form)
            ]
            try:
                return _Dialogue(self._tokenizer, layout, split, tools)
            except Exception as refusal:
                error = refusal
        taken = len(split)
        while taken > 0 and not _renders(self._tokenizer, layout.source, split[:taken], tools):
            taken -= 1
        number = min(taken, len(split) - 1)
        raise RefusedDialogueError(
            f"the tokenizer's chat template refuses message {number} of {len(split)} (role "
            f"{split[number].get('role')!r}): {type(error).__name__}: {error}. Give messages in the "
            "roles and the order that it takes."
        ) from error

    def _layout(self, tools: Any) -> _Layout:
        """The layout of the template, which may depend on whether there are tools."""
        source = str(self._tokenizer.get_chat_template(None, tools))
        if source not in self._layouts:
            self._layouts[source] = _find_layout(self._tokenizer, self._names, source)
        return self._layouts[source]


@dataclass
class _Layout:
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


class _Dialogue:
    """A rendered dialogue; raises what the template raises."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: _Layout,
        messages: list[dict[str, Any]],
        tools: Any,
    ) -> None:
        self._tokenizer, self._layout, self._tools = tokenizer, layout, tools
        self.messages = messages
        self.text = self._apply(messages)
        self.said = [i for i, each in enumerate(messages) if each.get("role") == "assistant"]

    @cached_property
    def marks(self) -> _Marks:
        """Where the messages' texts are: of as many messages as can be marked without other changes."""
        every = range(len(self.messages))
        for chosen in (every, self.said):
            if (marks := self._marks_of(chosen)) is not None:
                return marks
        single = [marks for i in self.said if (marks := self._marks_of([i])) is not None]
        blocks = self._marks_of([])
        if blocks is None:
            raise ValueError(
                "the {% generation %} blocks of the tokenizer's chat template cannot be located: the "
                "text changes when they are assigned to a variable."
            )
        return _Marks.joined([blocks, *single])

    def _marks_of(self, chosen: Iterable[int]) -> _Marks | None:
        messages = list(self.messages)
        owners: list[int] = []
        names: set[int] = set()
        for i in chosen:
            messages[i] = _marked(messages[i], i, owners, names)
        try:
            marked = self._apply(messages, source=self._layout.marked)
        except Exception:
            return None
        return _Marks.found(marked, self.text, owners, names, has_blocks=self._layout.has_blocks)

    def beginning(self, i: int, before: int) -> int:
        """Where answer ``i`` begins, which is not before ``before``: after its generation prompt."""
        text, layout, first = self.text, self._layout, self.marks.first(i)
        if layout.header:
            if first is None:
                at = text.find(layout.header, before)
            else:
                at = text.rfind(layout.header, before, first)
            if at >= 0:
                # The template may have dropped the rest of the prompt, such as the opening of thoughts.
                whole = text.startswith(layout.prompt, at)
                return at + len(layout.prompt if whole else layout.header)
        try:
            asked = self._apply(self.messages[:i], add_generation_prompt=True)
        except Exception:  # Templates may refuse a part of a dialogue.
            asked = ""
        if asked and len(asked) >= before and text.startswith(asked):
            return len(asked)
        # Where the template opens the answer in another way than the prompt does.
        earlier = max(before, self.marks.before(i))
        same = common_length(text, asked)
        opening = [token.end() for token in layout.special.finditer(text, earlier, same)]
        if opening and (first is None or opening[-1] <= first):
            return opening[-1]
        if first is None:
            raise ValueError(
                f"it cannot be told where the answer in message {i} begins, because the tokenizer's "
                "chat template rewrites this dialogue: put {% generation %} and {% endgeneration %} "
                "around answers in tokenizer.chat_template."
            )
        for written in (self._opening(i), layout.gap):
            begin = first - len(written)
            first = begin if begin >= before and text.startswith(written, begin) else first
        return first

    def _opening(self, i: int) -> str:
        """The tags at the beginning of a message's content, which have no marks."""
        content = self.messages[i].get("content")
        found = _OPENING.match(content) if isinstance(content, str) else None
        return found.group(1) if found else ""

    def end(self, i: int, begin: int) -> int:
        """Where answer ``i`` ends: after the token that ends its turn, if the template writes one."""
        text, layout, calls = self.text, self._layout, bool(self.messages[i].get("tool_calls"))
        last = self.marks.last(i)
        said = begin if last is None else max(last, begin)
        if not calls and layout.closing and text.startswith(layout.closing, said):
            return said + len(layout.closing)
        bound = self.marks.next(i, said, len(text))
        if (token := layout.ends.search(text, said, bound)) is not None:
            return token.end()
        if not calls:
            return said
        if i == len(self.messages) - 1:
            return len(text)
        return max(said, common_length(text, self._apply(self.messages[: i + 1])))

    def trained(self, begin: int, end: int) -> list[Span]:
        """The parts of an answer that are trained: all of it, or what the template's blocks say."""
        if not self._layout.has_blocks:
            return [(begin, end)] if begin < end else []
        parts = [(max(begin, a), min(end, b)) for a, b in self.marks.blocks]
        parts = [(a, b) for a, b in parts if a < b]
        # Blocks may leave out the token that ends the turn, which a policy samples too.
        if parts and self._layout.ends.fullmatch(self.text, parts[-1][1], end):
            parts[-1] = parts[-1][0], end
        return parts

    def _apply(
        self,
        messages: list[dict[str, Any]],
        *,
        source: str | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=source or self._layout.source,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )


@dataclass
class _Marks:
    """Positions of the texts of messages and of the template's blocks, in characters."""

    owners: list[int]
    """Index of the message of each mark."""
    names: set[int]
    """Marks of the names of calls, which templates may write as a part of ids."""
    places: dict[int, int]
    """Position of each mark that the template has kept."""
    blocks: list[Span]

    @classmethod
    def found(
        cls, marked: str, text: str, owners: list[int], names: set[int], *, has_blocks: bool
    ) -> _Marks | None:
        """The marks in a text; ``None`` if it differs from ``text`` by more than them."""
        places: dict[int, int] = {}
        edges: list[int] = []
        removed = 0
        for mark in _MARK.finditer(marked):
            at = mark.start() - removed
            removed += len(mark.group())
            if mark.group(1) is not None:
                places.setdefault(int(mark.group(1)), at)
            else:
                edges.append(at)
        if _MARK.sub("", marked) != text or (edges and not has_blocks) or len(edges) % 2:
            return None
        return cls(owners, names, places, list(zip(edges[::2], edges[1::2], strict=True)))

    @classmethod
    def joined(cls, parts: Sequence[_Marks]) -> _Marks:
        """Marks of several renderings as one; the blocks of the first."""
        owners = [owner for part in parts for owner in part.owners]
        starts = [sum(len(part.owners) for part in parts[:k]) for k in range(len(parts))]
        places = {
            start + mark: at
            for start, part in zip(starts, parts, strict=True)
            for mark, at in part.places.items()
        }
        names = {
            start + mark for start, part in zip(starts, parts, strict=True) for mark in part.names
        }
        return cls(owners, names, places, parts[0].blocks)

    def first(self, i: int) -> int | None:
        """Where the first text of message ``i`` begins; ``None`` if it is not known."""
        return min(self._of(i), default=None)

    def last(self, i: int) -> int | None:
        """Where the last text of message ``i`` ends; ``None`` if it is not known."""
        return max(self._of(i), default=None)

    def before(self, i: int) -> int:
        """Where the last text of the messages before ``i`` ends; 0 if it is not known."""
        return max((at for mark, at in self.places.items() if self.owners[mark] < i), default=0)

    def next(self, i: int, after: int, default: int) -> int:
        """Where the first text of a later message begins."""
        later = (at for mark, at in self.places.items() if self.owners[mark] > i and at >= after)
        return min(later, default=default)

    def dropped(self, i: int) -> bool:
        """Whether the template has dropped a text of message ``i``."""
        return any(
            owner == i and mark not in self.places and mark not in self.names
            for mark, owner in enumerate(self.owners)
        )

    def _of(self, i: int) -> list[int]:
        return [at for mark, at in self.places.items() if self.owners[mark] == i]


def _find_layout(
    tokenizer: PreTrainedTokenizerBase, special: SpecialTokenNames, source: str
) -> _Layout:
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
    ends = {
        str(tokenizer.eos_token),
        *special_tokens(tokenizer).intersection(TURN_ENDS),
        *special.pattern.findall(closing),
    }
    return _Layout(
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
    shown = "{{ '\ufdd3' ~ trained_block ~ '\ufdd4' }}"
    return _END_OF_BLOCK.sub(rf"{{%\1 endset %}}{shown}{{% set trained_block = '' \2%}}", source)


def _marked(message: Message, i: int, owners: list[int], names: set[int]) -> dict[str, Any]:
    """A message with marks in its texts; the number of each mark is its place in ``owners``.

    Marks of the names of calls are added to ``names``.
    """

    def mark() -> str:
        owners.append(i)
        return f"\ufdd1{len(owners) - 1}\ufdd2"

    def around(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        pieces = _THOUGHT_TAGS.split(text)
        tags = [*(tag.group() for tag in _THOUGHT_TAGS.finditer(text)), ""]
        out = ""
        for piece, tag in zip(pieces, tags, strict=True):
            words = piece.strip()
            before, _, after = piece.partition(words) if words else (piece, "", "")
            out += f"{before}{mark()}{words}{mark()}{after}{tag}" if words else piece + tag
        return out

    out = dict(message)
    for name in ("content", *THOUGHT_FIELDS):
        if name in out:
            out[name] = around(out[name])
    if message.get("role") == "assistant" and message.get("tool_calls"):
        calls = [dict(call) for call in message["tool_calls"]]
        function = dict(calls[-1].get("function", calls[-1]))
        texts = len(owners)
        function["name"] = around(function.get("name"))
        names.update(range(texts, len(owners)))
        calls[-1] = {**calls[-1], "function": function} if "function" in calls[-1] else function
        out["tool_calls"] = calls
    return out


def _as_template_reads(message: Message, layout: _Layout) -> dict[str, Any]:
    """A message without empty entries, thoughts and arguments as the template reads them."""
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            out["content"] = "".join(texts)
    if not out.get("tool_calls", True):
        del out["tool_calls"]
    if out.get("role") != "assistant":
        return out
    thoughts = next((out[name] for name in THOUGHT_FIELDS if name in out), None)
    if thoughts is not None and layout.thoughts is not None:
        out.setdefault(layout.thoughts, thoughts)
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


def _completed(messages: Sequence[Message], family: str) -> list[dict[str, Any]]:
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


def _renders(
    tokenizer: PreTrainedTokenizerBase, source: str, messages: list[Any], tools: Any
) -> bool:
    try:
        tokenizer.apply_chat_template(messages, chat_template=source, tools=tools, tokenize=False)
    except Exception:
        return False
    return True


def _has_break(value: Any) -> bool:
    """Whether a text in plain data has a break."""
    return BREAK in json.dumps(value, ensure_ascii=False, default=str)
