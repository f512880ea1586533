"""Distance from the group's mean in units of the mean: rare successes weigh more."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups


def max_rl(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``(G - mean) / (mean + eps)``, for returns of 0 or more (https://arxiv.org/abs/2602.02710).

    With returns of 0 and 1 it is the gradient of the log-probability of success, to the order of the
    group's size. Groups whose mean is not positive get 0, the paper's rule for no success.

    Examples:
        >>> returns, member = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)
        >>> max_rl(returns, Groups(member, member == 0, 1), None, 0.0)
        tensor([-1., -1., -1.,  3.])
    """
    mean = groups.mean(returns)[groups.member]
    scale = torch.where(mean <= 0, 1.0, mean + eps)
    return torch.where(mean <= 0, 0.0, (returns - mean) / scale)
