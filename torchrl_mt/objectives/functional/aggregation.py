"""Per-token losses to one number, exact under any mask and any cut of the batch.

Given the full batch's total, the results of its shards add up to the full batch's result, and so do
their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from torchrl_mt.objectives.functional._checks import check_choice, check_mask

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
"""Which mean. A sequence is a row with at least one sampled token."""


def _sum(loss: Tensor, mask: Tensor) -> Tensor:
    """Sum over all sampled tokens."""
    return loss.sum()


def _sum_of_row_means(loss: Tensor, mask: Tensor) -> Tensor:
    """Sum over rows of each row's mean over its sampled tokens."""
    return (loss.sum(-1) / mask.sum(-1).clamp(min=1)).sum()


def _tokens(mask: Tensor) -> Tensor:
    """Number of sampled tokens."""
    return mask.sum()


def _sequences(mask: Tensor) -> Tensor:
    """Number of rows with a sampled token."""
    return mask.any(-1).sum()


AGGREGATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "token_mean": (_sum, _tokens),
    "seq_mean_token_mean": (_sum_of_row_means, _sequences),
    "seq_mean_token_sum": (_sum, _sequences),
}
"""Name to (numerator of loss and mask, total of mask)."""


def aggregation_total(mask: Tensor, kind: Aggregation = "token_mean") -> Tensor:
    """Count what ``kind`` divides by: sampled tokens, or rows with a sampled token.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        kind: Aggregation name.

    Returns:
        Scalar int64.

    Raises:
        ValueError: If ``kind`` is unknown.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, False]])
        >>> aggregation_total(mask, "token_mean"), aggregation_total(mask, "seq_mean_token_sum")
        (tensor(2), tensor(1))
    """
    check_choice("kind", kind, AGGREGATIONS)
    check_mask("mask", mask, mask.shape)
    return AGGREGATIONS[kind][1](mask)


def aggregate(
    loss: Tensor,
    mask: Tensor,
    kind: Aggregation = "token_mean",
    *,
    total: float | Tensor | None = None,
) -> Tensor:
    """Reduce per-token losses over the sampled tokens.

    - ``"token_mean"``: mean over all sampled tokens of the batch;
    - ``"seq_mean_token_mean"``: mean over sequences of the mean over the sequence's tokens;
    - ``"seq_mean_token_sum"``: mean over sequences of the sum over the sequence's tokens.

    A sequence is a row with at least one sampled token, so rows of padding alone change nothing.

    Args:
        loss: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        kind: See above.
        total: What to divide by, by default :func:`aggregation_total` of ``mask``. Give the full
            batch's when ``loss`` is a shard of it: the shards' results then sum to the batch's.

    Returns:
        Scalar float32; 0 if nothing is sampled.

    Raises:
        ValueError: If shapes differ or ``kind`` is unknown.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> loss = torch.tensor([[1.0, 3.0], [8.0, 5.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregate(loss, mask, "token_mean"), aggregate(loss, mask, "seq_mean_token_mean")
        (tensor(4.), tensor(5.))
    """
    check_choice("kind", kind, AGGREGATIONS)
    check_mask("mask", mask, loss.shape)
    numerator, count = AGGREGATIONS[kind]
    total = torch.as_tensor(count(mask) if total is None else total, device=loss.device)
    # Selecting, not multiplying: what lies on masked tokens may be infinite.
    loss = torch.where(mask, loss.float(), 0.0)
    return numerator(loss, mask) / torch.where(total > 0, total, 1)
