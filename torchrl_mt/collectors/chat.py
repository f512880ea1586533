"""From chat messages to tokens, without ever rendering a conversation twice.

The opening is rendered by the tokenizer's chat template. Every later message is rendered against a
fixed two-message context and appended as tokens, so a prompt is always exactly the previous prompt,
the response as sampled, and the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTokens"]

_QUESTION, _ANSWER = "question", "ANSWER-OF-THE-ASSISTANT"
_CACHE_SIZE = 1024
_LONGEST_CACHED = 1000
"""Characters; a tool's long answer is rarely seen twice and would fill memory."""

_Key: TypeAlias = tuple[tuple[tuple[str, Any], ...], ...]
"""Messages as something that can be hashed."""
_Renderer: TypeAlias = Callable[[_Key], list[int]]


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
        self._context = self._encode(_ANSWER)
        self._closing = self._after_answer([], add_generation_prompt=False)
        self._closing_size = len(self._encode_after_answer(self._closing))
        # Conversations repeat themselves: the same rules, the same hints.
        self._open_cached = lru_cache(_CACHE_SIZE)(self._open)
        self._extend_cached = lru_cache(_CACHE_SIZE)(self._extend)

    def open(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render the beginning of a conversation, up to where the model is to answer.

        Args:
            messages: the opening messages, at least one.

        Returns:
            The prompt's tokens.
        """
        if len(messages) == 0:
            raise ValueError("messages must hold at least one message to open with, got none.")
        return self._look_up(self._open_cached, self._open, messages)

    def extend(self, messages: Sequence[Mapping[str, Any]], *, last_token: int | None) -> list[int]:
        """Render messages that follow a response, up to where the model is to answer again.

        Args:
            messages: what the environment answered; may be none.
            last_token: the stop token that the response ends with, which is not written twice;
                ``None`` if the response was cut, so that the template's own ending is added whole.

        Returns:
            The tokens between that response and the next one.
        """
        ids = self._look_up(self._extend_cached, self._extend, messages)
        closing = ids[: self._closing_size]
        sampled = closing.index(last_token) + 1 if last_token in closing else 0
        return ids[sampled:]

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a response for the environment, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _look_up(
        self, cached: _Renderer, plain: _Renderer, messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Tokens from the cache if the messages are short plain strings throughout, else rendered."""
        key = tuple(tuple(message.items()) for message in messages)
        values = [value for message in key for _, value in message]
        short = all(isinstance(value, str) for value in values) and (
            sum(map(len, values)) <= _LONGEST_CACHED
        )
        return list(cached(key) if short else plain(key))

    def _open(self, key: _Key) -> list[int]:
        """Tokens of an opening."""
        return self._encode(self._render(_messages(key), add_generation_prompt=True))

    def _extend(self, key: _Key) -> list[int]:
        """Tokens of everything between an answer's last word and the next answer."""
        text = self._after_answer(_messages(key), add_generation_prompt=True)
        if not text.startswith(self._closing):
            raise ValueError(
                "the tokenizer's chat template must render a message the same way when others follow "
                f"it; it ends an answer with {self._closing!r}, but with {text[:40]!r} before these."
            )
        return self._encode_after_answer(text)

    def _after_answer(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """What the template writes behind an answer that ``messages`` follow."""
        context = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
        text = self._render(context + messages, add_generation_prompt=add_generation_prompt)
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

    def _encode_after_answer(self, text: str) -> list[int]:
        """Tokens of text that follows an answer.

        Many tokenizers treat the beginning of a text unlike its middle (a space put in front), so an
        answer goes before it, unless its tokens cannot be told from the text's.
        """
        ids, size = self._encode(_ANSWER + text), len(self._context)
        return ids[size:] if ids[:size] == self._context else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        """Tokens of rendered text; the template writes all special tokens itself."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(key: _Key) -> list[dict[str, Any]]:
    """The messages that a key was made of."""
    return [dict(message) for message in key]
