"""A chat template as text: what it writes behind an answer, and whether it rewrites what it wrote.

A template is prefix-stable if a prompt, the answer and what follows it add up to the template's own
rendering of the longer dialogue. White space at the ends of an answer, which templates trim, is no
difference, nor is another notation of the same thoughts, content and tool calls.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence
from itertools import product, takewhile
from numbers import Number
from secrets import token_hex
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from torchrl_mt.chat.replies import ParsedReply, ReplyParser
from torchrl_mt.chat.replies.history import (
    ARGUMENT,
    THOUGHT,
    AnswerForm,
    make_ids,
    name_answers,
    trial_call,
)
from torchrl_mt.chat.training_templates import candidates

__all__ = [
    "ANSWER",
    "BREAK",
    "ChatTemplate",
    "RefusedDialogueError",
    "checked_template_kwargs",
    "common_length",
    "special_tokens",
]

BREAK = "\ufdd0"
"""A noncharacter; stands within each special token's name that a message's text holds, or a tool's, so
that the name is split there when it is encoded, and stays text."""

ANSWER = "ANSWER-OF-THE-ASSISTANT"
"""The assistant's content in the dialogues that are tried."""

_SYSTEM = {"role": "system", "content": "RULES"}
_USER = {"role": "user", "content": "question"}
_TOOL = {"role": "tool", "name": "tool", "content": "RESULT"}
_ASSISTANT = {"role": "assistant", "content": ANSWER}
_OPENINGS: tuple[list[dict[str, Any]], ...] = ([_USER], [_SYSTEM, _USER])
"""What a dialogue may begin with."""
_CONTEXTS: tuple[list[dict[str, Any]], ...] = _OPENINGS
"""New messages are rendered behind an answer to the first of these that the template takes."""

_OPENED = "<think>\n"
"""What a generation prompt writes that opens the thinking itself."""
_ANSWERS = {
    "an answer": ANSWER,
    "an answer with its thinking": f"{_OPENED}{THOUGHT}\n</think>\n\n{ANSWER}",
    "an answer cut while thinking": f"{_OPENED}{THOUGHT}",
    "an empty answer": "",
}
_SHOWN_BEFORE, _SHOWN_AFTER = 20, 50
"""Characters around a difference that a report shows."""

_OWN_VARIABLES = {
    "tools": "JSON schemas or functions",
    "documents": "mappings, such as {'title': ..., 'text': ...}",
}
"""What ``apply_chat_template`` names itself, and a template reads all the same: lists of these."""


class RefusedDialogueError(ValueError):
    """The template raised an error on a dialogue; names the message and says the template's words."""


class ChatTemplate:
    """What a tokenizer's chat template writes.

    Args:
        tokenizer: a tokenizer with a chat template.
        template_kwargs: what else the template is given, whatever it renders; see
            :func:`checked_template_kwargs`.
        source: the template, if that is not the tokenizer's own.

    Attributes:
        source: the template.
        closing: what the template writes behind every answer: the end of the turn.
        breaks: how it rewrites an earlier part of a dialogue once others follow, shown by an example;
            ``None`` if it does so in none of the dialogues that were tried.

    Raises:
        TypeError: if ``template_kwargs`` hold what is no plain data, but for functions as tools.
        ValueError: if the template does not write the assistant's content, or refuses the shortest
            dialogues.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> None:
        given = checked_template_kwargs(template_kwargs)
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self.source = source or _own_source(tokenizer, given.get("tools"))
        # A token of one character has no inside to be split at.
        names = [re.escape(name) for name in special_tokens(tokenizer) if len(name) > 1]
        self._special = re.compile("|".join(sorted(names)) or "(?!)")
        # Names may overlap: each beginning of one counts.
        self._beginning = re.compile(f"(?={self._special.pattern})(.)", re.DOTALL)
        # Tools and documents may come from servers, whose text is to be trusted no more than messages.
        self._kwargs = {
            name: self._split(
                _schemas(value) if name == "tools" else value, f"template_kwargs[{name!r}]"
            )
            for name, value in given.items()
        }
        # The assistant's content in the context: no tool or document can hold what it cannot know.
        self._marker = f"ANSWER-{token_hex(8)}"
        self._context = self._find_context()
        self.closing = self._find_closing()
        self.parser = ReplyParser(tokenizer, given.get("tools"))
        self._form = AnswerForm(self._tried, self._context[:-1], self._marker, self.parser.family)
        self._calls_are_local = self._find_whether_calls_are_local()
        self.breaks = self._find_break()

    def for_training(self) -> ChatTemplate:
        """The training template: this one, without what makes it rewrite a dialogue of user and model.

        Returns:
            One that renders openings alike; this one if there is nothing to change.

        Raises:
            ValueError: if none is known for this template.
        """
        if self.breaks is None and not self._form.drops_thoughts:
            return self
        found = []
        for source in candidates(self.source, reads_thoughts=self._form.takes_thoughts):
            try:
                other = ChatTemplate(self._tokenizer, self._template_kwargs, source)
            except Exception:  # What comes of the change may be no template.
                continue
            if other._begins_like(self):
                found.append(other)
        # Dialogues with tools may be rewritten for reasons of their own.
        found = [each for each in [self, *found] if each._find_break(with_tools=False) is None]
        if found:
            return min(found, key=lambda each: (each.breaks is not None, each._form.drops_thoughts))
        raise ValueError(
            f'template="training" must be given for a chat template that can be kept from rewriting '
            f'dialogues, got one that cannot: {self.breaks}. Use on_break="append", which keeps '
            "every turn in view as well, or set tokenizer.chat_template to one that does not."
        )

    def _begins_like(self, original: ChatTemplate) -> bool:
        """Whether openings are rendered alike, and what follows a question if the original goes on."""
        openings: list[list[Mapping[str, Any]]] = [list(asked) for asked in _OPENINGS]
        question: list[Mapping[str, Any]] = [*self._context[:-1]]
        call = trial_call(0, self.parser.family)
        results = name_answers({"tool_calls": [call]}, [_TOOL])
        # Thoughts in the text are what a training template shows where the original does not.
        replies = [ParsedReply("", thought, [call]) for thought in (None, THOUGHT)]
        said = [self._form.write(each, "") for each in replies[: 1 + self._form.takes_thoughts]]
        told = [[*question, answer, *results * k] for answer in said for k in (1, 2)]
        asked = original._asked(question)
        return all(self._asked(each) == original._asked(each) for each in openings) and all(
            self._asked(each) == theirs or not (theirs or "").startswith(asked or "")
            for each in told
            if (theirs := original._asked(each)) is not None
        )

    def _asked(self, messages: list[Mapping[str, Any]]) -> str | None:
        """The text of a dialogue up to where the model is to answer; ``None`` if it is refused."""
        try:
            return self.render(messages)
        except RefusedDialogueError:
            return None

    def loses(self, message: Mapping[str, Any]) -> bool:
        """Whether an answer has a part that the template never writes."""
        return self._form.loses(message)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        context: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of a dialogue, up to where the model is to answer.

        Args:
            messages: the dialogue.
            context: messages before these, that an error does not count.
            add_generation_prompt: whether the model is to answer.

        Returns:
            The text, with a :data:`BREAK` in every special token's name that the messages hold.

        Raises:
            RefusedDialogueError: if the template raises an error.
            TypeError: if a message holds what is no plain data.
        """
        before = self._split(list(context), "context")
        split = self._split(list(messages), "messages")
        try:
            return self._apply([*before, *split], add_generation_prompt)
        except Exception as error:
            raise self._refusal(before, split, error) from error

    def after_context(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """What the template writes behind an answer of the fixed context that messages follow."""
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
        self, text: str, before: str, messages: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[ParsedReply, dict[str, Any]]:
        """Parse an answer.

        Args:
            text: what was said.
            before: the end of the prompt.
            messages: the dialogue so far, whose calls are counted.

        Returns:
            The answer, its calls with ids, and the message that stands for it in a dialogue.
        """
        reply = make_ids(self.parser.parse(text, before), messages, self.parser.family)
        return reply, self._form.write(reply, self.parser.opened_by(before) + text)

    def follow(
        self,
        messages: Sequence[Mapping[str, Any]],
        said: str,
        new: Sequence[Mapping[str, Any]],
        *,
        stop: str = "",
    ) -> tuple[str, str | None]:
        """Render a dialogue that goes on, and compare it with what the model was shown and said.

        Args:
            messages: the dialogue up to the assistant's answer, which is the last.
            said: the text of that answer.
            new: the messages that follow it.
            stop: the text of the token that ended it.

        Returns:
            The whole text, and its part behind the answer; ``None`` instead of that part if the text
            before it is not the prompt and the answer, nor another notation of the answer.
        """
        whole = self.render([*messages, *new])
        asked = self.render(messages[:-1])
        behind = self._behind(whole, asked, self._split(said, "said"))
        if behind is None and whole.startswith(asked):
            behind = self._behind_the_same(whole[len(asked) :], asked, said, stop)
        return whole, behind

    def behind_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        said: str,
        new: Sequence[Mapping[str, Any]],
        *,
        stop: str = "",
    ) -> str | None:
        """What the template writes behind an answer that calls tools, when their answers follow.

        Args:
            messages: the dialogue up to the assistant's answer, which is the last.
            said: the text of that answer.
            new: the messages that follow it.
            stop: the text of the token that ended it.

        Returns:
            The text; ``None`` if the answer cannot be found in what the template writes.
        """
        if self._calls_are_local:
            messages = [*self._context[:-1], messages[-1]]
        try:
            whole, asked = self.render([*messages, *new]), self.render(messages[:-1])
        except RefusedDialogueError:
            return None
        if not whole.startswith(asked):
            return None
        return self._behind_the_same(whole[len(asked) :], asked, said, stop, thoughts=False)

    def _behind_the_same(
        self, rest: str, asked: str, said: str, stop: str, *, thoughts: bool = True
    ) -> str | None:
        """The text behind an answer that is written in another notation, or ``None`` if it is not."""
        meant = self.parser.parse(said, asked)
        ends = [re.escape(end) for end in (self.closing, stop) if end.strip()]
        for end in re.finditer("|".join(ends) or self._special.pattern, rest):
            written = self.parser.parse(rest[: end.start()].replace(BREAK, ""), asked)
            if meant.is_kept_by(written, reasoning=thoughts):
                return rest[end.start() :]
        return None

    def _behind(self, whole: str, asked: str, said: str) -> str | None:
        """The text behind prompt and answer, or ``None`` if it does not begin with them."""
        rest, words = whole[len(asked) :], said.strip()
        if not whole.startswith(asked) or not (words or self.closing):
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

    def _find_context(self) -> list[dict[str, Any]]:
        """The first of the fixed contexts that the template takes."""
        answer = {**_ASSISTANT, "content": self._marker}
        for asked in _CONTEXTS[:-1]:
            try:
                self.render([*asked, answer], add_generation_prompt=False)
            except RefusedDialogueError:
                continue
            return [*asked, answer]
        context = [*_CONTEXTS[-1], answer]
        self.render(context, add_generation_prompt=False)
        return context

    def _find_closing(self) -> str:
        """What is written behind an answer, be it the last message or not.

        Behind the last one, some templates end the whole document too.
        """
        last = self.after_context([], add_generation_prompt=False)
        try:
            followed = self.after_context([_USER])
        except RefusedDialogueError:
            return last
        same = common_length(last, followed)
        cut = (name.start() for name in self._special.finditer(followed) if name.end() > same)
        closing = followed[: min(same, next(cut, same))]
        ends_turn = self._special.search(closing) or not self._special.search(last)
        return closing if ends_turn else last

    def _tried(self, messages: list[Mapping[str, Any]]) -> str | None:
        """The text of a dialogue that ends with an answer; ``None`` if it is refused."""
        try:
            return self.render(messages, add_generation_prompt=False)
        except RefusedDialogueError:
            return None

    def _find_whether_calls_are_local(self) -> bool:
        """Whether tools' answers are written alike, whatever came before the call."""
        if not self._form.takes_calls:
            return False
        question = self._context[:-1]
        dialogues = []
        for k in (0, 1):
            call = trial_call(k, self.parser.family)
            said = self._form.write(ParsedReply("", None, [call]), "")
            dialogues.append([said, *name_answers({"tool_calls": [call]}, [_TOOL])])
        try:
            texts = [self.render([*question, *dialogues[1]])]
            texts.append(self.render([*question, *dialogues[0], *dialogues[1]]))
        except RefusedDialogueError:
            return False
        tails = [text.rpartition(f"{ARGUMENT}1")[2] for text in texts]
        return tails[0] == tails[1]

    def _find_break(self, *, with_tools: bool = True) -> str | None:
        """Try short dialogues of all kinds, and describe the first that is rewritten."""
        for name, asked, content, new in _trials():
            if not with_tools and _TOOL in [*asked, *new]:
                continue
            try:
                asking = self.render(asked)
                opened = self.parser.opened_by(asking)
                if (opened and not content) or (
                    THOUGHT in content and self.parser.is_closed_by(asking)
                ):
                    continue  # It is to think and does not, or the other way round.
                said = content.removeprefix(_OPENED) if opened else content
                messages = [*asked, self.read(said, asking)[1]]
                whole, tail = self.follow(messages, said, new)
                appended = self.after_context(new)
            except RefusedDialogueError:
                continue
            if tail is None or tail.lstrip() != appended.lstrip():
                shown = self.render(asked) + said + appended
                return _difference(name, [*messages, *new], shown, whole)
        return self._find_break_of_parts(with_tools)

    def _find_break_of_parts(self, with_tools: bool) -> str | None:
        """The same for thoughts and calls in fields of their own, if the template writes them."""
        question = self._context[:-1]
        call = trial_call(0, self.parser.family)
        results = name_answers({"tool_calls": [call]}, [_TOOL])
        plain = self._form.write(ParsedReply("ANSWERED"), "ANSWERED")
        replies: dict[str, tuple[ParsedReply, list[str]]] = {}
        if self._form.takes_thoughts:
            replies["an answer with thoughts"] = ParsedReply(ANSWER, THOUGHT), [THOUGHT, ANSWER]
        if self._form.takes_calls and with_tools:
            calling = ParsedReply("", None, [call]), [ARGUMENT]
            replies["an answer that calls a tool"] = calling
        if self._form.takes_thoughts and self._form.takes_calls and with_tools:
            calling = ParsedReply("", THOUGHT, [call]), [THOUGHT, ARGUMENT]
            replies["an answer that calls a tool, with its thinking"] = calling
        for name, (reply, parts) in replies.items():
            answer = self._form.write(reply, "")
            if self._form.loses(answer):
                continue  # That is seen where such an answer is given.
            follows: list[list[Mapping[str, Any]]] = [[_USER]]
            if with_tools:
                follows.append([_TOOL])
            if reply.tool_calls:
                follows = [results, [*results, plain, _USER]]
            for new in follows:
                messages = [*question, answer, *new]
                try:
                    shown = self.render([*question, answer], add_generation_prompt=False)
                    whole = self.render(messages)
                except RefusedDialogueError:
                    continue
                end = max(shown.rfind(part) + len(part) for part in parts)
                if not whole.startswith(shown[:end]):
                    return _difference(name, messages, shown, whole)
        return None

    def _refusal(
        self,
        context: list[Mapping[str, Any]],
        messages: list[Mapping[str, Any]],
        error: Exception,
    ) -> RefusedDialogueError:
        """The error for a dialogue that the template raises on, with the message that it is about."""
        taken = len(messages)
        while taken > 0 and not self._takes([*context, *messages[:taken]]):
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

    def _takes(self, messages: list[Mapping[str, Any]]) -> bool:
        """Whether the template renders a dialogue without an error."""
        try:
            self._apply(messages, add_generation_prompt=False)
        except Exception:
            return False
        return True

    def _apply(self, messages: list[Any], add_generation_prompt: bool) -> str:
        """Render messages whose special tokens' names are split."""
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
        )

    def _split(self, value: Any, place: str) -> Any:
        """Plain data with a break in every special token's name; anything else could hide one."""
        if isinstance(value, str):
            return self._beginning.sub(rf"\1{BREAK}", value.replace(BREAK, ""))
        if value is None or isinstance(value, Number):
            return value
        if isinstance(value, Mapping):
            return {
                self._split(key, f"a key of {place}"): self._split(entry, f"{place}[{key!r}]")
                for key, entry in value.items()
            }
        # Iterators are used up by one rendering; sets have another order in each process.
        ordered = isinstance(value, (Sequence, MappingView, Iterator))
        if ordered and not isinstance(value, (bytes, bytearray, memoryview)):
            parts = (self._split(entry, f"{place}[{k}]") for k, entry in enumerate(value))
            return tuple(parts) if isinstance(value, tuple) else list(parts)
        raise TypeError(
            f"{place} must be plain data (text, numbers, booleans, None, and mappings and lists of "
            f"them), got {type(value).__name__}: give a template what it shows of it."
        )


def checked_template_kwargs(template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Refuse what is not for a chat template to read.

    Args:
        template_kwargs: variables of a template, by name; ``tools`` may be JSON schemas and functions.

    Returns:
        The same, with lists for iterators.

    Raises:
        TypeError: if it is no mapping, a name is no text, a tool neither function nor mapping, or a
            document no mapping.
        ValueError: if it has a name that says how a template is rendered.
    """
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping):
        raise TypeError(
            "template_kwargs must be a mapping such as {'enable_thinking': False}, got "
            f"{type(template_kwargs).__name__}."
        )
    for name in template_kwargs:
        if not isinstance(name, str):
            raise TypeError(f"template_kwargs must have text as names, got {name!r}.")
    host = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    reserved = {"messages", "conversations", *host} - _OWN_VARIABLES.keys()
    if found := sorted(reserved.intersection(template_kwargs)):
        raise ValueError(
            f"template_kwargs must not have {found}, which say how a dialogue is rendered: give what "
            "the chat template reads, such as tools or enable_thinking (and another template as "
            "tokenizer.chat_template)."
        )
    given = {
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in template_kwargs.items()
    }
    for name, expected in _OWN_VARIABLES.items():
        _check_entries(name, given.get(name), expected)
    return given


def _check_entries(name: str, value: Any, expected: str) -> None:
    """Refuse tools or documents that are none."""
    if value is None:
        return
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(
            f"template_kwargs[{name!r}] must be a list of {expected}, got {type(value).__name__}."
        )
    for k, entry in enumerate(value):
        if not (isinstance(entry, Mapping) or (name == "tools" and callable(entry))):
            raise TypeError(
                f"template_kwargs[{name!r}] must be a list of {expected}, got {type(entry).__name__} "
                f"({str(entry)[:80]}) at {k}."
            )


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many entries two texts, or two lists of tokens, have in common at their beginnings."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of a tokenizer's special tokens, those included that only its vocabulary knows as such."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}


def _own_source(tokenizer: PreTrainedTokenizerBase, tools: Any) -> str:
    """The chat template that the tokenizer takes with these tools."""
    return str(tokenizer.get_chat_template(None, tools))


def _schemas(tools: Iterable[Any] | None) -> list[Any] | None:
    """Tools with the JSON schemas of those that are functions."""
    if tools is None:
        return None
    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


def _trials() -> Iterator[tuple[str, list[dict[str, Any]], str, list[dict[str, Any]]]]:
    """What kind of answer is tried, the dialogue before it, its text, and what follows it."""
    following: list[list[dict[str, Any]]] = [[_USER], [_TOOL], []]
    for new, opening in product(following, ([_USER], [_SYSTEM, _USER])):
        for name, content in _ANSWERS.items():
            before = {"role": "assistant", "content": content}
            for asked in (opening, [*opening, before, _USER], [*opening, before, _TOOL]):
                yield name, asked, content, new


def _difference(name: str, messages: list[Any], shown: str, whole: str) -> str:
    """A sentence that shows the two renderings of a dialogue where they part."""
    parting = common_length(shown, whole)
    part = slice(max(0, parting - _SHOWN_BEFORE), parting + _SHOWN_AFTER)
    roles = ", ".join(message["role"] for message in messages)
    return (
        f"{name} makes it rewrite the dialogue ({roles}): the model has seen {shown[part]!r}, which is "
        f"rendered as {whole[part]!r}"
    )
