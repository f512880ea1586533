"""From chat messages to tokens, without ever rendering a conversation twice.

The opening is rendered by the tokenizer's chat template. Every later message is rendered against a
fixed two-message context and appended as tokens, so a prompt is always exactly the previous prompt,
the response as sampled, and the new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTokens"]

_QUESTION, _ANSWER = "question", "ANSWER-OF-THE-ASSISTANT"


class ChatTokens:
    """Tokens of chat messages, as a conversation grows.

    Args:
        tokenizer: a tokenizer with a chat template and an end-of-turn token (``eos_token``).

    Raises:
        ValueError: if the tokenizer has no chat template or no ``eos_token``, or if its template
            renders a message differently once another follows it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError(
                f"tokenizer ({type(tokenizer).__name__}) must have a chat template, got none: "
                "set tokenizer.chat_template, or use a chat model's tokenizer."
            )
        if tokenizer.eos_token is None:
            raise ValueError(
                f"tokenizer ({type(tokenizer).__name__}) must have an end-of-turn token, got "
                "eos_token=None: set tokenizer.eos_token."
            )
        self._tokenizer = tokenizer
        self._closing = self._after_answer([])
        before, end, _ = self._closing.partition(str(tokenizer.eos_token))
        # Where the end-of-turn token stops: a model that ended its answer has sampled it already.
        self._end_of_turn = len(before + end) if end else 0
        # Conversations repeat themselves: the same rules, the same hints.
        self._open_cached = lru_cache(4096)(self._open)
        self._extend_cached = lru_cache(4096)(self._extend)

    def open(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render the beginning of a conversation, up to where the model is to answer.

        Args:
            messages: the opening messages, at least one.

        Returns:
            The prompt's tokens.
        """
        if len(messages) == 0:
            raise ValueError("messages must hold at least one message to open with, got none.")
        return list(self._call(self._open_cached, self._open, messages))

    def extend(self, messages: Sequence[Mapping[str, Any]], *, ended: bool) -> list[int]:
        """Render messages that follow a response, up to where the model is to answer again.

        Args:
            messages: what the environment answered.
            ended: whether the response ends with a sampled end-of-turn token; if not, one is added.

        Returns:
            The tokens between that response and the next one.
        """
        return list(self._call(self._extend_cached, self._extend, messages, ended))

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a response for the environment, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _call(
        self, cached: Any, plain: Any, messages: Sequence[Mapping[str, Any]], *args: Any
    ) -> Any:
        """Look the tokens up if the messages are plain strings throughout, else render them."""
        key = tuple(tuple(message.items()) for message in messages)
        simple = all(isinstance(value, str) for message in key for _, value in message)
        return cached(key, *args) if simple else plain(key, *args)

    def _open(self, key: tuple[tuple[tuple[str, Any], ...], ...]) -> list[int]:
        """Tokens of an opening."""
        text = self._render([dict(message) for message in key], add_generation_prompt=True)
        return self._encode(text)

    def _extend(self, key: tuple[tuple[tuple[str, Any], ...], ...], ended: bool) -> list[int]:
        """Tokens of a continuation."""
        text = self._after_answer([dict(message) for message in key])
        if not text.startswith(self._closing):
            raise ValueError(
                "the tokenizer's chat template must render a message the same way when others follow "
                f"it; it ends an answer with {self._closing!r}, but with {text[:40]!r} before these."
            )
        return self._encode(text[self._end_of_turn :] if ended else text)

    def _after_answer(self, messages: list[dict[str, Any]]) -> str:
        """What the template writes behind an answer; with messages, up to the next answer."""
        context = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        text = self._render(context + messages, add_generation_prompt=bool(messages))
        head, found, tail = text.partition(_ANSWER)
        if not found:
            raise ValueError(
                "the tokenizer's chat template must write the assistant's content as it is, got "
                f"{head[:80]!r}."
            )
        return tail

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Text of a conversation."""
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _encode(self, text: str) -> list[int]:
        """Tokens of rendered text; the template writes all special tokens itself."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
