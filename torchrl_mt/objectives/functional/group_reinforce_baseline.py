"""Distance from the group's mean, in standard deviations of the whole batch's distances."""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups
from torchrl_mt.objectives.functional.whitening import masked_whiten


def reinforce_baseline(
    returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float
) -> Tensor:
    """Whiten ``G - mean`` over the batch (REINFORCE++ w/ baseline, https://arxiv.org/abs/2501.03262).

    Members alone in their group have no baseline and enter no statistic. With ``lengths`` each member
    counts once per token, as if the tokens were whitened.

    Examples:
        >>> import torch
        >>> returns, member = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
        >>> reinforce_baseline(returns, Groups(member, member >= 0, 2), None, 0.0)
        tensor([-1.2247,  1.2247,  0.0000,  0.0000])
    """
    deviation = returns - groups.mean(returns)[groups.member]
    compared = groups.valid & (groups.count() > 1)[groups.member]
    return masked_whiten(deviation, compared, weight=lengths, eps=eps)
