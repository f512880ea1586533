"""Convert chat messages to tokens without re-encoding what was sampled.

A prompt is exactly the previous prompt, the response as sampled, and the tokens of the new messages.
Only if the chat template itself rewrites earlier messages may a prompt be rendered as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.encoding import RenderedTextEncoder, decode
from torchrl_mt.chat.prefix_stability import find_break
from torchrl_mt.chat.replies import ParseReply
from torchrl_mt.chat.replies.families import turn_ends
from torchrl_mt.chat.special_tokens import special_tokens
from torchrl_mt.chat.template import ChatTemplate, RefusedDialogueError, common_length
from torchrl_mt.chat.training_templates import training_template
from torchrl_mt.checks import check_choice
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import (
    for_template,
    images_of,
    is_image_part,
    refuse_videos,
    with_stored_images,
)
from torchrl_mt.vision.processor import with_processor

__all__ = ["Answer", "ChatTokens", "OnBreak", "Template", "refuse_images"]

_logger = logging.getLogger("torchrl_mt")

Template: TypeAlias = Literal["original", "training"]
"""The tokenizer's own chat template, or one that does not rewrite earlier messages."""

OnBreak: TypeAlias = Literal["fork", "append"]
"""What to do if a template rewrites earlier messages."""

_CACHE_SIZE = 1024
_LONGEST_CACHED = 1000
"""Characters. Long tool results are rarely seen twice, and would fill memory."""

_PROMPT_END = 32
"""Tokens at the end of a prompt that answers are parsed with, since they may open the thoughts."""

_Key: TypeAlias = tuple[tuple[tuple[str, Any], ...], ...]
"""Messages in a hashable form."""


@dataclass(frozen=True)
class Answer:
    """A response as text and as messages."""

    text: str
    """The sampled text without the stop token, other special tokens included."""
    message: dict[str, Any]
    """Its ``content``, and ``reasoning_content`` and ``tool_calls`` (with ids) if it has them."""
    in_dialogue: dict[str, Any]
    """The message in the form that the chat template renders."""


class ChatTokens:
    """Converts the messages of growing conversations to tokens.

    A template is prefix-stable if it never rewrites earlier messages; this is tested once, on short
    dialogues. Names of special tokens in messages, tools or documents are encoded as ordinary text, so
    no message can end its turn, begin another or show an image. See :doc:`/chat_templates`.

    Args:
        tokenizer: a tokenizer with a chat template and an end-of-turn token (``eos_token``).
        on_break: what :meth:`follow` does if the template is not prefix-stable. ``"fork"`` renders a
            dialogue again if the template rewrites it; ``"append"`` never does, so the model keeps
            seeing earlier turns exactly as they were.
        template: ``"original"`` is the tokenizer's own. ``"training"`` is made from it and keeps the
            thoughts of earlier turns. See :attr:`source`.
        template_kwargs: further arguments of ``tokenizer.apply_chat_template`` for every rendering, of
            plain data: ``tools`` (JSON schemas or functions), ``documents``, and variables of the
            template such as ``enable_thinking``. Variables that the template does not read change
            nothing.
        parse: parses the text of a response, special tokens included, into a
            :class:`~torchrl_mt.chat.replies.ParsedReply`. If ``None``, the tokenizer's response template
            or the model family's notation is used.
        processor: the processor of a model that takes images, whose chat template is used then. Prompts
            have one placeholder for each token of an image (:doc:`/images`).

    Attributes:
        breaks: an example of how the template rewrites a dialogue; ``None`` if it is prefix-stable.

    Raises:
        TypeError: if ``template_kwargs`` are not plain data, or the processor is of no supported family.
        ValueError: if the tokenizer has no chat template or no ``eos_token``, or is not the processor's,
            its template leaves out what the assistant says, there is no training template, or an
            argument is unknown or one of rendering itself (``tokenize``...).

    Examples:
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> tokenizer = tiny_chat_tokenizer("guess higher 8")
        >>> chat = ChatTokens(tokenizer)
        >>> tokenizer.decode(chat.open([{"role": "user", "content": "guess"}]))
        '<user> guess <end> <assistant>'
        >>> chat.stable
        True
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        on_break: OnBreak = "fork",
        template: Template = "original",
        template_kwargs: Mapping[str, Any] | None = None,
        parse: ParseReply | None = None,
        processor: Any = None,
    ) -> None:
        tokenizer, vision = with_processor(tokenizer, processor)
        self._vision = vision
        has_template = vision is not None and vision.chat_template is not None
        if tokenizer is None or (tokenizer.chat_template is None and not has_template):
            raise ValueError(
                f"tokenizer ({type(tokenizer).__name__}) must have a chat template, got none: "
                "set tokenizer.chat_template, or use a chat model's tokenizer."
            )
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer ({type(tokenizer).__name__}) must have an end-of-turn token, got "
                "eos_token=None: set tokenizer.eos_token."
            )
        check_choice("on_break", on_break, get_args(OnBreak))
        check_choice("template", template, get_args(Template))
        self._tokenizer = tokenizer
        self.on_break = on_break
        self._has_warned = False
        names = special_tokens(tokenizer) | (set() if vision is None else vision.placeholders)
        self._special_ids: set[Any] = set(map(tokenizer.convert_tokens_to_ids, names))
        self._stop_ids: set[Any] = set(map(tokenizer.convert_tokens_to_ids, turn_ends(tokenizer)))
        opening = [] if vision is None else vision.beginning
        self._encoder = RenderedTextEncoder(tokenizer, self._special_ids, opening)
        self._template = ChatTemplate(tokenizer, template_kwargs, parse=parse, vision=vision)
        if template == "training":
            self._template, self.breaks = training_template(self._template)
        else:
            self.breaks = find_break(self._template)
        self._closing = self._end_of_turn(self._encoder.middle(self._template.closing))
        self._stop_ids |= self._special_ids.intersection(self._closing)
        # Messages repeat across conversations: the same rules, the same hints.
        self._cached_tokens = lru_cache(_CACHE_SIZE)(self._render_tokens)

    @property
    def stable(self) -> bool:
        """Whether the template is prefix-stable: it never rewrites earlier messages."""
        return self.breaks is None

    @property
    def takes_images(self) -> bool:
        """Whether messages may have images."""
        return self._vision is not None

    @property
    def source(self) -> str:
        """The chat template in use.

        To serve a trained model with the dialogues that it was trained on, set
        ``tokenizer.chat_template`` to it and save the tokenizer.
        """
        return self._template.source

    def announce(self) -> None:
        """Log whether the template is prefix-stable, and what it costs if not."""
        if self.breaks is None:
            _logger.info("the chat template is prefix-stable: an episode is one row.")
        elif self.on_break == "append":
            self._warn(
                "an episode is one row, whose earlier turns stay as the model saw and said them"
            )
        else:
            self._warn(
                "every turn where it does so begins a row of its own: an episode of T turns is up to T "
                'rows, which repeat its beginning. template="training" and on_break="append" keep one'
            )

    def warn_of_tools(self, whose: str) -> None:
        """Log that the template shows the model no tools, if it reads none."""
        if "tools" not in self.source:
            _logger.warning(
                "the chat template reads no tools, so the model is not told of those of the %s: say in "
                "the messages what they are and how they are called.",
                whose,
            )

    def open(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render the opening of a conversation with the generation prompt.

        Args:
            messages: the opening messages, at least one.

        Returns:
            The prompt's tokens.

        Raises:
            ValueError: if there are no messages, the template refuses one of them, or they have images
                and there is no processor.
            TypeError: if a message holds anything but plain data and images.
        """
        if len(messages) == 0:
            raise ValueError("messages must hold at least one message to open with, got none.")
        messages, images = self._separated(messages)
        return self._expanded(self._tokens(messages, opens=True), images)

    def extend(self, messages: Sequence[Mapping[str, Any]], *, last_token: int | None) -> list[int]:
        """Render the messages after a response with the next generation prompt.

        Args:
            messages: the environment's messages; may be empty.
            last_token: the stop token that the response ends with, which is not written twice;
                ``None`` if the response was cut, so that the end of its turn is added.

        Returns:
            The tokens between that response and the next one.

        Raises:
            ValueError: if the template refuses one of the messages, or they have images and there is no
                processor.
            TypeError: if a message holds anything but plain data and images.
        """
        messages, images = self._separated(messages)
        return self._after_answer(self._tokens(messages, opens=False), images, last_token)

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        *,
        last_token: int | None,
    ) -> list[int]:
        """Tokens of the whole prompt after a response to ``prompt_ids``; see :meth:`follow`."""
        goes_on, ids = self.follow(messages, new_messages, answer_ids, last_token=last_token)
        return [*prompt_ids, *answer_ids, *ids] if goes_on else ids

    def follow(
        self,
        messages: Sequence[Mapping[str, Any]],
        new_messages: Sequence[Mapping[str, Any]],
        answer_ids: Sequence[int],
        *,
        last_token: int | None,
    ) -> tuple[bool, list[int]]:
        """Render the next prompt: as a continuation of a response, or as a whole.

        If the template is prefix-stable or ``on_break`` is ``"append"``, the cost is linear in the new
        messages alone.

        Args:
            messages: the dialogue, the response as its last message (:attr:`Answer.in_dialogue`).
            new_messages: the environment's messages; may be empty.
            answer_ids: the response as it was sampled.
            last_token: the stop token that the response ends with; ``None`` if it was cut.

        Returns:
            ``True`` and the tokens after the response; or ``False`` and the whole next prompt, if
            ``on_break`` is ``"fork"`` and the template rewrites this dialogue.

        Raises:
            ValueError: if ``messages`` does not end with a question and the assistant's answer, or the
                template refuses the dialogue.
        """
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise ValueError(
                "messages must hold the dialogue up to the response, whose role is 'assistant', got "
                f"the roles {[message.get('role') for message in messages]}."
            )
        new_messages, images = self._separated(new_messages)
        shown: list[StoredImage] = []
        if self._vision is not None:
            messages, shown = self._separated(messages)
        text = self.text(answer_ids, last_token=last_token)
        if last_token is None and len(answer_ids) and answer_ids[-1] in self._stop_ids:
            last_token = answer_ids[-1]  # A stop string may name the token that ends a turn.
        stop = "" if last_token is None else decode(self._tokenizer, [last_token])
        # A prefix-stable template may still have no field for a part of this answer.
        stable = self.stable and not self._template.answers.loses(messages[-1])
        # A template may number images, so that the fixed context does not do for them.
        fixed = self._template.images_are_local or not (shown or images)
        if fixed and (stable or self.on_break == "append"):
            if not stable:
                self._warn("earlier turns stay in view as the model saw and said them")
            results = any(message.get("role") == "tool" for message in new_messages)
            if messages[-1].get("tool_calls") and results:
                # The rendering of a tool's result may depend on the call.
                behind = self._template.behind_calls(messages, text, new_messages, stop=stop)
                if behind is not None:
                    return True, self._after_answer(
                        self._encoder.middle(behind), images, last_token
                    )
            # The fixed context may not allow these messages: a tool's result without its call.
            with suppress(RefusedDialogueError):
                ids = self._tokens(new_messages, opens=False)
                return True, self._after_answer(ids, images, last_token)
        whole, behind = self._template.follow(messages, text, new_messages, stop=stop)
        if behind is not None:
            return True, self._after_answer(self._encoder.middle(behind), images, last_token)
        if self.on_break == "append":
            ids = self._tokens(new_messages, opens=False)
            return True, self._after_answer(ids, images, last_token)
        self._warn("such a dialogue is rendered again and goes on in a row of its own")
        return False, self._expanded(self._encoder.beginning(whole), [*shown, *images])

    def read(
        self,
        answer_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]] = (),
        last_token: int | None = None,
    ) -> Answer:
        """Parse a response.

        Args:
            answer_ids: the response as it was sampled.
            prompt_ids: the prompt of the response, or its end, which may open the thoughts.
            messages: the dialogue so far; the ids of new tool calls follow from its number of calls.
            last_token: see :meth:`text`.

        Returns:
            The response as text and as messages. The content is the whole text if the response cannot be
            parsed; see :func:`~torchrl_mt.chat.replies.parse_tool_calls`.
        """
        text = self.text(answer_ids, last_token=last_token)
        before = decode(self._tokenizer, list(prompt_ids[-_PROMPT_END:]))
        reply, in_dialogue = self._template.read(text, before, messages)
        return Answer(text, reply.message(), in_dialogue)

    def write(
        self, message: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Convert an assistant message that was not sampled to the form that the template renders.

        Args:
            message: the message; arguments of ``tool_calls`` as mappings. Ids are replaced.
            messages: the dialogue before it.
        """
        return self._template.write(message, messages)

    def text(self, token_ids: Sequence[int], *, last_token: int | None = None) -> str:
        """Decode a response without its stop token, other special tokens included.

        Args:
            token_ids: the response as it was sampled.
            last_token: the stop token that it ends with; needed only if neither the model family nor
                the chat template ends turns with it.
        """
        ids = list(token_ids)
        if ids and (ids[-1] in self._stop_ids or ids[-1] == last_token):
            ids.pop()
        return decode(self._tokenizer, ids)

    def _separated(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], list[StoredImage]]:
        """Messages as templates read them, and their images."""
        if self._vision is None:
            refuse_images(messages)
            return messages, []
        stored = with_stored_images(messages)
        return for_template(stored), images_of(stored)

    def _expanded(self, ids: list[int], images: Sequence[StoredImage]) -> list[int]:
        """Tokens with a placeholder for each token of an image."""
        return ids if self._vision is None else self._vision.expanded(ids, images)

    def _after_answer(
        self, ids: list[int], images: Sequence[StoredImage], last_token: int | None
    ) -> list[int]:
        """Those of the tokens after an answer that it has not ended with: ``last_token``."""
        return self._expanded(self._without_sampled(ids, last_token), images)

    def _tokens(self, messages: Sequence[Mapping[str, Any]], *, opens: bool) -> list[int]:
        """Tokens of messages; cached if all values are strings and short."""
        key = tuple(tuple(message.items()) for message in messages)
        values = [value for message in key for _, value in message]
        short = all(isinstance(value, str) for value in values) and (
            sum(map(len, values)) <= _LONGEST_CACHED
        )
        return list((self._cached_tokens if short else self._render_tokens)(key, opens))

    def _render_tokens(self, key: _Key, opens: bool) -> list[int]:
        """Tokens of an opening, or of everything between two answers."""
        messages = [dict(message) for message in key]
        if opens:
            return self._encoder.beginning(self._template.render(messages))
        return self._encoder.middle(self._template.after_context(messages))

    def _without_sampled(self, ids: list[int], last_token: int | None) -> list[int]:
        """Drop the tokens that the answer itself has ended with."""
        # Some models end a turn with the token that begins the next.
        closing = ids[: max(common_length(self._closing, ids), 1)]
        sampled = closing.index(last_token) + 1 if last_token in closing else 0
        return ids[sampled:]

    def _end_of_turn(self, closing: list[int]) -> list[int]:
        """The tokens that end a turn, up to the last special token."""
        special = [k for k, token in enumerate(closing) if token in self._special_ids]
        return closing[: special[-1] + 1] if special else closing

    def _warn(self, consequence: str) -> None:
        """Warn once that the template is not prefix-stable."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the tokenizer's chat template is not prefix-stable: %s. With on_break=%r %s.",
                *(self.breaks or "it rewrites this dialogue", self.on_break, consequence),
            )


def refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages with images, for which there is no processor, and with videos.

    Raises:
        ValueError: if a message has an image or a video; names it.
    """
    for k, message in enumerate(messages):
        refuse_videos(message, k)
        content = message.get("content")
        if isinstance(content, (list, tuple)) and any(map(is_image_part, content)):
            raise ValueError(
                f"messages must be text where there is no processor, got an image in message {k} of "
                f"{len(messages)} (role {message.get('role')!r}): give the model's processor, "
                "processor=AutoProcessor.from_pretrained(...), or describe it in text."
            )
