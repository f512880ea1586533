"""Whitening over the whole batch: distance from its mean in standard deviations."""

from __future__ import annotations

from torch import Tensor

from torchrl_mt.objectives.functional.groups import Groups
from torchrl_mt.objectives.functional.whitening import masked_whiten


def whiten_batch(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """``(G - mean) / (std + eps)`` over all valid members (https://arxiv.org/abs/2501.03262).

    With ``lengths`` each member counts once per token, as if the tokens were whitened.

    Examples:
        >>> import torch
        >>> returns, member = torch.tensor([1.0, 3.0]), torch.tensor([0, 1])
        >>> whiten_batch(returns, Groups(member, member >= 0, 2), None, 0.0)
        tensor([-0.7071,  0.7071])
    """
    return masked_whiten(returns, groups.valid, weight=lengths, eps=eps)
