"""Advantage of each member relative to its group, by group id.

Position never matters; a member with nothing to compare it with, and a group whose members are all
equal, get finite values and finite gradients, whatever the kind. A return that is NaN stays NaN, and
so do all that are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from torchrl_mt.checks import check_choice, check_shape
from torchrl_mt.objectives.functional.group_batch import whiten_batch
from torchrl_mt.objectives.functional.group_dr_grpo import dr_grpo
from torchrl_mt.objectives.functional.group_grpo import grpo
from torchrl_mt.objectives.functional.group_max_rl import max_rl
from torchrl_mt.objectives.functional.group_opo import opo
from torchrl_mt.objectives.functional.group_reinforce_baseline import reinforce_baseline
from torchrl_mt.objectives.functional.group_rloo import rloo
from torchrl_mt.objectives.functional.groups import Groups, index_groups
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype

GroupKind = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_baseline", "max_rl", "opo", "batch", "reinforce++"
]
"""How a member is compared with its group, or with the batch (the last two are one)."""

GroupEstimator = Callable[[Tensor, Groups, Tensor | None, float], Tensor]
"""``(returns, groups, lengths, eps) -> advantage``, ``[N]``; see :data:`GROUP_ESTIMATORS`."""

GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "max_rl": max_rl,
    "opo": opo,
    "batch": whiten_batch,
    "reinforce++": whiten_batch,
}
"""Kind to estimator. What rejected and lone members and groups without spread get is
:func:`group_advantage`'s to say; an estimator's own values there only have to be finite."""

OVER_BATCH = ("batch", "reinforce++")
"""Kinds that take the whole batch for one group."""


def group_advantage(
    returns: Tensor,
    group: Tensor,
    kind: GroupKind = "grpo",
    *,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    lone_value: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """Compare each member's return with those of the members that share its group id.

    With the mean and the unbiased standard deviation of the group's ``n`` valid members:

    - ``"grpo"``: ``(G - mean) / (std + eps)`` (https://arxiv.org/abs/2402.03300);
    - ``"dr_grpo"``: ``G - mean`` (https://arxiv.org/abs/2503.20783);
    - ``"rloo"``: ``G`` minus the mean of the *others*, ``n / (n - 1) * (G - mean)``
      (https://arxiv.org/abs/2402.14740);
    - ``"reinforce_baseline"``: ``G - mean``, whitened over the batch: REINFORCE++ with baseline
      (https://arxiv.org/abs/2501.03262);
    - ``"max_rl"``: ``(G - mean) / (mean + eps)``, 0 where the mean is not positive, for returns of 0
      or more (https://arxiv.org/abs/2602.02710);
    - ``"opo"``: ``G`` minus the group's mean weighted by length (https://arxiv.org/abs/2505.23585);
    - ``"batch"`` or ``"reinforce++"``: as ``"grpo"``, the whole batch being one group (``group`` is
      not read; https://arxiv.org/abs/2501.03262).

    Statistics are those of the members given: call it once with the whole batch, before the batch is
    cut.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        kind: See above.
        valid: ``[N]`` bool; the others enter no statistic and get 0.
        lengths: ``[N]`` sampled tokens of each member, needed by ``"opo"``. The kinds that whiten
            over the batch count each member once per token with it.
        lone_value: What a valid member alone in its group gets.
        eps: Added to what is divided by.

    Returns:
        ``[N]`` float32; 0 for every member of a group whose valid members are all equal.

    Raises:
        ValueError: If shapes differ, ``kind`` is unknown, or it needs ``lengths``.
        TypeError: If ``group`` is not of integers or ``valid`` not boolean.

    Examples:
        >>> returns = torch.tensor([1.0, 0.0, 3.0, 5.0])
        >>> group_advantage(returns, torch.tensor([7, 2, 7, 3]), "dr_grpo")
        tensor([-1.,  0.,  1.,  0.])
    """
    check_choice("kind", kind, GROUP_ESTIMATORS)
    groups = index_groups(returns, group, valid)
    dtype = accumulation_dtype(returns.device)
    if lengths is not None:
        check_shape("lengths", lengths, returns.shape)
        lengths = lengths.to(dtype)
    elif kind == "opo":
        raise ValueError(
            "lengths must be given for kind 'opo', got None; pass the number of sampled tokens of "
            "each member, as `mask.sum(-1)` counts them."
        )
    if not returns.numel():
        return returns.float()
    if kind in OVER_BATCH:
        groups = Groups(torch.zeros_like(groups.member), groups.valid, 1)
    returns = torch.where(groups.valid, returns.to(dtype), 0.0)
    advantage = GROUP_ESTIMATORS[kind](returns, groups, lengths, eps).float()
    # What is chosen against is cut off from the gradient too, and so must be finite above.
    spread, lone = groups.spread(returns.detach()), groups.count() <= 1
    advantage = torch.where(spread[groups.member], advantage, 0.0)
    advantage = torch.where(lone[groups.member], lone_value, advantage)
    # No rule for lone members may turn an error into a number.
    advantage = torch.where(returns.isnan(), torch.nan, advantage)
    return torch.where(groups.valid, advantage, 0.0)
