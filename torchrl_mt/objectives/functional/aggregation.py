"""Aggregation of per-token losses, exact under any mask and any sharding.

Given the full batch's total, the results and gradients of shards add up to the full batch's, even if
a cut goes through a group.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_mt.checks import (
    check_choice,
    check_ids,
    check_mask,
    check_positive,
    check_shape,
)
from torchrl_mt.devices import on_cpu, sent

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"]
"""Kinds of aggregation; see :func:`aggregate`."""


def aggregation_total(
    mask: Tensor, kind: Aggregation = "token_mean", *, group: Tensor | None = None
) -> Tensor:
    """Count the divisor of an aggregation.

    Args:
        mask: ``[N, S]`` bool, true on sampled tokens.
        kind: Aggregation name.
        group: ``[N]`` int64 group id of each row; read by ``"prompt_mean"`` only.

    Returns:
        Scalar int64: sampled tokens, or rows with a sampled token. For ``"prompt_mean"`` a table
        ``[K, 2]`` int64 of (group id, sampled tokens), one line per group with a sampled token, in
        order of id. :func:`merge_totals` adds up the totals of several ranks.

    Examples:
        >>> mask = torch.tensor([[True, True], [False, False]])
        >>> aggregation_total(mask, "token_mean"), aggregation_total(mask, "seq_mean_token_sum")
        (tensor(2), tensor(1))
        >>> aggregation_total(mask, "prompt_mean", group=torch.tensor([7, 8]))
        tensor([[7, 2]])
    """
    check_choice("kind", kind, get_args(Aggregation))
    check_mask("mask", mask, mask.shape)
    if kind == "token_mean":
        return mask.count_nonzero()
    if kind != "prompt_mean":
        return mask.any(-1).count_nonzero()
    return _table(_checked_group(group, mask), mask.sum(-1))


def merge_totals(*totals: Tensor) -> Tensor:
    """Add up the totals of ranks that have different rows of a batch.

    Args:
        *totals: Results of :func:`aggregation_total`, all of one kind.

    Returns:
        The total of all rows together.

    Examples:
        >>> merge_totals(torch.tensor(3), torch.tensor(4))
        tensor(7)
        >>> merge_totals(torch.tensor([[7, 2]]), torch.tensor([[5, 1], [7, 3]]))
        tensor([[5, 1],
                [7, 5]])
    """
    if not totals:
        raise ValueError("totals must be one or more, got none.")
    if totals[0].ndim == 0:
        return torch.stack(totals).sum()
    lines = torch.cat(totals)
    return _table(lines[:, 0], lines[:, 1])


def aggregate(
    loss: Tensor,
    mask: Tensor,
    kind: Aggregation = "token_mean",
    *,
    total: float | Tensor | None = None,
    group: Tensor | None = None,
    norm: float | None = None,
) -> Tensor:
    """Reduce per-token losses over the sampled tokens.

    - ``"token_mean"``: mean over all sampled tokens of the batch (DAPO,
      https://arxiv.org/abs/2503.14476);
    - ``"seq_mean_token_mean"``: mean over sequences of the mean over the sequence's tokens (GRPO,
      https://arxiv.org/abs/2402.03300);
    - ``"seq_mean_token_sum"``: mean over sequences of the sum over the sequence's tokens, divided by
      the constant ``norm`` if given (Dr. GRPO, https://arxiv.org/abs/2503.20783, with the maximum
      length of a sequence);
    - ``"prompt_mean"``: mean over groups of the mean over all tokens of the group's rows
      (https://arxiv.org/abs/2510.13786).

    A sequence is a row with at least one sampled token: rows of padding change nothing.

    Args:
        loss: ``[N, S]`` floating; not read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        kind: See above.
        total: Divisor; by default :func:`aggregation_total` of ``mask``. For a shard, give the full
            batch's: the shards' results then sum to the batch's. A total below that of these rows, or
            one that is not finite, raises an error; on a GPU it makes the result NaN instead, to avoid
            a synchronisation.
        group: ``[N]`` int64 group id of each row; read by ``"prompt_mean"`` only.
        norm: Further constant to divide ``"seq_mean_token_sum"`` by.

    Returns:
        Scalar float32; 0 if nothing is sampled.

    Raises:
        ValueError: If ``norm`` is given with another kind, or ``total`` does not fit these rows.

    Examples:
        >>> loss = torch.tensor([[1.0, 3.0], [8.0, 5.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregate(loss, mask, "token_mean"), aggregate(loss, mask, "seq_mean_token_mean")
        (tensor(4.), tensor(5.))
        >>> aggregate(loss, mask, "prompt_mean", group=torch.tensor([7, 8]))
        tensor(5.)
    """
    check_choice("kind", kind, get_args(Aggregation))
    check_mask("mask", mask, loss.shape)
    check_norm("norm", norm, kind)
    # Select, do not multiply: masked values may be infinite.
    rows = torch.where(mask, loss.float(), 0.0).sum(-1)
    if kind == "prompt_mean":
        total = aggregation_total(mask, kind, group=group) if total is None else total
        return (rows / _row_divisor(_checked_group(group, mask), mask, total)).sum()
    if kind == "seq_mean_token_mean":
        rows = rows / mask.sum(-1).clamp(min=1)
    own = aggregation_total(mask, kind)
    total = own if total is None else _checked_total(total, own)
    return rows.sum() / torch.where(total == 0, 1, total) / (1.0 if norm is None else norm)


def check_norm(name: str, norm: float | None, kind: str) -> None:
    """Refuse a constant that is not positive, or an aggregation that takes none."""
    if norm is None:
        return
    check_positive(name, norm)
    if kind != "seq_mean_token_sum":
        raise ValueError(f"{name} is for 'seq_mean_token_sum' alone, got {norm} with {kind!r}.")


def _checked_group(group: Tensor | None, mask: Tensor) -> Tensor:
    """Refuse group ids that are missing or do not fit the rows."""
    if group is None:
        raise ValueError("group must be each row's group id for 'prompt_mean', got None.")
    check_shape("group", group, mask.shape[:1])
    check_ids("group", group)
    return group


def _checked_total(total: float | Tensor, own: Tensor) -> Tensor:
    """Refuse a total below that of these rows; off the CPU it becomes NaN, without waiting."""
    there = total.device.type if isinstance(total, Tensor) else "cpu"
    total = torch.as_tensor(total, device=own.device)
    if total.ndim:
        raise ValueError(
            f"total must be one number, got shape {tuple(total.shape)}; take it from the same loss's "
            "total(rows), or from aggregation_total of the same kind."
        )
    wrong = ~(total >= own) | (total == torch.inf)
    if own.device.type == "cpu" and there == "cpu":
        if bool(wrong):
            raise ValueError(
                f"total must be finite and at least {int(own)}, which these rows alone have, got "
                f"{total.item()}: it must be counted over the whole batch that they are a part of."
            )
        return total
    return torch.where(wrong, torch.nan, total)


def _table(group: Tensor, tokens: Tensor) -> Tensor:
    """Add up the tokens of each group, in order of id; groups without any are left out."""
    device = group.device
    group, tokens = on_cpu(group, tokens)
    ids, member = torch.unique(group, return_inverse=True)
    count = tokens.new_zeros(len(ids)).index_add(0, member, tokens)
    return sent(torch.stack([ids, count], dim=1)[count > 0], device)


def _row_divisor(group: Tensor, mask: Tensor, total: float | Tensor) -> Tensor:
    """Tokens of each row's group times the number of groups; 1 for rows without sampled tokens."""
    if not isinstance(total, Tensor) or total.ndim != 2 or total.shape[1] != 2:
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(
            f"total must be a table [K, 2] of (group id, sampled tokens) for 'prompt_mean', got "
            f"{shape}; take it from the same loss's total(rows), or from "
            "aggregation_total(..., 'prompt_mean', group=group)."
        )
    device = group.device
    group, total, tokens = on_cpu(group, total, mask.sum(-1))
    sampled = tokens > 0
    if not len(total):
        total = total.new_tensor([[-1, 1]])
    ids = total[:, 0].contiguous()
    if bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError(
            "total must have each group once, in order of id; add tables up with merge_totals."
        )
    line = torch.searchsorted(ids, group.contiguous()).clamp(max=len(ids) - 1)
    unknown = sampled & (ids[line] != group)
    if bool(unknown.any()):
        raise ValueError(
            f"total has no tokens of group {int(group[unknown][0])}, which these rows have: it must be "
            "counted over the whole batch that they are a part of."
        )
    few = sampled & (total[line, 1] < tokens)
    if bool(few.any()):
        raise ValueError(
            f"total has fewer tokens of group {int(group[few][0])} than these rows alone: it must be "
            "counted over the whole batch that they are a part of."
        )
    return sent(torch.where(sampled, total[line, 1] * len(total), 1), device)
