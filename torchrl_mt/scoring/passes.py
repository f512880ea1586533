"""Settings of forward passes over rows, shared by all calls that score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchrl_mt.checks import did_you_mean

SCORED_AT_ONCE = 32_768
"""Tokens of a pass that keeps nothing for a backward pass, with ``micro_batch_tokens="auto"``."""
AUTOCAST_DTYPES = (None, torch.bfloat16, torch.float16)
"""Values of ``dtype``; ``None`` computes in the model's own types."""


@dataclass(frozen=True)
class Passes:
    """Settings of forward passes over rows, for makers, losses and reward models.

    Args:
        packed: Put several rows into one sequence instead of padding. The model's attention must keep
            them apart, which is tested once with a few tokens. Rows for reward models are always
            padded.
        micro_batch_size: Maximum sequences (rows, or packs of rows) per pass; no limit by default.
        micro_batch_tokens: Maximum tokens per pass, padding included; ``None`` is no limit. A longer row
            is a pass of its own. ``"auto"``: 32,768 for scores; in
            :class:`~torchrl_mt.objectives.MultiTurnLoss` as many as keep 512 MiB of activations, on CUDA
            a quarter of the device's memory.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for automatic mixed precision; by default the
            model's own types. Softmax, values and losses are always in float32.

    Raises:
        ValueError: If a limit is below 1, or ``dtype`` is not supported.

    Examples:
        >>> Passes(packed=True)
        Passes(packed=True, micro_batch_size=None, micro_batch_tokens='auto', dtype=None)
    """

    packed: bool = False
    micro_batch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = "auto"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batch_tokens"):
            limit = getattr(self, name)
            if limit == "auto" and name == "micro_batch_tokens":
                continue
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {limit}.")
        if self.dtype not in AUTOCAST_DTYPES:
            raise ValueError(
                f"dtype must be torch.bfloat16, torch.float16 or None, got {self.dtype}; None computes "
                "in the model's own types."
            )

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens per pass for scores."""
        return SCORED_AT_ONCE if self.micro_batch_tokens == "auto" else self.micro_batch_tokens


def find_passes(
    passes: Passes | None,
    keywords: Mapping[str, Any],
    known: Sequence[str] = ("packed", "micro_batch_size", "micro_batch_tokens", "dtype"),
    caller: Callable[..., object] | None = None,
) -> Passes:
    """Return ``passes``, or make them of keywords among the ``known`` fields.

    Errors suggest the arguments of ``caller``, too.

    Raises:
        TypeError: If both are given, or a keyword is unknown.

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
            f"{unknown[0]} is no argument; give forward passes as passes=Passes(...) or by the keywords "
            f"{', '.join(known)}."
            + (
                did_you_mean(unknown[0], known)
                or (did_you_mean(unknown[0], caller) if caller else "")
            )
        )
    if passes is None:
        return Passes(**keywords)
    if not isinstance(passes, Passes):
        raise TypeError(f"passes must be a Passes, got {passes!r}.")
    if keywords:
        name = next(iter(keywords))
        raise TypeError(f"passes and {name} cannot both be given; write passes=Passes({name}=...).")
    return passes
