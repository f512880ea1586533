"""Settings of forward passes over rows, shared by all calls that score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torchrl_mt.checks import check_class, check_positive_finite

SCORED_AT_ONCE = 32_768
"""Tokens of a pass that keeps nothing for a backward pass, with ``micro_batch_tokens="auto"``."""
AUTOCAST_DTYPES = (None, torch.bfloat16, torch.float16)
"""Values of ``dtype``; ``None`` computes in the model's own types."""


@dataclass(frozen=True)
class Passes:
    """Settings of forward passes over rows, for makers, losses and reward models.

    Args:
        packed: Put several rows into one sequence instead of padding. The model's attention must keep
            them apart, which is tested once with a few tokens. ``"tree"`` also computes what rows begin
            with in common only once (:ref:`prefix-trees`). Rows for reward models are always padded.
        micro_batch_size: Maximum sequences (rows, packs or trees of rows) per pass; no limit by default.
        micro_batch_tokens: Maximum tokens per pass, padding included; ``None`` is no limit. A longer row
            is a pass of its own. ``"auto"``: 32,768 for scores; in
            :class:`~torchrl_mt.objectives.MultiTurnLoss` as many as keep 512 MiB of activations, on CUDA
            a quarter of the device's memory.
        dtype: ``torch.bfloat16`` or ``torch.float16`` for automatic mixed precision; by default the
            model's own types. Softmax, values and losses are always in float32.
        head_dtype: ``torch.float32`` computes the products of a policy's output layer in float32, also
            for a model in half precision; by default as ``dtype`` says. A copy of its weights in this
            type is made for each pass. Not for output layers that only whole logits can be had of.
        temperature: Divisor of a policy's logits, in float32: the sampling temperature.
        with_entropy: Whether scores of a policy come with its entropies.

    Raises:
        ValueError: If a limit is below 1, ``temperature`` not positive, or ``dtype`` not supported.

    Examples:
        >>> passes = Passes(packed=True, temperature=0.7)
        >>> passes.micro_batch_tokens
        'auto'
    """

    packed: bool | Literal["tree"] = False
    micro_batch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = "auto"
    dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    temperature: float = 1.0
    with_entropy: bool = False

    def __post_init__(self) -> None:
        if self.packed not in (False, True, "tree"):
            raise ValueError(f"packed must be True, False or 'tree', got {self.packed!r}.")
        for name in ("micro_batch_size", "micro_batch_tokens"):
            limit = getattr(self, name)
            if limit == "auto" and name == "micro_batch_tokens":
                continue
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {limit}.")
        check_positive_finite("temperature", self.temperature)
        if self.dtype not in AUTOCAST_DTYPES:
            raise ValueError(
                f"dtype must be torch.bfloat16, torch.float16 or None, got {self.dtype}; None computes "
                "in the model's own types."
            )
        if self.head_dtype not in (None, torch.float32):
            raise ValueError(f"head_dtype must be torch.float32 or None, got {self.head_dtype}.")

    @classmethod
    def checked(cls, passes: Passes | None) -> Passes:
        """Return an argument ``passes``, or the defaults for ``None``.

        Raises:
            TypeError: If it is neither.
        """
        check_class("passes", passes := cls() if passes is None else passes, cls)
        return passes

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens per pass for scores."""
        return SCORED_AT_ONCE if self.micro_batch_tokens == "auto" else self.micro_batch_tokens
