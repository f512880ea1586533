"""Distance from the group's mean."""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups


def dr_grpo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``G - mean`` (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Examples:
        >>> import torch
        >>> returns, member = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
        >>> dr_grpo(returns, Groups(member, member == 0, 1), None, 0.0)
        tensor([-1.,  1.])
    """
    return returns - groups.mean(returns)[groups.member]
