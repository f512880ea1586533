"""Discounted returns of many episodes that lie one after the other.

No reward reaches another episode, not even an infinite one, and no power of gamma is divided by. One
discount for all steps needs no table of factors; turns and tokens of training rows, which do, have
:func:`torchrl_mt.objectives.functional.reverse_linear_recurrence`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_returns"]


def discounted_returns(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    r"""Sum of discounted rewards from each step to the end of its episode.

    :math:`G_t = r_t + \gamma\, G_{t+1}`, and :math:`G_t = r_t` at the end of an episode (Sutton and
    Barto, *Reinforcement Learning*, eq. 3.9). The recursion is solved in ``log2(N)`` passes over
    the batch, each of which doubles the number of rewards that a step has added up.

    Args:
        reward: ``[N, ...]``, episodes one after the other, each in order of time.
        end: bool ``[N]``: the last steps of the episodes; the last step of the batch counts as one.
            Or bool of the shape of ``reward``, where parts of it (agents, say) end on their own.
        gamma: discount per step.

    Returns:
        ``[N, ...]``, detached, in the dtype of ``reward`` (the default dtype if that is no floating
        one).

    Examples:
        >>> discounted_returns(
        ...     torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([False, False, True, True]), 0.5
        ... )
        tensor([1.7500, 1.5000, 1.0000, 5.0000])
    """
    if not reward.is_floating_point():
        reward = reward.to(torch.get_default_dtype())
    if not reward.numel():
        return reward.detach()
    reward, steps, dtype = reward.detach(), len(reward), reward.dtype
    total = reward.reshape(steps, -1).to(torch.promote_types(dtype, torch.float32))
    end = end.reshape(steps, -1)
    returns = _add_up(total, end, gamma)
    if not bool(returns.isfinite().all()):
        returns = _add_up_step_by_step(total, end, gamma)
    return returns.reshape(reward.shape).to(dtype)


def _add_up(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """The returns of rewards ``[N, D]`` whose partial sums are finite; ``end`` is ``[N, 1 or D]``."""
    # After a pass, total[t] holds the k rewards from t on, or all that its episode has left;
    # goes_on[t] is 1 if the episode of t goes on at t + k, else 0.
    k, discount = 1, float(gamma)
    total, before = reward.clone(), reward.clone()
    goes_on = (~end[:-1]).to(total.dtype)
    longest = _longest(end)
    while k < longest and discount > 0:
        n = len(goes_on)
        total, before = before, total
        torch.addcmul(before[:n], goes_on, before[k:], value=discount, out=total[:n])
        total[n:] = before[n:]
        goes_on = goes_on[:-k] * goes_on[k:]
        k, discount = 2 * k, discount * discount
    return total


def _longest(end: Tensor) -> int:
    """Steps of the longest episode, or more where finding out would mean to wait for the device."""
    if end.device.type != "cpu":
        return len(end)
    last = torch.cat([end[:-1], torch.ones_like(end[-1:])]).T.reshape(-1).nonzero().squeeze(1)
    return int(last.diff(prepend=last.new_tensor([-1])).max())


def _add_up_step_by_step(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """The returns of any rewards ``[N, D]``, by the recursion itself.

    Sums of two halves may overflow, or lose an infinite reward to a discount that is 0, where adding
    step by step does not. All episodes are added up at once, from their last steps on.
    """
    total = reward.clone()
    if gamma == 0:
        return total
    steps = torch.arange(len(end), device=end.device)[:, None]
    last = torch.where(end, steps, len(end) - 1).flip(0).cummin(0).values.flip(0)
    left = (last - steps).expand_as(total).reshape(-1)
    width, flat = total.shape[1], total.view(-1)
    order = left.argsort(stable=True)
    for now in order.split(torch.bincount(left).tolist())[1:]:
        flat[now] += gamma * flat[now + width]
    return total
