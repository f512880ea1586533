"""Where the answers are in a rendered dialogue: the text that a policy would sample there.

An answer begins after the generation prompt and ends with the token that ends its turn. Positions come
from a second rendering with marks in the messages, which counts only if it is the same text otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.answer_layout import AnswerLayout, as_template_reads, completed, find_layout
from torchrl_mt.chat.encoding import RenderedTextEncoder
from torchrl_mt.chat.special_tokens import BREAK, SpecialTokenNames, special_tokens
from torchrl_mt.chat.template import RefusedDialogueError, common_length
from torchrl_mt.chat.text_marks import OPENING, TextMarks, with_marks

__all__ = ["DialogueRenderer", "RenderedDialogue"]

Message = Mapping[str, Any]
Span = tuple[int, int]
_RULES = ("system", "developer")
"""Roles whose messages some templates leave out, such as Mistral's after the last question."""


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
    """Indices of the assistant messages of which the template drops a part, or writes it elsewhere."""
    broken: list[int]
    """Indices of the assistant messages that name a token which ends a turn or begins an answer."""
    lost: list[int]
    """Indices of the system's messages of which the template writes nothing."""
    endless: list[int]
    """Indices of the assistant messages after which the template writes no token that ends a turn."""


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
        self._layouts: dict[str, AnswerLayout] = {}
        self._layout(None)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> RenderedDialogue:
        """Render a dialogue without a generation prompt.

        Args:
            messages: the dialogue.
            tools: JSON schemas of tools, for the template.

        Raises:
            ValueError: if the template refuses a message or leaves it out, or it cannot be told where an
                answer begins.
            TypeError: if a message holds anything but plain data.
        """
        layout = self._layout(tools)
        if tools is not None:
            tools = self._names.split(list(tools), "tools")
        dialogue = self._accepted(layout, messages, tools)
        lost = dialogue.lost()
        for i in lost:
            if (role := messages[i].get("role")) not in _RULES:
                raise ValueError(
                    f"the tokenizer's chat template writes nothing of message {i} of {len(messages)} "
                    f"(role {role!r}): give messages in the roles and the order that it takes, or leave "
                    "this one out."
                )
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
            dropped=[
                i
                for i, (_, end) in zip(dialogue.said, answers, strict=True)
                if dialogue.marks.dropped(i) or (dialogue.marks.last(i) or 0) > end
            ],
            broken=[i for i in dialogue.said if has_breaks and _has_break(dialogue.messages[i])],
            lost=lost,
            endless=[
                i
                for i, (begin, end) in zip(dialogue.said, answers, strict=True)
                if not any(
                    token.end() == end for token in layout.ends.finditer(dialogue.text, begin)
                )
            ],
        )

    def _accepted(self, layout: AnswerLayout, messages: Sequence[Message], tools: Any) -> _Dialogue:
        """The dialogue in the first form that the template accepts."""
        given = [as_template_reads(message, layout) for message in messages]
        split: list[dict[str, Any]] = []
        error: Exception | None = None
        for form in (given, completed(given, layout.family)):
            split = [
                (layout.names if each.get("role") == "assistant" else self._names).split(
                    each, f"messages[{i}]"
                )
                for i, each in enumerate(form)
            ]
            found = self._tried(layout, split, tools)
            if isinstance(found, _Dialogue):
                return found
            error = found
        taken = len(split)
        while taken > 0 and isinstance(self._tried(layout, split[:taken], tools), Exception):
            taken -= 1
        number = min(taken, len(split) - 1)
        raise RefusedDialogueError(
            f"the tokenizer's chat template refuses message {number} of {len(split)} (role "
            f"{split[number].get('role')!r}): {type(error).__name__}: {error}. Give messages in the "
            "roles and the order that it takes."
        ) from error

    def _tried(
        self, layout: AnswerLayout, messages: list[dict[str, Any]], tools: Any
    ) -> _Dialogue | Exception:
        """A dialogue, or the error by which the template refuses it."""
        try:
            return _Dialogue(self._tokenizer, layout, messages, tools)
        except Exception as refusal:
            return refusal

    def _layout(self, tools: Any) -> AnswerLayout:
        """The layout of the template, which may depend on whether there are tools."""
        source = str(self._tokenizer.get_chat_template(None, tools))
        if source not in self._layouts:
            self._layouts[source] = find_layout(self._tokenizer, self._names, source)
        return self._layouts[source]


class _Dialogue:
    """A rendered dialogue; raises what the template raises."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        layout: AnswerLayout,
        messages: list[dict[str, Any]],
        tools: Any,
    ) -> None:
        self._tokenizer, self._layout, self._tools = tokenizer, layout, tools
        self.messages = messages
        self.text = self._apply(messages)
        self.said = [i for i, each in enumerate(messages) if each.get("role") == "assistant"]

    @cached_property
    def marks(self) -> TextMarks:
        """Where the messages' texts are: of as many messages as can be marked without other changes."""
        every = range(len(self.messages))
        for chosen in (every, self.said):
            if (marks := self._marks_of(chosen)) is not None:
                return marks
        single = [marks for i in every if (marks := self._marks_of([i])) is not None]
        blocks = self._marks_of([])
        if blocks is None:
            raise ValueError(
                "the {% generation %} blocks of the tokenizer's chat template cannot be located: the "
                "text changes when they are assigned to a variable."
            )
        return TextMarks.joined([blocks, *single])

    def _marks_of(self, chosen: Iterable[int]) -> TextMarks | None:
        messages = list(self.messages)
        owners: list[tuple[int, bool]] = []
        for i in chosen:
            messages[i] = with_marks(messages[i], i, owners)
        try:
            marked = self._apply(messages, source=self._layout.marked)
        except Exception:
            return None
        return TextMarks.found(marked, self.text, owners, has_blocks=self._layout.has_blocks)

    def lost(self) -> list[int]:
        """Indices of the messages, but the assistant's, of whose texts the template writes nothing."""
        found = self.marks.lost()
        marked = {owner for owner, _, _ in self.marks.texts}
        for i, message in enumerate(self.messages):
            if i not in marked and str(message.get("content")).strip() not in self.text:
                marks = self._marks_of([i])
                found |= set() if marks is None else marks.lost()
        return sorted(found.difference(self.said))

    def beginning(self, i: int, before: int) -> int:
        """Where answer ``i`` begins, which is not before ``before``: after its generation prompt."""
        text, layout, first = self.text, self._layout, self.marks.first(i)
        earlier = max(before, self.marks.last(i - 1) or 0)
        if layout.header:
            if first is None:
                at = text.find(layout.header, earlier)
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
        found = OPENING.match(content) if isinstance(content, str) else None
        return found.group(1) if found else ""

    def end(self, i: int, begin: int) -> int:
        """Where answer ``i`` ends: after the token that ends its turn, if the template writes one."""
        text, layout, calls = self.text, self._layout, bool(self.messages[i].get("tool_calls"))
        # Where a template writes a tool's result before the rest of the message, the answer ends there.
        bound = self.marks.next(i, begin, len(text))
        said = max(self.marks.last(i, bound) or begin, begin)
        content = self.messages[i].get("content")
        spaces = content[len(content.rstrip()) :] if isinstance(content, str) else ""
        for closing in (layout.closing, spaces + layout.closing):
            if layout.closing and not calls and text.startswith(closing, said):
                return said + len(closing)
        if (token := layout.ends.search(text, said, bound)) is not None:
            # The closing may be several tokens.
            whole = text.startswith(layout.closing, token.start())
            return max(token.end(), token.start() + len(layout.closing) * whole)
        if not calls:
            return said
        if i == len(self.messages) - 1:
            return len(text)
        same = common_length(text, self._apply(self.messages[: i + 1]))
        return min(max(said, same), bound)

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


def _has_break(value: Any) -> bool:
    """Whether a text in plain data has a break."""
    return BREAK in json.dumps(value, ensure_ascii=False, default=str)
