"""Encode and decode parts of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.special_tokens import BREAK

__all__ = ["RenderedTextEncoder", "decode", "decode_each"]

_WORD = "ANSWER-OF-THE-ASSISTANT"
"""Context before a text while it is encoded."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode tokens, special ones included."""
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def decode_each(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    """Decode tokens one by one; joined, they are the text of all.

    A character of several tokens is the text of the last one, and the others are empty.

    Args:
        tokenizer: the tokenizer.
        token_ids: the tokens.
        before: tokens before them. Many tokenizers decode the first word of a text unlike others.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    context, ids = [int(token) for token in before[-1:]], [int(token) for token in token_ids]
    if backend is None:  # Written in Python.
        seen = [*context, *ids]
        ends = range(len(context), len(seen))
        windows = [(seen[max(k - 8, 0) : k + 1], seen[max(k - 8, 0) : k]) for k in ends]
        return [decode(tokenizer, long)[len(decode(tokenizer, short)) :] for long, short in windows]
    stream = DecodeStream(skip_special_tokens=False)
    for token in context:
        stream.step(backend, token)
    return [stream.step(backend, token) or "" for token in ids]


class RenderedTextEncoder:
    """Encodes the text that a chat template has written, special tokens included.

    Many tokenizers encode the beginning of a text unlike its middle (by a space in front). So text from
    the middle of a prompt is encoded after a context, whose tokens are then removed.

    Args:
        tokenizer: the tokenizer.
        special_ids: its special tokens.
        opening: tokens before every prompt whose text does not begin with the beginning-of-text token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special_ids: set[int],
        opening: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._opening = list(opening)
        end = str(tokenizer.eos_token)
        self._before = [(end, self._encode(end))]
        try:
            word = self._encode(_WORD)
        except Exception:  # A tokenizer may refuse unknown words.
            return
        # An answer's text is the truest context, unless it is encoded as unknown.
        if not special_ids.intersection(word):
            self._before.insert(0, (_WORD, word))

    def beginning(self, text: str) -> list[int]:
        """Encode text at the beginning of a prompt."""
        first, *others = text.split(BREAK)
        bos = self._tokenizer.bos_token if self._opening else None
        is_begun = bos is not None and first.startswith(str(bos))
        opening = [] if is_begun else self._opening
        return [
            *opening,
            *self._encode(first),
            *chain.from_iterable(map(self._encode_within, others)),
        ]

    def middle(self, text: str) -> list[int]:
        """Encode text that follows other text."""
        return list(chain.from_iterable(map(self._encode_within, text.split(BREAK))))

    def with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode text at the beginning of a prompt, and find the characters of each token.

        Tokenizers may leave white space out of a token's place. Here it belongs to the token after it.

        Args:
            text: what :meth:`beginning` takes.

        Returns:
            The tokens, and for each the index of its first character and of the one after its last.
        """
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        start = end = 0
        for k, part in enumerate(text.split(BREAK)):
            found, offsets = self._encode_part(part, within=k > 0)
            ids += found
            for first, last in offsets:
                places.append((min(start + first, end), max(start + last, end)))
                end = places[-1][1]
            start += len(part) + len(BREAK)
            end = max(end, start - len(BREAK))
        return ids, places

    def _encode_part(self, text: str, *, within: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text and their places in it."""
        for before, expected in [*(self._before if within else []), ("", [])]:
            encoded = self._tokenizer(
                before + text, add_special_tokens=False, return_offsets_mapping=True
            )
            ids, places = list(encoded["input_ids"]), encoded["offset_mapping"]
            if ids[: len(expected)] == expected:
                break
        skipped = len(before)
        return ids[len(expected) :], [
            (max(first - skipped, 0), max(last - skipped, 0))
            for first, last in places[len(expected) :]
        ]

    def _encode_within(self, text: str) -> list[int]:
        for before, expected in self._before:
            ids = self._encode(before + text)
            if ids[: len(expected)] == expected:
                return ids[len(expected) :]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        """Encode a text by itself; the template has already written all special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
