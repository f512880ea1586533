"""Leave-one-out: distance from the mean of the group's other members."""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups


def rloo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``G`` minus the mean of the others (RLOO, https://arxiv.org/abs/2402.14740).

    That is ``n / (n - 1) * (G - mean)`` in a group of ``n``.

    Examples:
        >>> import torch
        >>> returns, member = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0])
        >>> rloo(returns, Groups(member, member == 0, 1), None, 0.0)
        tensor([-3.0000, -1.5000,  4.5000])
    """
    count = groups.count()
    deviation = returns - groups.mean(returns)[groups.member]
    return deviation * (count / (count - 1).clamp(min=1))[groups.member]
