"""Stop strings: text that ends a response.

The promise: a response ends with the first token at which its decoded text contains one of the strings,
however tokens spell them. Each token costs the decoding of a few tokens, not of the whole response.

transformers' ``StopStringCriteria`` also looks into the prompt, and it does not find a character that
several tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchrl_mt.chat.encoding import decode

__all__ = ["StopStrings", "checked_stop", "find_stop", "watch"]

_MARGIN = 8
"""Characters at the beginning of a part that may decode differently than in the whole text."""
_SHARED = 4
"""Most tokens that share a character, since UTF-8 has at most 4 bytes."""
_UNDECODED = "\ufffd"
"""What bytes decode to that are no character, or not yet."""
_MOST, _LONGEST = 256, 1024
"""Most stop strings of a request, and the most characters of one: all requests wait for the search."""
_UNSETTLED = 64
"""Number of further tokens after which bytes that are no character are believed to stay so."""


def checked_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Check a request's ``stop``; returns its strings.

    Raises:
        TypeError: if it is neither a string nor a sequence of strings.
        ValueError: if a string is empty, or there are too many or too long ones.

    Examples:
        >>> checked_stop("END"), checked_stop(["a", "b"]), checked_stop(None)
        (('END',), ('a', 'b'), ())
    """
    strings = (stop,) if isinstance(stop, str) else stop if stop is not None else ()
    if not isinstance(strings, Sequence) or isinstance(strings, (bytes, bytearray)):
        raise TypeError(f"stop must be a string or a list of strings, got {stop!r}.")
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop must be a string or a list of strings, got {string!r} in it.")
        if not string:
            raise ValueError(
                "stop must hold no empty string, which would end every response: got ''."
            )
    if len(strings) > _MOST or max(map(len, strings), default=0) > _LONGEST:
        raise ValueError(
            f"stop must hold at most {_MOST} strings of at most {_LONGEST} characters, got "
            f"{len(strings)} of up to {max(map(len, strings))}."
        )
    return tuple(strings)


def find_stop(text: str, strings: Sequence[str]) -> str | None:
    """The string that begins first in a text, the longest if several do; ``None`` if there is none.

    Examples:
        >>> find_stop("to be or not", ["or", "be", "be or"])
        'be or'
    """
    found = [string for string in strings if string in text]
    return min(found, key=lambda string: (text.find(string), -len(string)), default=None)


class StopStrings:
    """Looks for stop strings in a response, token by token.

    Args:
        strings: at least one; none is empty.
        decode: decodes tokens to text.

    Examples:
        >>> stops = StopStrings(["b c"], lambda tokens: " ".join(map("abcd".__getitem__, tokens)))
        >>> [stops.ended_by(token) for token in (0, 1, 2)], stops.found
        ([False, False, True], 'b c')
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.found: str | None = None
        """The string that ended the response."""
        self.num_tokens = 0
        """Number of tokens so far."""
        self._strings = strings
        self._decode = decode
        # The end of the response that is decoded again with every token, and its text.
        self._tail: list[int] = []
        self._text = ""
        self._room = max(map(len, strings)) + _MARGIN
        self._shorten_at = 2 * self._room

    def ended_by(self, token: int) -> bool:
        """Add a token to the response; whether its text now contains a stop string."""
        self.num_tokens += 1
        self._tail.append(token)
        text = self._decode(self._tail)
        # A token without text, such as an id beyond the vocabulary. Twice, since some tokenizers drop
        # the first space.
        if text == self._text and not self._decode([token, token]):
            self._tail.pop()
            return False
        self._text = text
        self.found = find_stop(text, self._strings)
        if self.found is None and len(text) >= self._shorten_at:
            self._shorten()
        return self.found is not None

    def _shorten(self) -> None:
        """Drop the older half of the tail, if the rest decodes to the same text and is long enough."""
        tail, text = self._tail, self._text
        # A last character that is not complete may change the text before it as well.
        if text.endswith(_UNDECODED) and len(tail) < _SHARED * self._shorten_at + _UNSETTLED:
            return
        for start in range(len(tail) // 2, min(len(tail) // 2 + _SHARED, len(tail))):
            rest = self._decode(tail[start:])
            if len(rest) >= self._room and text.endswith(rest):
                self._tail, self._text = tail[start:], rest
                self._shorten_at = 2 * self._room
                return
        self._shorten_at = len(text) + self._room


def watch(strings: Sequence[str], tokenizer: Any) -> StopStrings | None:
    """Look for a request's stop strings in the tokens of its response; ``None`` if it has none."""
    return StopStrings(strings, partial(decode, tokenizer)) if strings else None
