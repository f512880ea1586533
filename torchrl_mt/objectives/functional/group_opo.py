"""Distance from the baseline of least variance: the group's mean weighted by length."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups


def opo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``G - sum(length * G) / sum(length)`` (OPO, https://arxiv.org/abs/2505.23585).

    Members of a group without any length count alike.

    Examples:
        >>> returns, member = torch.tensor([0.0, 4.0]), torch.tensor([0, 0])
        >>> opo(returns, Groups(member, member == 0, 1), torch.tensor([3.0, 1.0]), 0.0)
        tensor([-1.,  3.])
    """
    if lengths is not None:
        some = groups.total(lengths) > 0
        lengths = torch.where(some[groups.member], lengths, 1.0)
    return returns - groups.mean(returns, lengths)[groups.member]
