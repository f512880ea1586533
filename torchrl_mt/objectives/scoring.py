"""Scoring all rows in micro-batches, without gradients and without a trace in the models.

How the rows were cut into micro-batches changes nothing but the time and the memory that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from torchrl_mt.objectives.functional._checks import check_choice
from torchrl_mt.objectives.row_log_probs import micro_batches, scoring_mode

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Tokens, attention mask and mask of some rows to tensors whose first dimension is these rows."""


def check_micro_batch(size: int | None, tokens: int | None) -> None:
    """Refuse a micro-batch without a row.

    Args:
        size: ``micro_batch_size``.
        tokens: ``micro_batch_tokens``.

    Raises:
        ValueError: If one is below 1.
    """
    for name, value in (("micro_batch_size", size), ("micro_batch_tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1 or None, got {value}.")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse a type that mixed precision does not know.

    Args:
        dtype: What the models compute in; ``None`` for their own.

    Raises:
        ValueError: If it is not ``None``, bfloat16 or float16.
    """
    check_choice("dtype", str(dtype), ["None", "torch.bfloat16", "torch.float16"])


def score_rows(
    model: nn.Module,
    score: Score,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Score rows in micro-batches of similar length.

    Args:
        model: The model that ``score`` runs: put into evaluation mode meanwhile.
        score: What to do with a micro-batch.
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.
        micro_batch_size: Most rows of one call.
        micro_batch_tokens: Most tokens of one call, padding included.
        dtype: Run the model in mixed precision: under autocast to this type.

    Returns:
        What ``score`` returns, for all rows, float32.

    Examples:
        >>> tokens = torch.arange(6).reshape(3, 2)
        >>> mask = torch.ones_like(tokens, dtype=torch.bool)
        >>> double = lambda tokens, attention_mask, mask: (2.0 * tokens,)
        >>> score_rows(torch.nn.Identity(), double, tokens, mask, mask, micro_batch_size=2)[0]
        tensor([[ 0.,  2.],
                [ 4.,  6.],
                [ 8., 10.]])
    """
    parameter = next(model.parameters(), None)
    kind = (tokens if parameter is None else parameter).device.type
    mixed = nullcontext() if dtype is None else torch.autocast(kind, dtype=dtype)
    out: list[Tensor] = []
    with scoring_mode(model), mixed:
        lengths = attention_mask.sum(-1)
        for part in micro_batches(lengths, micro_batch_size, micro_batch_tokens):
            part = part.to(tokens.device)
            scores = score(tokens[part], attention_mask[part], mask[part])
            if not out:
                out = [torch.zeros(len(tokens), *s.shape[1:], device=tokens.device) for s in scores]
            for whole, piece in zip(out, scores, strict=True):
                whole[part] = piece.to(whole)
    return tuple(out)
