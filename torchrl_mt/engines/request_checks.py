"""Checks that all engines make of their sizes and of requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torchrl_mt.checks import check_positive
from torchrl_mt.engines.sampling import checked_number

__all__ = ["checked_request", "integers", "require_positive"]


def require_positive(**numbers: float | None) -> None:
    """Require numbers above 0; ``None`` passes.

    Raises:
        ValueError: names the first number that is not above 0.
    """
    for name, value in numbers.items():
        if value is not None:
            check_positive(name, value)


def integers(tokens: Iterable[int], name: str = "prompt_ids") -> list[int]:
    """Convert a sequence of token ids to a list of integers.

    Raises:
        TypeError: if ``tokens`` is no flat sequence of integers.
    """
    # An array would read bytes as raw memory, and rows of one token each as numbers.
    if not isinstance(tokens, (bytes, bytearray)) and getattr(tokens, "ndim", 1) == 1:
        try:
            # An array accepts only integers, and is faster than a loop.
            return array("q", tokens).tolist()
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name} must be a flat sequence of token ids, got {_advice(tokens)}.")


def _advice(tokens: Any) -> str:
    """The type that came instead of token ids, and how to fix it."""
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
    """Check a request, and set the length of its answer where none is given.

    Args:
        prompt_ids: tokens of the prompt.
        max_new_tokens: maximum length of the answer; if ``None``, ``longest`` or the room that the
            prompt leaves, whichever is less.
        longest: the engine's limit of an answer.
        total: limit of prompt and answer together; ``None`` is no limit.
        bound: the limit ``total`` in words, for the error message.
        vocab_size: size of the vocabulary; ``None`` if unknown.

    Returns:
        The prompt as a list, and the maximum length of its answer.

    Raises:
        TypeError: if ``prompt_ids`` are no integers, or ``max_new_tokens`` is none.
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
    limit = checked_number("max_new_tokens", limit)
    if total is not None and len(prompt) + limit > total:
        raise ValueError(
            f"prompt_ids of {len(prompt)} tokens and max_new_tokens={limit} exceed {bound}."
        )
    return prompt, limit
