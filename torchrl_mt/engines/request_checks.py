"""What every engine asks of its sizes, and of a request before it is queued or sent."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

__all__ = ["checked_request", "integers", "require_positive"]


def require_positive(**numbers: float | None) -> None:
    """Refuse numbers that are not above 0; ``None`` says nothing.

    Raises:
        ValueError: if one is not; it is named.
    """
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def integers(tokens: Iterable[int], name: str = "prompt_ids") -> list[int]:
    """Token ids as plain integers, whatever sequence they come in.

    Raises:
        TypeError: if they are none.
    """
    # An array would take bytes for its memory, and rows of one token each for numbers.
    if not isinstance(tokens, (bytes, bytearray)) and getattr(tokens, "ndim", 1) == 1:
        try:
            # An array refuses what is no integer, and is faster than a loop.
            return array("q", tokens).tolist()
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name} must be a flat sequence of token ids, got {_advice(tokens)}.")


def _advice(tokens: Any) -> str:
    """What came instead of token ids, and what to do about it."""
    came = type(tokens).__name__
    if isinstance(tokens, Mapping):
        return f"{came}: of a tokenizer's output take ['input_ids']"
    if isinstance(tokens, (str, bytes, bytearray)):
        return f"{came}: tokenize it first"
    if getattr(tokens, "ndim", 1) > 1:
        return f"{came} of shape {list(tokens.shape)}: take one row of it"
    if isinstance(tokens, Sequence):
        for entry in tokens:
            if isinstance(entry, Sequence) and not isinstance(entry, (str, bytes, bytearray)):
                return f"{came} of {type(entry).__name__}: take one row of it"
            if not isinstance(entry, Integral):
                return f"{came} of {_advice(entry)}"
    return came


def checked_request(
    prompt_ids: Sequence[int],
    max_new_tokens: int | None,
    *,
    longest: int,
    total: int | None,
    bound: str,
    vocab_size: int | None = None,
) -> tuple[list[int], int]:
    """A prompt, and how long its answer may be.

    Args:
        prompt_ids: the tokens that the model is to see.
        max_new_tokens: longest answer; if ``None``, ``longest`` or what room there is.
        longest: the engine's own limit of an answer.
        total: most tokens of prompt and answer together, if there is such a limit.
        bound: that limit in words, which end the error.
        vocab_size: how many tokens there are, if that is known.

    Raises:
        TypeError: if ``prompt_ids`` are no integers.
        ValueError: if the prompt is empty or not in the vocabulary, ``max_new_tokens`` is below 1, or
            both together exceed ``total``.

    Examples:
        >>> checked_request([1, 2], None, longest=9, total=8, bound="8 tokens")
        ([1, 2], 6)
    """
    prompt, limit = integers(prompt_ids), max_new_tokens
    if limit is None:
        limit = longest if total is None else min(longest, max(1, total - len(prompt)))
    if not prompt:
        raise ValueError("prompt_ids must hold at least one token, got none.")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        known = "from 0 on" if vocab_size is None else f"in 0..{vocab_size - 1}"
        raise ValueError(
            f"prompt_ids must be token ids {known}, got {lowest if lowest < 0 else highest}: do model "
            "and tokenizer belong together?"
        )
    if limit < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {limit}.")
    if total is not None and len(prompt) + limit > total:
        raise ValueError(
            f"prompt_ids of {len(prompt)} tokens and max_new_tokens={limit} exceed {bound}."
        )
    return prompt, limit
