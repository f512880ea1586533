"""How rows are cut into forward passes of a model: the same settings for every call that scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

AUTOCAST_DTYPES = (None, torch.bfloat16, torch.float16)
"""What ``dtype`` may be: ``None`` computes in the types that the model has."""


@dataclass(frozen=True)
class Passes:
    """Settings of forward passes over rows; one may be shared by a maker, a loss and reward models.

    Args:
        packed: Put several rows into one sequence instead of padding each to the longest. The model's
            attention must keep them apart, which is tried once with a few tokens. Reward models get
            their rows padded in any case.
        micro_batch_size: Most sequences (rows, or packs of rows) of one pass; no limit by default.
        micro_batch_tokens: Most tokens of one pass, padding included; no limit by default. A longer
            row is a pass of its own.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for automatic mixed precision; by default the
            model's own types. Softmax, values and losses are in float32 in any case.

    Raises:
        ValueError: If a limit is below 1, or ``dtype`` is another one.

    Examples:
        >>> Passes(packed=True, micro_batch_tokens=32_768)
        Passes(packed=True, micro_batch_size=None, micro_batch_tokens=32768, dtype=None)
    """

    packed: bool = False
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batch_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {limit}.")
        if self.dtype not in AUTOCAST_DTYPES:
            raise ValueError(
                f"dtype must be torch.bfloat16, torch.float16 or None, got {self.dtype}; None computes "
                "in the model's own types."
            )


def find_passes(
    passes: Passes | None,
    keywords: Mapping[str, Any],
    known: Sequence[str] = ("packed", "micro_batch_size", "micro_batch_tokens", "dtype"),
) -> Passes:
    """Take settings as one record, or as keywords of those of its fields that are ``known``.

    Both at once, and an unknown keyword, are a ``TypeError``.

    Examples:
        >>> find_passes(None, {"packed": True}) == Passes(packed=True)
        True
        >>> find_passes(Passes(), {"packed": True})
        Traceback (most recent call last):
        TypeError: passes and packed cannot both be given; write passes=Passes(packed=...).
    """
    unknown = [name for name in keywords if name not in known]
    if unknown:
        raise TypeError(
            f"{unknown[0]} is no argument; those of forward passes are passes=Passes(...) or one by one "
            f"{', '.join(known)}."
        )
    if passes is None:
        return Passes(**keywords)
    if not isinstance(passes, Passes):
        raise TypeError(f"passes must be a Passes, got {passes!r}.")
    if keywords:
        name = next(iter(keywords))
        raise TypeError(f"passes and {name} cannot both be given; write passes=Passes({name}=...).")
    return passes
