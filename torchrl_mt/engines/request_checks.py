"""Checks that all engines make of their sizes and of requests."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_mt.checks import check_positive, check_token_ids
from torchrl_mt.engines.sampling import checked_number

__all__ = ["checked_request", "require_positive"]


def require_positive(**numbers: float | None) -> None:
    """Require numbers above 0; ``None`` passes.

    Raises:
        ValueError: names the first number that is not above 0.
    """
    for name, value in numbers.items():
        if value is not None:
            check_positive(name, value)


def checked_request(
    prompt_ids: Sequence[int],
    max_new_tokens: int | None,
    *,
    longest: int,
    total: int | None,
    bound: str,
    vocab_size: int | None = None,
) -> tuple[list[int], int]:
    """Check a request, and set the length of its response where none is given.

    Args:
        prompt_ids: tokens of the prompt.
        max_new_tokens: maximum length of the response; if ``None``, ``longest`` or the room that the
            prompt leaves, whichever is less.
        longest: the engine's limit of a response.
        total: limit of prompt and response together; ``None`` is no limit.
        bound: the limit ``total`` in words, for the error message.
        vocab_size: size of the vocabulary; ``None`` if unknown.

    Returns:
        The prompt as a list, and the maximum length of its response.

    Raises:
        TypeError: if ``prompt_ids`` are no integers, or ``max_new_tokens`` is none.
        ValueError: if the prompt is empty or not in the vocabulary, ``max_new_tokens`` is below 1, or
            both together exceed ``total``.

    Examples:
        >>> checked_request([1, 2], None, longest=9, total=8, bound="8 tokens")
        ([1, 2], 6)
    """
    prompt, limit = check_token_ids(prompt_ids), max_new_tokens
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
