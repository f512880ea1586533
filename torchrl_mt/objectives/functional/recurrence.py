"""The reverse linear recurrence ``y[t] = x[t] + decay[t] * y[t + 1]`` along the last dimension.

Returns, advantages and traces are all this recurrence with their own ``x`` and ``decay``; it takes
O(log S) tensor operations and never divides by a power of the discount. A factor for every position
is what holes and unequal gaps between turns ask for; whole episodes end to end with one discount, as
transforms see them, have the lighter :func:`torchrl_mt.transforms.returns.discounted_returns`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_linear_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` with ``y[S] = 0``, all positions at once.

    Recursive doubling: after ``k`` passes, ``y[t]`` is the sum over ``2**k`` positions from ``t``
    on (Hillis and Steele, 1986, "Data parallel algorithms"). A factor of 0 hands nothing on, not
    even an infinite value or NaN.

    Args:
        x: ``[..., S]`` floating.
        decay: ``[..., S]`` floating; the last position's is not used.

    Returns:
        ``[..., S]``, of the type of ``x``.

    Examples:
        >>> reverse_linear_recurrence(torch.tensor([1.0, 1.0, 4.0]), torch.full((3,), 0.5))
        tensor([2.5000, 3.0000, 4.0000])
    """
    y, reach, size = x, 1, x.shape[-1]
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

    Accumulated in float64 where the device has it: a long row raises the decay to large powers.

    Args:
        x: ``[..., S]`` floating, finite; zero on masked tokens.
        mask: ``[..., S]`` bool, true on sampled tokens.
        decay: Factor per sampled token.

    Returns:
        ``[..., S]`` float32, zero on masked tokens.

    Examples:
        >>> mask = torch.tensor([True, False, True])
        >>> sampled_recurrence(torch.tensor([1.0, 0.0, 4.0]), mask, 0.5)
        tensor([3., 0., 4.])
    """
    dtype = accumulation_dtype(x.device)
    # A masked token hands on what comes after it: factor 1, so no time passes.
    factors = torch.ones_like(x, dtype=dtype).masked_fill(mask, decay)
    return torch.where(mask, reverse_linear_recurrence(x.to(dtype), factors).float(), 0.0)
