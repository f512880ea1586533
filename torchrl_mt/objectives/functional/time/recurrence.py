"""Linear recurrences that run backwards in time: returns, advantages and traces are all one of these.

Never a step per token: a running sum where the discount is one number, O(log S) tensor operations
where every position has a factor of its own. No sum is divided by a power of the discount that could
have vanished, so rows of any length and discounts down to 0 are exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask, check_unit_interval
from torchrl_mt.objectives.functional.time.sampled import (
    first_sampled_token,
    only_sampled_,
    rewards_on_sampled,
)


def reverse_linear_recurrence(x: Tensor, decay: Tensor, *, longest: int | None = None) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` with ``y[S] = 0``, all positions at once.

    Recursive doubling: after ``k`` passes, ``y[t]`` is the sum over ``2**k`` positions from ``t``
    on (Hillis and Steele, 1986, "Data parallel algorithms"). A factor of 0 hands nothing on, not
    even an infinite value or NaN.

    Args:
        x: ``[..., S]`` floating.
        decay: ``[..., S]`` floating; the last position's is not used.
        longest: Greatest number of positions that a value reaches, itself included, before a factor
            of 0 stops it; by default all. Fewer passes are made the shorter it is.

    Returns:
        ``[..., S]``, of the type of ``x``.

    Examples:
        >>> reverse_linear_recurrence(torch.tensor([1.0, 1.0, 4.0]), torch.full((3,), 0.5))
        tensor([2.5000, 3.0000, 4.0000])
    """
    y, reach = x, 1
    size = x.shape[-1] if longest is None else min(longest, x.shape[-1])
    while reach < size:
        near, far = slice(None, -reach), slice(reach, None)
        # Masked, not multiplied by 0: what lies beyond a boundary may be infinite.
        later = torch.where(decay[..., near] == 0, 0.0, decay[..., near] * y[..., far])
        y = torch.cat([y[..., near] + later, y[..., -reach:]], dim=-1)
        if 2 * reach < size:
            decay = decay[..., near] * decay[..., far]
            decay = torch.nn.functional.pad(decay, (0, reach))
        reach *= 2
    return y


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Name the type that sums over time are taken in: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sampled_recurrence(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Solve ``y[i] = x[i] + decay * y[i + 1]`` over a row's sampled tokens ``i`` only.

    What lies on a masked token belongs to the last sampled token before it, or to the row's first
    sampled token if none is before. Accumulated in float64 where the device has it.

    Args:
        x: ``[..., S]`` floating.
        mask: ``[..., S]`` bool, true on sampled tokens.
        decay: Factor per sampled token, in [0, 1]; 0 hands nothing on, 1 all.

    Returns:
        ``[..., S]`` float32, zero on masked tokens.

    Examples:
        >>> mask = torch.tensor([True, False, True])
        >>> sampled_recurrence(torch.tensor([1.0, 2.0, 4.0]), mask, 0.5)
        tensor([5., 0., 4.])
    """
    check_mask("mask", mask, x.shape)
    check_unit_interval("decay", decay)
    if not x.numel():
        return x.float()
    if decay == 0.0:
        return rewards_on_sampled(x, mask, dtype=accumulation_dtype(x.device)).float()
    # Turned around while the numbers are small in memory.
    x = x.flip(-1).to(accumulation_dtype(x.device), copy=True)
    y = from_the_end_(x, mask, sampled_so_far(mask), decay).to(torch.float32).flip(-1)
    return only_sampled_(y, mask)


def from_the_end_(x: Tensor, mask: Tensor, count: Tensor, decay: float) -> Tensor:
    """:func:`sampled_recurrence` with the last position first and in the type of ``x``; spends ``x``.

    ``count`` is that of :func:`sampled_so_far`; neither it nor ``mask`` is turned around. Masked
    tokens get anything.
    """
    if decay == 0.0:
        owner = count.flip(-1).sub_(1).clamp_(min=0).long()
        return torch.zeros_like(x).scatter_add_(-1, owner, x).gather(-1, owner)
    y = _running_sums_(x, count.flip(-1), decay)
    # Up to the first sampled token no time passes: what all of it amounts to stands at the start.
    first, _ = first_sampled_token(mask)
    return y.scatter_(-1, x.shape[-1] - 1 - first, y[..., -1:].clone())


def sampled_so_far(mask: Tensor) -> Tensor:
    """Count the sampled tokens up to and including each position: ``[..., S]`` int32."""
    return mask.contiguous().cumsum(dim=-1, dtype=torch.int32)


def _running_sums_(x: Tensor, count: Tensor, decay: float) -> Tensor:
    """Sum ``decay ** (number[u] - number[t]) * x[u]`` over ``u >= t``: ``[..., S]``; spends ``x``.

    The last position comes first in all of these. ``number`` is the sampled token that a position
    belongs to: 1, 2, ... in each row.
    """
    size = x.shape[-1]
    blocks, length = _blocks(size, decay, x.dtype)
    fill = blocks * length - size
    if fill:
        x = torch.nn.functional.pad(x, (0, fill))
        count = torch.cat([count, count[..., -1:].expand(*count.shape[:-1], fill)], dim=-1)
    x, count = x.unflatten(-1, (blocks, length)), count.unflatten(-1, (blocks, length))
    start = count[..., -1].clamp(min=1)
    if blocks > 1:
        count = count - (start - 1).unsqueeze(-1)
    # Entry 0 is for tokens before the first sampled one, which are numbered with it.
    powers = decay ** torch.arange(-1, length, dtype=x.dtype, device=x.device).clamp(min=0)
    weight = powers.index_select(0, count.flatten()).view_as(x)
    # In place: on a CPU, fresh memory for each step costs more than the steps.
    sums = x.mul_(weight).cumsum_(dim=-1)
    if blocks > 1:
        span = start[..., :-1] - start[..., 1:]
        sums += _from_later_blocks(sums[..., -1], decay ** span.to(x.dtype))
    return sums.div_(weight).flatten(-2)[..., :size]


def _from_later_blocks(sums: Tensor, through: Tensor) -> Tensor:
    """What each block's later ones add to its sums: ``[..., blocks, 1]``; the last comes first.

    ``sums`` is ``[..., blocks]``, each block's own at its start, and ``through`` the factor from one
    start to the next, ``[..., blocks - 1]``.
    """
    later = torch.nn.functional.pad(through, (1, 0))
    at_start = reverse_linear_recurrence(sums.flip(-1), later.flip(-1)).flip(-1)
    # Masked, not multiplied by 0: what comes later may be infinite.
    handed = torch.where(through == 0, 0.0, through * at_start[..., :-1])
    return torch.nn.functional.pad(handed, (1, 0)).unsqueeze(-1)


def _blocks(size: int, decay: float, dtype: torch.dtype) -> tuple[int, int]:
    """Cut ``size`` positions into equal blocks over which no power of ``decay`` underflows."""
    if decay == 1.0:
        return 1, size
    # The other half of the exponents' range is left to what is multiplied by the power.
    longest = max(1, int(0.5 * math.log(torch.finfo(dtype).tiny) / math.log(decay)))
    blocks = -(-size // longest)
    return blocks, -(-size // blocks)
