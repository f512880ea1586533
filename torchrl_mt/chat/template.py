"""Chat templates as text: render dialogues, and find what is written after an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from secrets import token_hex
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.assistant_messages import (
    ARGUMENT,
    AssistantMessages,
    name_tool_results,
    trial_call,
    with_call_ids,
)
from torchrl_mt.chat.replies import ParsedReply, ParseReply, ReplyParser
from torchrl_mt.chat.replies.tool_calls import tool_schemas
from torchrl_mt.chat.special_tokens import BREAK, SpecialTokenNames, special_tokens
from torchrl_mt.chat.template_kwargs import checked_template_kwargs
from torchrl_mt.vision import VisionProcessor

__all__ = [
    "OPENINGS",
    "TOOL_RESULT",
    "USER",
    "ChatTemplate",
    "RefusedDialogueError",
    "common_length",
]

Messages = Sequence[Mapping[str, Any]]

USER: dict[str, Any] = {"role": "user", "content": "question"}
TOOL_RESULT: dict[str, Any] = {"role": "tool", "name": "tool", "content": "RESULT"}
OPENINGS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [{"role": "system", "content": "RULES"}, USER],
)
"""Openings of the dialogues that templates are tested with."""


class RefusedDialogueError(ValueError):
    """The template raised an error on a dialogue; names the message and the template's error."""


class ChatTemplate:
    """Renders dialogues with the chat template of a tokenizer or a processor.

    Images are rendered as the template's placeholder; messages have them as ``{"type": "image"}``.

    Attributes:
        source: the template; the tokenizer's own if none is given.
        question: the first of :data:`OPENINGS` that the template accepts.
        closing: the end of an assistant's turn, after its content.
        images_are_local: whether an image is rendered alike whatever images are before it.
        parser: parses the model's replies.
        answers: converts replies to messages.

    Raises:
        TypeError: if ``template_kwargs`` holds anything but plain data and functions as tools.
        ValueError: if the template does not write the assistant's content, or refuses the shortest
            dialogues.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        source: str | None = None,
        parse: ParseReply | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        given = checked_template_kwargs(template_kwargs)
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._parse = parse
        self._vision = vision
        source = source or (None if vision is None else vision.chat_template)
        self.source = source or str(tokenizer.get_chat_template(None, given.get("tools")))
        placeholders = set() if vision is None else vision.placeholders
        self._names = SpecialTokenNames(tokenizer, special_tokens(tokenizer) | placeholders)
        # Tools and documents may come from servers, so their text is not trusted either.
        self._kwargs = {
            name: self._names.split(
                tool_schemas(value) if name == "tools" else value, f"template_kwargs[{name!r}]"
            )
            for name, value in given.items()
        }
        # Random, so that no tool or document can contain it.
        self._marker = f"ANSWER-{token_hex(8)}"
        answer = {"role": "assistant", "content": self._marker}
        self._takes_text = True
        """Whether contents may be text; some templates with images take lists of parts only."""
        if vision is not None and not any(
            self._marker in (self.renders([*asked, answer]) or "") for asked in OPENINGS
        ):
            self._takes_text = False
        taken = (asked for asked in OPENINGS if self.renders([*asked, answer]) is not None)
        self.question = next(taken, OPENINGS[-1])
        self._context = [*self.question, answer]
        self.render(self._context, add_generation_prompt=False)  # Raises where none is taken.
        self.closing = self._find_closing()
        self.parser = ReplyParser(tokenizer, given.get("tools"), parse)
        self.answers = AssistantMessages(
            self.renders, self.question, self._marker, self.parser.family
        )
        self._calls_are_local = self._find_whether_calls_are_local()
        self.images_are_local = vision is None or self._find_whether_images_are_local()

    @property
    def takes_images(self) -> bool:
        """Whether there is a processor."""
        return self._vision is not None

    def with_source(self, source: str) -> ChatTemplate:
        """A copy with another template."""
        return ChatTemplate(
            self._tokenizer, self._template_kwargs, source, self._parse, self._vision
        )

    def render(
        self, messages: Messages, *, context: Messages = (), add_generation_prompt: bool = True
    ) -> str:
        """Render a dialogue, with a break in every special token's name in its messages.

        Args:
            messages: the dialogue.
            context: messages before these, which errors do not count.
            add_generation_prompt: whether to add the generation prompt.

        Raises:
            RefusedDialogueError: if the template raises an error.
            TypeError: if a message holds anything but plain data.
        """
        before = self._names.split(list(context), "context")
        split = self._names.split(list(messages), "messages")
        try:
            return self._apply([*before, *split], add_generation_prompt)
        except Exception as error:
            raise self._refusal(before, split, error) from error

    def renders(self, messages: Messages, *, add_generation_prompt: bool = False) -> str | None:
        """Render a dialogue; ``None`` if the template refuses it."""
        split = self._names.split(list(messages), "messages")
        try:
            return self._apply(split, add_generation_prompt)
        except Exception:
            return None

    def after_context(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The text after an answer to :attr:`question` that is followed by messages."""
        text = self.render(
            messages, context=self._context, add_generation_prompt=add_generation_prompt
        )
        head, found, tail = text.partition(self._marker)
        if not found:
            raise ValueError(
                "the tokenizer's chat template must write the assistant's content as it is, got "
                f"{head[:80]!r}."
            )
        return tail

    def read(
        self, text: str, before: str, messages: Messages = ()
    ) -> tuple[ParsedReply, dict[str, Any]]:
        """Parse an answer.

        Args:
            text: the answer.
            before: the end of the prompt.
            messages: the dialogue so far.

        Returns:
            The answer, its calls with ids, and its message in the form that the template renders.
        """
        reply = self.parser.parse(text, before)
        reply = with_call_ids(reply, messages, self.parser.family)
        return reply, self.answers.write(reply, self.parser.opened_by(before) + text)

    def write(self, message: Mapping[str, Any], messages: Messages = ()) -> dict[str, Any]:
        """Convert an assistant message that was not sampled to the form that the template renders.

        Args:
            message: the message; arguments of calls as mappings.
            messages: the dialogue before it; the ids of calls follow from its number of calls.
        """
        calls = [
            {name: value for name, value in call.items() if name != "id"}
            for call in message.get("tool_calls") or ()
        ]
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content if "text" in part)
        text = "\n".join([content, *(json.dumps(call["function"]) for call in calls)]).strip()
        reply = ParsedReply(content, message.get("reasoning_content"), calls)
        return self.answers.write(with_call_ids(reply, messages, self.parser.family), text)

    def follow(
        self, messages: Messages, said: str, new: Messages, *, stop: str = ""
    ) -> tuple[str, str | None]:
        """Render a continued dialogue, and compare it with the prompt and answer so far.

        Outer white space of the answer does not count as a difference, nor does another notation of the
        same thoughts, content and tool calls.

        Args:
            messages: the dialogue, the assistant's answer last.
            said: the answer's text.
            new: the messages that follow.
            stop: text of the token that ended the answer.

        Returns:
            The whole text, and its part after the answer; ``None`` for the part if the text does not
            begin with the prompt and the answer.
        """
        whole, asked = self.render([*messages, *new]), self.render(messages[:-1])
        if not whole.startswith(asked):
            return whole, None
        rest = whole[len(asked) :]
        behind = self._behind(rest, self._names.split(said, "said"))
        if behind is None:
            behind = self._behind_same_reply(rest, asked, said, stop)
        return whole, behind

    def behind_calls(
        self, messages: Messages, said: str, new: Messages, *, stop: str = ""
    ) -> str | None:
        """The text after an answer with tool calls that is followed by their results.

        The arguments are those of :meth:`follow`. Thoughts that the template drops do not count.

        Returns:
            The text; ``None`` if the answer is not found in the rendering.
        """
        if self._calls_are_local:
            messages = [*self.question, messages[-1]]
        asked = self.renders(messages[:-1], add_generation_prompt=True)
        whole = self.renders([*messages, *new], add_generation_prompt=True)
        if asked is None or whole is None or not whole.startswith(asked):
            return None
        return self._behind_same_reply(whole[len(asked) :], asked, said, stop, thoughts=False)

    def _behind(self, rest: str, said: str) -> str | None:
        """The text after an answer that is rendered as it was sampled; ``None`` if it is not."""
        words = said.strip()
        if not (words or self.closing):
            return None
        if rest.startswith(said + self.closing):
            return rest[len(said) :]
        if words:
            rest = rest.lstrip()
        if not rest.startswith(words):
            return None
        rest = rest[len(words) :]
        spaces = len(rest) - len(rest.lstrip())
        ends = (rest[k:] for k in range(spaces + 1) if rest.startswith(self.closing, k))
        return next(ends, None)

    def _behind_same_reply(
        self, rest: str, asked: str, said: str, stop: str, *, thoughts: bool = True
    ) -> str | None:
        """The text after an answer that is rendered in another notation; ``None`` if it is not."""
        meant = self.parser.parse(said, asked)
        ends = [re.escape(end) for end in (self.closing, stop) if end.strip()]
        for end in re.finditer("|".join(ends) or self._names.pattern.pattern, rest):
            written = self.parser.parse(rest[: end.start()].replace(BREAK, ""), asked)
            if meant.is_kept_by(written, reasoning=thoughts):
                return rest[end.start() :]
        return None

    def _find_closing(self) -> str:
        """The end of a turn: what follows an answer whether or not it is the last message.

        After the last message, some templates also end the whole document.
        """
        last = self.after_context([], add_generation_prompt=False)
        try:
            followed = self.after_context([USER])
        except RefusedDialogueError:
            return last
        special = self._names.pattern
        same = common_length(last, followed)
        cut = (name.start() for name in special.finditer(followed) if name.end() > same)
        closing = followed[: min(same, next(cut, same))]
        return closing if special.search(closing) or not special.search(last) else last

    def _find_whether_calls_are_local(self) -> bool:
        """Whether the rendering of tools' results does not depend on messages before the call."""
        if not self.answers.argument_type:
            return False
        turns = []
        for k in (0, 1):
            call = trial_call(k, self.parser.family)
            said = self.answers.write(ParsedReply("", None, [call]))
            turns.append([said, *name_tool_results({"tool_calls": [call]}, [TOOL_RESULT])])
        befores: list[Messages] = [self.question, [*self.question, *turns[0]]]
        tails = self._tails(befores, turns[1], f"{ARGUMENT}1")
        return len(tails) == 1 and None not in tails

    def _find_whether_images_are_local(self) -> bool:
        """Whether the rendering of an image does not depend on those before it."""
        *before, asked = self.question
        shown = {**asked, "content": [{"type": "image"}, {"type": "text", "text": "LOOK"}]}
        befores = [[*before, asked], [*before, shown]]
        return len(self._tails(befores, [self._context[-1], shown], self._marker)) == 1

    def _tails(self, befores: Sequence[Messages], turn: Messages, mark: str) -> set[str | None]:
        """What is written behind a mark in a turn after each of some dialogues; ``None`` if refused."""
        texts = [self.renders([*each, *turn], add_generation_prompt=True) for each in befores]
        return {text and text.rpartition(mark)[2] for text in texts}

    def _refusal(
        self, context: list[Mapping[str, Any]], messages: list[Mapping[str, Any]], error: Exception
    ) -> RefusedDialogueError:
        """The error for a refused dialogue; names the message that is refused."""
        taken = len(messages)
        while taken > 0 and self.renders([*context, *messages[:taken]]) is None:
            taken -= 1
        prompt = "the generation prompt behind " if taken == len(messages) else ""
        number = min(taken, len(messages) - 1)
        where = (
            f"message {number} of {len(messages)} (role {messages[number].get('role')!r})"
            if messages
            else "an answer"
        )
        given = f" with template_kwargs {list(self._kwargs)}" if self._kwargs else ""
        also = ", and template_kwargs as it reads them" if self._kwargs else ""
        return RefusedDialogueError(
            f"the tokenizer's chat template refuses {prompt}{where}{given}: {type(error).__name__}: "
            f"{error}. Give messages in the roles and the order that it takes{also}."
        )

    def _apply(self, messages: list[Any], add_generation_prompt: bool) -> str:
        if not self._takes_text:
            messages = list(map(_in_parts, messages))
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        )


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix of two texts or lists."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
