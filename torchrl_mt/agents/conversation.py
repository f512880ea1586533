"""The dialogues of one episode as tokens: what was sampled is never encoded again.

A request that goes on from an earlier reply gets that reply's prompt and tokens, and the tokens of its
new messages. Any other request is a new branch, encoded from its beginning.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from torchrl_mt.agents.messages import (
    canonical,
    for_template,
    has_images,
    identities,
    stored_images,
)
from torchrl_mt.agents.requests import ChatRequest, RequestError
from torchrl_mt.chat.assistant_messages import name_tool_results
from torchrl_mt.chat.replies import ParseReply
from torchrl_mt.chat.tokens import ChatTokens
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.collectors.settings import ChatOptions
from torchrl_mt.engines import Completion
from torchrl_mt.engines.stop_strings import find_stop
from torchrl_mt.threads import call_in_thread
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.messages import images_of

__all__ = ["ChatTokensCache", "Conversation", "Prompt", "Reply", "before_stop"]


@dataclass(frozen=True)
class Prompt:
    """A request's dialogue, rendered."""

    chat: ChatTokens
    token_ids: Sequence[int]
    dialogue: Sequence[Mapping[str, Any]]
    """The messages in the chat template's form."""
    new: list[dict[str, Any]]
    """The messages that no earlier prompt or reply of the branch has."""
    images: list[StoredImage]
    """All images of the prompt, in order."""
    path: list[Hashable]
    """Identities of the messages, after the template's variables."""
    may_call: bool


@dataclass(frozen=True)
class Reply:
    """A sampled message."""

    message: dict[str, Any]
    """In the client's form: arguments as JSON text, ``content`` ``None`` beside calls alone."""
    finish_reason: str
    completion: Completion
    said: Mapping[str, Any]
    """In the form of batches: arguments as mappings."""


@dataclass
class _Node:
    """A message of the tree of all dialogues."""

    after: dict[Hashable, _Node] = field(default_factory=dict)
    reply: _Known | None = None
    """The last reply that is this message."""


@dataclass(frozen=True)
class _Known:
    """A reply to go on from."""

    prompt: Prompt
    in_dialogue: Mapping[str, Any]
    said: Mapping[str, Any]
    completion: Completion


class ChatTokensCache:
    """The :class:`~torchrl_mt.chat.ChatTokens` of one tokenizer, one for each set of tools.

    Args:
        tokenizer: the tokenizer.
        options: options of rendering; requests add ``tools`` and template variables. ``on_break`` is
            ``"append"`` if they leave it open.
        parse: parses replies; see :class:`~torchrl_mt.chat.ChatTokens`.
        size: number of sets that are kept.
        processor: the processor of a model that takes images.

    Raises:
        TypeError: if the processor is of no supported family.
        ValueError: if it has another vocabulary than the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: ChatOptions,
        parse: ParseReply | None = None,
        size: int = 64,
        processor: Any = None,
    ) -> None:
        self.processor = None if processor is None else VisionProcessor.of(processor)
        if self.processor is not None and tokenizer is not None:
            self.processor.check_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._options = replace(options, on_break=options.on_break or "append")
        self._parse = parse
        self._size = size
        self._chats: dict[Hashable, asyncio.Task[ChatTokens]] = {}
        self._has_warned = False

    async def get(self, template_kwargs: Mapping[str, Any]) -> tuple[Hashable, ChatTokens]:
        """Return a key of the variables, and the :class:`~torchrl_mt.chat.ChatTokens`."""
        kwargs = {**(self._options.template_kwargs or {}), **template_kwargs}
        key = canonical(template_kwargs) if template_kwargs else None
        if key not in self._chats:
            if len(self._chats) >= self._size:
                del self._chats[next(iter(self._chats))]
            self._chats[key] = asyncio.ensure_future(
                call_in_thread(
                    partial(
                        replace(self._options, template_kwargs=kwargs).tokens,
                        self._tokenizer,
                        self._parse,
                        processor=self.processor,
                    )
                )
            )
            # Those who asked may be gone when it fails.
            self._chats[key].add_done_callback(lambda made: made.cancelled() or made.exception())
        try:
            chat = await asyncio.shield(self._chats[key])
        except Exception:
            self._chats.pop(key, None)
            raise
        if template_kwargs.get("tools") and not self._has_warned:
            self._has_warned = True
            chat.warn_of_tools("request")
        return key, chat

    @property
    def take_images(self) -> bool:
        """Whether messages may have images."""
        return self.processor is not None

    async def close(self) -> None:
        """Cancel what is being made."""
        making = {key: chat for key, chat in self._chats.items() if not chat.done()}
        for key in making:
            del self._chats[key]
        await cancel_all(making.values())


class Conversation:
    """The dialogues of one episode, as a tree of messages.

    Args:
        chats: converts messages to tokens.
    """

    def __init__(self, chats: ChatTokensCache) -> None:
        self._chats = chats
        self._root = _Node()

    async def prompt(self, request: ChatRequest) -> Prompt:
        """Render a request: from the longest dialogue that it goes on from, else from its beginning.

        Raises:
            RequestError: if the chat template refuses the messages or the variables, or an image
                cannot be read.
        """
        asked = await self._with_images(request.messages)
        try:
            key, chat = await self._chats.get(request.template_kwargs)
        except (TypeError, ValueError) as error:
            if not request.template_kwargs:  # It is not the request's fault.
                raise
            has_tools = "tools" in request.template_kwargs
            name = "tools" if has_tools else "chat_template_kwargs"
            raise RequestError(str(error), name) from error
        try:
            path = [key, *identities(asked)]
            known, length = self._find(path)
            before: list[Mapping[str, Any]] = []
            theirs: Mapping[str, Any] = {}
            ours: Mapping[str, Any] = {}
            if known is not None:
                before = [*known.prompt.dialogue, known.in_dialogue]
                theirs, ours = asked[length - 1], known.said
            plain = [for_template(message) for message in asked[length:]]
            new = _in_template_form(chat, plain, before, theirs, ours)
            if known is None:
                token_ids = chat.open(new)
            else:
                token_ids = chat.next_prompt(
                    before,
                    new,
                    known.prompt.token_ids,
                    known.completion.token_ids,
                    last_token=known.completion.stop_token,
                )
        except (TypeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error
        dialogue = [*before, *new]
        images = images_of(dialogue) if self._chats.take_images else []
        return Prompt(chat, token_ids, dialogue, new, images, path, request.may_call)

    async def _with_images(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """Read the images of messages."""
        if not any(map(has_images, messages)):
            return messages
        if not self._chats.take_images:
            raise RequestError(
                "messages have images, and this model takes text alone: the collector or the server "
                "needs its processor, processor=AutoProcessor.from_pretrained(...).",
                "messages",
            )
        try:
            return await call_in_thread(stored_images, messages, self._chats.processor)
        except (TypeError, ValueError) as error:
            raise RequestError(str(error), "messages") from error

    def read(self, prompt: Prompt, completion: Completion, stops: Sequence[str] = ()) -> Reply:
        """Parse a reply, and remember it for the requests that go on from it.

        Args:
            prompt: the prompt that it answers.
            completion: the sampled tokens.
            stops: strings at which the text ends.
        """
        answer = prompt.chat.read(
            completion.token_ids,
            prompt_ids=prompt.token_ids,
            messages=prompt.dialogue,
            last_token=completion.stop_token,
        )
        said = answer.message
        calls = said.get("tool_calls") if prompt.may_call else None
        if not prompt.may_call and said.get("tool_calls"):
            said = {"role": "assistant", "content": answer.text}
        said = {**said, "content": before_stop(said["content"], stops)}
        message = {key: value for key, value in said.items() if key != "tool_calls"}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for id, call in zip(_new_ids(calls, prompt.dialogue), calls, strict=True)
            ]
        reason: str = completion.finish_reason
        if calls and reason == "stop":
            reason = "tool_calls"
        node = self._root
        for identity in [*prompt.path, *identities([message])]:
            node = node.after.setdefault(identity, _Node())
        node.reply = _Known(prompt, answer.in_dialogue, answer.message, completion)
        return Reply(message, reason, completion, said)

    def _find(self, path: Sequence[Hashable]) -> tuple[_Known | None, int]:
        """Find the longest dialogue that a path goes on from; return its reply and its messages."""
        node, found, length = self._root, None, 0
        for k, identity in enumerate(path):
            if identity not in node.after:
                break
            node = node.after[identity]
            if node.reply is not None:
                found, length = node.reply, k
        return found, length


def _in_template_form(
    chat: ChatTokens,
    new: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Convert a client's messages to those that the template renders.

    Calls get ids that the template takes, and their results those ids and the names of the calls.

    Args:
        chat: writes assistant messages.
        new: the messages.
        before: the dialogue before them.
        theirs: the assistant message before them, as the client has it.
        ours: the same with our ids.
    """
    written: list[Any] = []
    # Ids of calls follow from the number of calls before.
    calls = [call for message in before for call in message.get("tool_calls") or ()]
    for is_result, run in groupby(new, key=lambda message: message["role"] == "tool"):
        messages = list(run)
        if is_result:
            pairs = zip(theirs.get("tool_calls") or (), ours.get("tool_calls") or (), strict=False)
            ids = {call.get("id"): our["id"] for call, our in pairs}
            messages = [
                {**message, "tool_call_id": ids[message["tool_call_id"]]}
                if message.get("tool_call_id") in ids
                else message
                for message in messages
            ]
            written += name_tool_results(ours, messages)
            continue
        for message in messages:
            if message["role"] == "assistant":
                theirs, message = message, chat.write(message, [{"tool_calls": calls}])
                ours = message
                calls += message.get("tool_calls") or ()
            written.append(message)
    return written


def _new_ids(
    calls: Sequence[Mapping[str, Any]], dialogue: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Ids of calls for the client, which may refuse one that it has seen before in the dialogue."""
    used = {call.get("id") for message in dialogue for call in message.get("tool_calls") or ()}
    ids: list[str] = []
    for call in calls:
        id = call["id"]
        ids.append(f"{id}-{len(dialogue)}-{len(ids)}" if id in used else id)
        used.add(id)
    return ids


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the first of the strings.

    Examples:
        >>> before_stop("one, two. three", [".", ","])
        'one'
    """
    stop = find_stop(text, stops)
    return text if stop is None else text[: text.index(stop)]
