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
    reward, steps, dtype = reward.detach(), len(reward), reward.dtype
    total = reward.reshape(steps, -1).to(torch.promote_types(dtype, torch.float32))
    end = end.reshape(steps, 1)
    returns = _add_up(total, end, gamma)
    if not bool(returns.isfinite().all()):
        returns = _add_up_any(total, end, gamma)
    return returns.reshape(reward.shape).to(dtype)


def _add_up(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """The returns of finite rewards ``[N, D]``."""
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
    last = end.reshape(-1).nonzero().squeeze(1)
    edges = [last.new_tensor([-1]), last, last.new_tensor([len(end) - 1])]
    return int(torch.cat(edges).diff().max())


def _add_up_any(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """The returns of rewards ``[N, D]``, finite or not."""
    total, goes_on = reward.clone(), ~end
    k, discount = 1, float(gamma)
    while k < len(total) and gamma > 0:
        # What is not finite stays as it is: the discount may have underflown to 0.
        later = torch.where(total[k:].isfinite(), discount * total[k:], total[k:])
        # Masked, not multiplied by 0: an infinite reward must not reach its neighbours.
        total[:-k] += torch.where(goes_on[:-k], later, 0.0)
        goes_on = torch.cat([goes_on[:-k] & goes_on[k:], torch.zeros_like(goes_on[-k:])])
        k, discount = 2 * k, discount * discount
    return total
