"""A reply as a chat template takes it back: the fields that it reads, in the form that it wants.

What a template cannot write from fields stays in the text as it was said, so that no template loses a
part that it would have kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_mt.chat.replies.reply import ParsedReply

__all__ = ["ARGUMENT", "THOUGHT", "TOOL", "AnswerForm", "make_ids", "name_answers", "trial_call"]

THOUGHT = "THOUGHT"
"""The thoughts in the dialogues that are tried."""
TOOL, ARGUMENT = "look", "ARGUMENT"
"""The tool that is called there, and what it is given."""

_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""What templates call thoughts."""
_KIMI = "kimi"


def trial_call(k: int = 0, family: str = "") -> dict[str, Any]:
    """A call for a dialogue that is tried."""
    function = {"name": TOOL, "arguments": {"q": f"{ARGUMENT}{k}"}}
    return {"type": "function", "id": _new_id(TOOL, k, family), "function": function}


def make_ids(reply: ParsedReply, before: Sequence[Mapping[str, Any]], family: str) -> ParsedReply:
    """The reply with an id for every call: the model's own, or the call's number in the dialogue.

    Args:
        reply: what was said.
        before: the dialogue so far.
        family: its notation.
    """
    first = sum(len(message.get("tool_calls") or ()) for message in before)
    calls = [
        {"type": "function", "id": _new_id(call["function"]["name"], first + k, family), **call}
        for k, call in enumerate(reply.tool_calls)
    ]
    return ParsedReply(reply.content, reply.reasoning, calls)


def _new_id(name: str, number: int, family: str) -> str:
    """Nine letters and digits, which some templates insist on; Kimi has the name in it."""
    return f"functions.{name}:{number}" if family == _KIMI else f"call{number:05}"


def name_answers(
    said: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Tools' answers with the names and ids of their calls, which many templates ask for.

    Answers that do not say which call they are to belong to the calls in their order.

    Args:
        said: the message with the calls.
        messages: what followed it.
    """
    calls = list(said.get("tool_calls") or ())
    named = []
    for message in messages:
        if message.get("role") == "tool" and calls:
            id = message.get("tool_call_id")
            call = next((call for call in calls if call["id"] == id), calls[0])
            calls.remove(call)
            name = call["function"]["name"]
            message = {"tool_call_id": call["id"], "name": name, **message}
        named.append(message)
    return named


class AnswerForm:
    """The fields that a chat template reads of an answer, found out on short dialogues.

    Args:
        render: text of a dialogue that ends with an answer; ``None`` if the template refuses it.
        question: a dialogue that an answer may follow.
        content: the content of the answers that are tried.
        family: the notation that the model's replies are parsed by.
    """

    def __init__(
        self,
        render: Callable[[list[Mapping[str, Any]]], str | None],
        question: Sequence[Mapping[str, Any]],
        content: str,
        family: str,
    ) -> None:
        self.family = family

        def writes(words: tuple[str, ...], **answer: Any) -> bool:
            text = render([*question, {"role": "assistant", "content": content, **answer}])
            return text is not None and all(word in text for word in words)

        self._as_text: bool | None = None
        """Whether calls have their arguments as JSON text; ``None`` if the template writes no calls."""
        for as_text in (False, True):
            calls = _with_arguments([trial_call(0, family)], as_text=as_text)
            # Some templates write the content of an answer that calls, others do not take it.
            if writes((TOOL, ARGUMENT), content="", tool_calls=calls):
                self._as_text = as_text
                break
        called = {} if self._as_text is None else {"content": "", "tool_calls": calls}
        plain = [name for name in _FIELDS if writes((THOUGHT,), **{name: THOUGHT})]
        calling = [
            name for name in _FIELDS if called and writes((THOUGHT,), **called, **{name: THOUGHT})
        ]
        self._thoughts = next(iter([*plain, *calling]), None)
        self._drops = {"thoughts": not plain, "thoughts of a call": not calling}
        self._drops["content of a call"] = bool(called) and not writes(
            (content, ARGUMENT), tool_calls=calls
        )
        both = {**called, "content": content, self._thoughts or "": THOUGHT}
        self._both = not called or self._thoughts is None or writes((THOUGHT,), **both)
        """Whether an answer that calls may have thoughts and content."""

    @property
    def takes_thoughts(self) -> bool:
        """Whether the template has a field for thoughts."""
        return self._thoughts is not None

    @property
    def takes_calls(self) -> bool:
        """Whether the template writes calls."""
        return self._as_text is not None

    @property
    def drops_thoughts(self) -> bool:
        """Whether the template has a field for thoughts, but never writes those of a plain answer."""
        return self.takes_thoughts and self._drops["thoughts"]

    def loses(self, message: Mapping[str, Any]) -> bool:
        """Whether the template has fields for the parts of an answer, but never writes one of them."""
        calls = bool(message.get("tool_calls"))
        if self._thoughts is not None and message.get(self._thoughts):
            return self._drops["thoughts of a call" if calls else "thoughts"]
        return calls and bool(message["content"]) and self._drops["content of a call"]

    def write(self, reply: ParsedReply, text: str) -> dict[str, Any]:
        """The message that stands for a reply in a dialogue.

        Args:
            reply: what was said, its calls with ids.
            text: the same as text, with what the prompt has opened it by.
        """
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            if self._as_text is None:
                return {**message, "content": text}
            message["tool_calls"] = _with_arguments(reply.tool_calls, as_text=self._as_text)
        if reply.reasoning is None:
            return message
        if self._thoughts is None:
            inline = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}"
            return {**message, "content": inline if reply.tool_calls else text}
        thoughts = reply.reasoning
        if reply.tool_calls and reply.content and not self._both:
            # OpenAI's template takes one of the two before a call.
            thoughts, message["content"] = "\n".join([thoughts, reply.content]), ""
        return {**message, self._thoughts: thoughts}


def _with_arguments(calls: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Calls with their arguments as mappings or as JSON."""

    def form(function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        return {**function, "arguments": json.dumps(arguments) if as_text else arguments}

    return [{**call, "function": form(call["function"])} for call in calls]
