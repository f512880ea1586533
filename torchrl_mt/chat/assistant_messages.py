"""Assistant messages with the fields that a chat template reads.

Parts for which the template has no field stay in the content as they were sampled, so that none is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_mt.chat.replies.reply import THOUGHT_FIELDS, ParsedReply

__all__ = [
    "ARGUMENT",
    "THOUGHT",
    "AssistantMessages",
    "name_tool_results",
    "trial_call",
    "with_call_ids",
]

THOUGHT, TOOL, ARGUMENT = "THOUGHT", "look", "ARGUMENT"
"""Thoughts, a tool and its argument, for testing templates."""


def trial_call(k: int = 0, family: str = "") -> dict[str, Any]:
    """A tool call for testing templates."""
    function = {"name": TOOL, "arguments": {"q": f"{ARGUMENT}{k}"}}
    return {"type": "function", "id": _call_id(TOOL, k, family), "function": function}


def with_call_ids(
    reply: ParsedReply, before: Sequence[Mapping[str, Any]], family: str
) -> ParsedReply:
    """Add ids to the calls that have none, by their numbers after the dialogue ``before``."""
    first = sum(len(message.get("tool_calls") or ()) for message in before)
    calls = [
        {"type": "function", "id": _call_id(call["function"]["name"], first + k, family), **call}
        for k, call in enumerate(reply.tool_calls)
    ]
    return ParsedReply(reply.content, reply.reasoning, calls)


def _call_id(name: str, number: int, family: str) -> str:
    """Id of a call: nine letters and digits, which some templates insist on; Kimi's has the name."""
    return f"functions.{name}:{number}" if family == "kimi" else f"call{number:05}"


def name_tool_results(
    said: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Add the names and ids of calls to tool messages, which many templates need.

    Results without a ``tool_call_id`` belong to the calls in order.

    Args:
        said: the assistant message with the calls.
        messages: the messages after it.
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


class AssistantMessages:
    """Converts replies to messages with the fields that a chat template reads, found by trial.

    Args:
        render: renders a dialogue that ends with an answer; returns ``None`` if the template refuses it.
        question: a dialogue that an answer may follow.
        content: the content of trial answers.
        family: name of the model family.
    """

    def __init__(
        self,
        render: Callable[[list[Mapping[str, Any]]], str | None],
        question: Sequence[Mapping[str, Any]],
        content: str,
        family: str,
    ) -> None:
        def writes(*words: str, **answer: Any) -> bool:
            text = render([*question, {"role": "assistant", "content": content, **answer}])
            return text is not None and all(word in text for word in words)

        def calling(*, json_text: bool) -> dict[str, Any]:
            # Some templates refuse content in an answer with calls.
            calls = _with_arguments([trial_call(0, family)], json_text=json_text)
            return {"content": "", "tool_calls": calls}

        self.argument_type = next(
            (t for t in (dict, str) if writes(TOOL, ARGUMENT, **calling(json_text=t is str))), None
        )
        """Type of calls' arguments in the template; ``None`` if it writes no calls."""
        call = calling(json_text=self.argument_type is str) if self.argument_type else {}
        plain = [name for name in THOUGHT_FIELDS if writes(THOUGHT, **{name: THOUGHT})]
        called = [
            name for name in THOUGHT_FIELDS if call and writes(THOUGHT, **call, **{name: THOUGHT})
        ]
        self.thought_field = next(iter([*plain, *called]), None)
        """The template's field for thoughts; ``None`` if it has none."""
        self._drops_thoughts, self._drops_thoughts_of_calls = not plain, not called
        answer = {**call, "content": content}
        self._drops_content_of_calls = bool(call) and not writes(content, ARGUMENT, **answer)
        self._takes_both = (
            not call
            or self.thought_field is None
            or writes(THOUGHT, **answer, **{self.thought_field: THOUGHT})
        )
        """Whether an answer with calls may have both thoughts and content."""

    @property
    def drops_thoughts(self) -> bool:
        """Whether the template has a field for thoughts, but drops those of answers without calls."""
        return self.thought_field is not None and self._drops_thoughts

    def loses(self, message: Mapping[str, Any]) -> bool:
        """Whether the template drops one of this message's fields."""
        calls = bool(message.get("tool_calls"))
        if self.thought_field is not None and message.get(self.thought_field):
            return self._drops_thoughts_of_calls if calls else self._drops_thoughts
        return calls and bool(message["content"]) and self._drops_content_of_calls

    def write(self, reply: ParsedReply, text: str = "") -> dict[str, Any]:
        """Convert a reply to a message that the template can render.

        Args:
            reply: the sampled reply, its calls with ids.
            text: the reply's text, and before it the opening of thoughts if the prompt has written it.
        """
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            if self.argument_type is None:
                return {**message, "content": text}
            message["tool_calls"] = _with_arguments(
                reply.tool_calls, json_text=self.argument_type is str
            )
        if reply.reasoning is None:
            return message
        if self.thought_field is None:
            inline = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}"
            return {**message, "content": inline if reply.tool_calls else text}
        thoughts = reply.reasoning
        if reply.tool_calls and reply.content and not self._takes_both:
            # OpenAI's template accepts only one of the two before a call.
            thoughts, message["content"] = "\n".join([thoughts, reply.content]), ""
        return {**message, self.thought_field: thoughts}


def _with_arguments(calls: Sequence[Mapping[str, Any]], *, json_text: bool) -> list[dict[str, Any]]:
    """Calls with their arguments as mappings or as JSON text."""

    def form(function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        return {**function, "arguments": json.dumps(arguments) if json_text else arguments}

    return [{**call, "function": form(call["function"])} for call in calls]
