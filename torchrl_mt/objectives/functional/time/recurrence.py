"""Linear recurrences backwards in time, of which returns, advantages and traces are made.

There is no loop over tokens: a constant discount takes a running sum, a factor per position O(log S)
tensor operations. No power of the discount that is divided by can underflow, so rows of any length and
discounts down to 0 are exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.time.sampled import first_sampled_token


def reverse_linear_recurrence(x: Tensor, decay: Tensor, *, longest: int | None = None) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` with ``y[S] = 0``, all positions at once.

    Recursive doubling: after ``k`` passes, ``y[t]`` is the sum over ``2**k`` positions from ``t``
    on (Hillis and Steele, 1986, "Data parallel algorithms"). A factor of 0 stops everything, even
    infinity and NaN.

    Args:
        x: ``[..., S]`` floating.
        decay: ``[..., S]`` floating; the last position's is not used.
        longest: Length of the longest run of positions before a factor of 0 ends it; by default
            ``S``. A smaller one saves passes.

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
        # Select, do not multiply by 0: values beyond a boundary may be infinite.
        later = torch.where(decay[..., near] == 0, 0.0, decay[..., near] * y[..., far])
        y = torch.cat([y[..., near] + later, y[..., -reach:]], dim=-1)
        if 2 * reach < size:
            decay = decay[..., near] * decay[..., far]
            decay = torch.nn.functional.pad(decay, (0, reach))
        reach *= 2
    return y


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the type for sums over time: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def from_the_end_(x: Tensor, mask: Tensor, count: Tensor, decay: float) -> Tensor:
    """Solve ``y[i] = x[i] + decay * y[i + 1]`` over a row's sampled tokens ``i`` only, all ``[..., S]``.

    A value on a masked token moves to the last sampled token before it, or else to the row's first.
    ``x`` is flipped and is overwritten; the result is flipped, too. ``mask`` and ``count``, of
    :func:`sampled_so_far`, are not flipped. Masked tokens get any value.

    Examples:
        >>> mask = torch.tensor([True, False, True])
        >>> x = torch.tensor([4.0, 2.0, 1.0])
        >>> from_the_end_(x, mask, sampled_so_far(mask), 0.5)[[2, 0]]
        tensor([5., 4.])
    """
    if decay == 0.0:
        owner = count.flip(-1).sub_(1).clamp_(min=0).long()
        return torch.zeros_like(x).scatter_add_(-1, owner, x).gather(-1, owner)
    y = _running_sums_(x, count.flip(-1), decay)
    # No time passes before the first sampled token: it gets the total, which stands at the start.
    first, _ = first_sampled_token(mask)
    return y.scatter_(-1, x.shape[-1] - 1 - first, y[..., -1:].clone())


def sampled_so_far(mask: Tensor) -> Tensor:
    """Count the sampled tokens up to and including each position: ``[..., S]`` int32."""
    return mask.contiguous().cumsum(dim=-1, dtype=torch.int32)


def _running_sums_(x: Tensor, count: Tensor, decay: float) -> Tensor:
    """Sum ``decay ** (count[u] - count[t]) * x[u]`` over ``u >= t``: ``[..., S]``; overwrites ``x``.

    All are flipped. ``count`` is the number of the sampled token that a position belongs to.
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
    # Tokens before the first sampled one (count 0) belong to it.
    powers = decay ** torch.arange(-1, length, dtype=x.dtype, device=x.device).clamp(min=0)
    weight = powers.index_select(0, count.flatten()).view_as(x)
    # In place: on a CPU, allocation costs more than the arithmetic.
    sums = x.mul_(weight).cumsum_(dim=-1)
    if blocks > 1:
        span = start[..., :-1] - start[..., 1:]
        sums += _from_later_blocks(sums[..., -1], decay ** span.to(x.dtype))
    return sums.div_(weight).flatten(-2)[..., :size]


def _from_later_blocks(sums: Tensor, through: Tensor) -> Tensor:
    """Compute what later blocks add to each block's sums: ``[..., blocks, 1]``; all are flipped.

    ``sums`` ``[..., blocks]`` are the blocks' own totals; ``through`` ``[..., blocks - 1]`` the factors
    from one block's start to the next.
    """
    later = torch.nn.functional.pad(through, (1, 0))
    at_start = reverse_linear_recurrence(sums.flip(-1), later.flip(-1)).flip(-1)
    # Select, do not multiply by 0: later values may be infinite.
    handed = torch.where(through == 0, 0.0, through * at_start[..., :-1])
    return torch.nn.functional.pad(handed, (1, 0)).unsqueeze(-1)


def _blocks(size: int, decay: float, dtype: torch.dtype) -> tuple[int, int]:
    """Cut ``size`` positions into equal blocks over which no power of ``decay`` underflows."""
    if decay == 1.0:
        return 1, size
    # Half of the exponents' range is left for the values.
    longest = max(1, int(0.5 * math.log(torch.finfo(dtype).tiny) / math.log(decay)))
    blocks = -(-size // longest)
    return blocks, -(-size // blocks)
