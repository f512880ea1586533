"""Test on short dialogues whether a chat template is prefix-stable.

A template is prefix-stable if a prompt, its answer and the following messages together are the
template's rendering of the longer dialogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from torchrl_mt.chat.assistant_messages import ARGUMENT, THOUGHT, name_tool_results, trial_call
from torchrl_mt.chat.replies import ParsedReply
from torchrl_mt.chat.template import (
    OPENINGS,
    TOOL_RESULT,
    USER,
    ChatTemplate,
    RefusedDialogueError,
    common_length,
)

__all__ = ["find_break"]

ANSWER = "ANSWER-OF-THE-ASSISTANT"
_OPENED = "<think>\n"
"""The opening of thoughts, which a generation prompt may write itself."""
_ANSWERS = {
    "an answer": ANSWER,
    "an answer with its thinking": f"{_OPENED}{THOUGHT}\n</think>\n\n{ANSWER}",
    "an answer cut while thinking": f"{_OPENED}{THOUGHT}",
    "an empty answer": "",
}
_SHOWN_BEFORE, _SHOWN_AFTER = 20, 50
"""Characters shown before and after a difference."""


def find_break(template: ChatTemplate, *, with_tools: bool = True) -> str | None:
    """Find a dialogue whose earlier messages a template rewrites when others follow.

    Args:
        template: the template.
        with_tools: whether to test dialogues with tools.

    Returns:
        A description of the first such dialogue with both renderings; ``None`` if there is none.
    """
    kinds = (
        _breaks_of_texts(template, with_tools),
        _breaks_of_fields(template, with_tools),
        _breaks_of_images(template) if template.takes_images else iter(()),
    )
    return next(chain.from_iterable(kinds), None)


def _breaks_of_texts(template: ChatTemplate, with_tools: bool) -> Iterator[str]:
    """Breaks by answers whose thoughts are part of the text."""
    for name, asked, content, new in _dialogues():
        if not with_tools and TOOL_RESULT in [*asked, *new]:
            continue
        try:
            asking = template.render(asked)
            opened = template.parser.opened_by(asking)
            if (opened and not content) or (
                THOUGHT in content and template.parser.is_closed_by(asking)
            ):
                continue  # The prompt asks for thoughts and the answer has none, or vice versa.
            said = content.removeprefix(_OPENED) if opened else content
            messages = [*asked, template.read(said, asking)[1]]
            whole, behind = template.follow(messages, said, new)
            appended = template.after_context(new)
        except RefusedDialogueError:
            continue
        if behind is None or behind.lstrip() != appended.lstrip():
            yield _difference(name, [*messages, *new], asking + said + appended, whole)


def _dialogues() -> Iterator[tuple[str, list[dict[str, Any]], str, list[dict[str, Any]]]]:
    """Name of the answer's kind, dialogue before it, its text, and the messages after it."""
    following: list[list[dict[str, Any]]] = [[USER], [TOOL_RESULT], []]
    for new, opening in product(following, OPENINGS):
        for name, content in _ANSWERS.items():
            before = {"role": "assistant", "content": content}
            for asked in (opening, [*opening, before, USER], [*opening, before, TOOL_RESULT]):
                yield name, asked, content, new


def _breaks_of_fields(template: ChatTemplate, with_tools: bool) -> Iterator[str]:
    """Breaks by answers with thoughts and calls in fields of their own, if the template has them."""
    answers, call = template.answers, trial_call(0, template.parser.family)
    results = name_tool_results({"tool_calls": [call]}, [TOOL_RESULT])
    replies: dict[str, tuple[ParsedReply, list[str]]] = {}
    if answers.thought_field:
        replies["an answer with thoughts"] = ParsedReply(ANSWER, THOUGHT), [THOUGHT, ANSWER]
    if answers.argument_type and with_tools:
        calling = ParsedReply("", None, [call])
        replies["an answer that calls a tool"] = calling, [ARGUMENT]
        if answers.thought_field:
            calling = ParsedReply("", THOUGHT, [call])
            name = "an answer that calls a tool, with its thinking"
            replies[name] = calling, [THOUGHT, ARGUMENT]
    for name, (reply, parts) in replies.items():
        answer = answers.write(reply)
        if answers.loses(answer):
            continue  # ChatTokens.follow tests each such answer itself.
        follows: list[list[Any]] = [[USER], [TOOL_RESULT]] if with_tools else [[USER]]
        if reply.tool_calls:
            plain = answers.write(ParsedReply("ANSWERED"), "ANSWERED")
            follows = [results, [*results, plain, USER]]
        shown = template.renders([*template.question, answer])
        for new in follows:
            messages: list[Any] = [*template.question, answer, *new]
            whole = template.renders(messages, add_generation_prompt=True)
            if shown is None or whole is None:
                continue
            end = max(shown.rfind(part) + len(part) for part in parts)
            if not whole.startswith(shown[:end]):
                yield _difference(name, messages, shown, whole)


def _breaks_of_images(template: ChatTemplate) -> Iterator[str]:
    """Breaks by images, such as those of earlier turns left out or moved to the beginning."""
    *before, asked = template.question
    shown = {**asked, "content": [{"type": "text", "text": "LOOK"}, {"type": "image"}]}
    answer = template.answers.write(ParsedReply(ANSWER), ANSWER)
    messages: list[Any] = [*before, shown, answer]
    for new in (shown, asked):
        try:
            whole, behind = template.follow(messages, ANSWER, [new])
            asking = template.render(messages[:-1])
        except RefusedDialogueError:
            continue
        if behind is None:
            yield _difference("an image", [*messages, new], asking + ANSWER, whole)


def _difference(name: str, messages: list[Any], shown: str, whole: str) -> str:
    parting = common_length(shown, whole)
    part = slice(max(0, parting - _SHOWN_BEFORE), parting + _SHOWN_AFTER)
    roles = ", ".join(message["role"] for message in messages)
    return (
        f"{name} makes it rewrite the dialogue ({roles}): the model has seen {shown[part]!r}, which is "
        f"rendered as {whole[part]!r}"
    )
