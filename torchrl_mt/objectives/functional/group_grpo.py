"""Group-relative advantage: distance from the group's mean in standard deviations."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups


def grpo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``(G - mean) / (std + eps)``, std unbiased (GRPO, https://arxiv.org/abs/2402.03300).

    Examples:
        >>> returns, member = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
        >>> grpo(returns, Groups(member, member == 0, 1), None, 0.0)
        tensor([-0.7071,  0.7071])
    """
    deviation = returns - groups.mean(returns)[groups.member]
    variance = groups.total(deviation.square()) / (groups.count() - 1).clamp(min=1)
    # The square root's slope at 0 is infinite: keep groups without spread away from it.
    variance = torch.where(groups.spread(returns.detach()), variance, 1.0)
    return deviation / (variance.sqrt() + eps)[groups.member]
