"""Advantages of members relative to their groups.

The order of members does not matter, and rejected members enter no statistic. Lone members and groups
of equal returns get finite values and gradients. NaN stays NaN and spreads to its whole group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torchrl_mt.checks import (
    check_choice,
    check_ids,
    check_mask,
    check_positive_integer,
    check_shape,
)
from torchrl_mt.objectives.functional.time.episodes import run_ends
from torchrl_mt.objectives.functional.time.recurrence import (
    accumulation_dtype,
    reverse_linear_recurrence,
)
from torchrl_mt.objectives.functional.whitening import masked_whiten

GroupKind = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_baseline",
    "max_rl",
    "opo",
    "pass_at_k",
    "batch",
    "reinforce++",
]
"""Kinds of comparison: with the group, or with the whole batch (the last two, which are synonyms)."""


def group_advantage(
    returns: Tensor,
    group: Tensor,
    kind: GroupKind = "grpo",
    *,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    lone_value: float = 0.0,
    eps: float = 1e-6,
    pass_k: int = 4,
) -> Tensor:
    """Compute each member's advantage relative to its group.

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
    - ``"pass_at_k"``: for the best of ``k`` members. With ``R`` the maximum over a subset of ``k``:
      ``(mean of R with this member - mean of R) / (std of R + eps)``, over all subsets; for returns of 0
      and 1 the closed form of https://arxiv.org/abs/2508.10751;
    - ``"batch"`` or ``"reinforce++"``: like ``"grpo"`` with the whole batch as one group; ``group`` is
      not used (https://arxiv.org/abs/2501.03262).

    Call it with the whole batch, before cutting the batch: statistics are taken over these members.

    Args:
        returns: ``[N]`` floating.
        group: ``[N]`` int64 group ids, in any order.
        kind: See above.
        valid: ``[N]`` bool; members where it is false enter no statistic and get 0.
        lengths: ``[N]`` sampled tokens of each member; needed by ``"opo"``. Kinds that whiten over the
            batch count each member once per token if it is given.
        lone_value: Advantage of a valid member alone in its group.
        eps: Added to divisors.
        pass_k: ``k`` of ``"pass_at_k"``; in groups of ``k`` or fewer, subsets have all members but one.

    Returns:
        ``[N]`` float32; 0 in groups whose valid members have equal returns.

    Examples:
        >>> returns = torch.tensor([1.0, 0.0, 3.0, 5.0])
        >>> group_advantage(returns, torch.tensor([7, 2, 7, 3]), "dr_grpo")
        tensor([-1.,  0.,  1.,  0.])
    """
    check_choice("kind", kind, GROUP_ESTIMATORS)
    check_positive_integer("pass_k", pass_k)
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
    estimator = partial(pass_at_k, k=pass_k) if kind == "pass_at_k" else GROUP_ESTIMATORS[kind]
    advantage = estimator(returns, groups, lengths, eps).float()
    # torch.where passes gradients to unselected values, too: they must be finite above.
    spread, lone = groups.spread(returns.detach()), groups.count() <= 1
    advantage = torch.where(spread[groups.member], advantage, 0.0)
    advantage = torch.where(lone[groups.member], lone_value, advantage)
    # NaN must stay NaN, also in lone members.
    advantage = torch.where(returns.isnan(), torch.nan, advantage)
    return torch.where(groups.valid, advantage, 0.0)


@dataclass(frozen=True)
class Groups:
    """The ``K`` groups of ``N`` members; a group without valid members counts as empty."""

    member: Tensor
    """``[N]`` int64 group of each member, 0 to ``K - 1``."""
    valid: Tensor
    """``[N]`` bool, true on members that count."""
    number: int
    """Number of groups, ``K``."""

    def total(self, x: Tensor) -> Tensor:
        """Sum over each group's valid members: ``[N]`` to ``[K]``."""
        return x.new_zeros(self.number).index_add(0, self.member, torch.where(self.valid, x, 0.0))

    def mean(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean over each group's valid members, weighted if asked: ``[N]`` to ``[K]``; 0 if empty."""
        weight = torch.ones_like(x) if weight is None else weight
        total = self.total(weight)
        return self.total(x * weight) / torch.where(total > 0, total, 1.0)

    def count(self) -> Tensor:
        """Number of each group's valid members: ``[K]`` int64."""
        zeros = torch.zeros(self.number, dtype=torch.long, device=self.valid.device)
        return zeros.index_add(0, self.member, self.valid.long())

    def spread(self, x: Tensor) -> Tensor:
        """Whether each group has two valid members that differ, or NaN: ``[N]`` to ``[K]`` bool.

        Compared exactly: with a rounded mean, equal members would have a tiny standard deviation to
        divide by.
        """
        start = x.new_full((self.number,), torch.inf)
        low = torch.where(self.valid, x, torch.inf)
        high = torch.where(self.valid, x, -torch.inf)
        low = start.scatter_reduce(0, self.member, low, "amin")
        high = (-start).scatter_reduce(0, self.member, high, "amax")
        return ~(low >= high)


def index_groups(returns: Tensor, group: Tensor, valid: Tensor | None = None) -> Groups:
    """Find the groups of members by their ids ``[N]``; only the shape of ``returns`` is read."""
    if returns.ndim != 1:
        raise ValueError(f"returns must have shape [N], got {tuple(returns.shape)}.")
    check_shape("group", group, returns.shape)
    check_ids("group", group)
    if valid is None:
        valid = torch.ones_like(group, dtype=torch.bool)
    check_mask("valid", valid, returns.shape)
    ids, member = torch.unique(group, return_inverse=True)
    return Groups(member, valid, len(ids))


def grpo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the group's mean in standard deviations."""
    deviation = returns - groups.mean(returns)[groups.member]
    variance = groups.total(deviation.square()) / (groups.count() - 1).clamp(min=1)
    # The square root has an infinite slope at 0: keep groups without spread away from it.
    variance = torch.where(groups.spread(returns.detach()), variance, 1.0)
    return deviation / (variance.sqrt() + eps)[groups.member]


def dr_grpo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the group's mean."""
    return returns - groups.mean(returns)[groups.member]


def rloo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the mean of the group's other members."""
    count = groups.count()
    deviation = returns - groups.mean(returns)[groups.member]
    return deviation * (count / (count - 1).clamp(min=1))[groups.member]


def reinforce_baseline(
    returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float
) -> Tensor:
    """Distance from the group's mean, whitened over the batch without lone members."""
    deviation = returns - groups.mean(returns)[groups.member]
    compared = groups.valid & (groups.count() > 1)[groups.member]
    return masked_whiten(deviation, compared, weight=lengths, eps=eps)


def max_rl(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the group's mean in units of the mean: rare successes count more.

    With returns of 0 and 1 this is the gradient of the log-probability of success, to the order of the
    group's size. Groups without success (mean 0 or less) get 0, as in the paper.
    """
    mean = groups.mean(returns)[groups.member]
    scale = torch.where(mean <= 0, 1.0, mean + eps)
    return torch.where(mean <= 0, 0.0, (returns - mean) / scale)


def opo(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the baseline of least variance: the group's mean weighted by length.

    In a group of total length 0 all members count alike.
    """
    if lengths is not None:
        some = groups.total(lengths) > 0
        lengths = torch.where(some[groups.member], lengths, 1.0)
    return returns - groups.mean(returns, lengths)[groups.member]


def pass_at_k(
    returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float, k: int = 4
) -> Tensor:
    """What a member adds to the maximum over subsets of ``k`` members, in its standard deviations."""
    # By group, valid members first, in order of their returns.
    order = returns.argsort(stable=True)
    order = order[(~groups.valid)[order].long().argsort(stable=True)]
    order = order[groups.member[order].argsort(stable=True)]
    x, of = returns[order], groups.member[order]
    size = groups.count()[of].to(x.dtype)
    ends = run_ends(of)
    place = torch.arange(1, len(of) + 1, device=of.device)
    rank = (place - torch.searchsorted(of, of)).to(x.dtype)
    subset = (size - 1).clamp(min=1, max=k)

    def share(rest: Tensor, chosen: Tensor, out_of: Tensor, among: Tensor) -> Tensor:
        """Divide one binomial coefficient by another, which is not 0."""
        log = _log_binomial(rest, chosen) - _log_binomial(out_of, among)
        return torch.where((chosen >= 0) & (chosen <= rest), log.exp(), 0.0)

    # The subsets whose maximum this member is: the others are among those before it.
    is_best = share(rank - 1, subset - 1, size, subset)
    best = torch.zeros_like(returns).index_copy(0, order, is_best) * groups.valid
    mean = groups.total(best * returns)[groups.member]
    variance = groups.total(best * (returns - mean).square())[groups.member]
    beaten = x * share(rank - 2, subset - 2, size - 1, subset - 1)
    beaten = torch.where(groups.valid[order], beaten, 0.0)
    later = reverse_linear_recurrence(beaten, torch.where(ends, 0.0, 1.0).to(x.dtype))
    later = torch.where(ends, 0.0, later.roll(-1))
    own = later + x * share(rank - 1, subset - 1, size - 1, subset - 1)
    own = torch.zeros_like(returns).index_copy(0, order, own)
    variance = torch.where(variance > 0, variance, 1.0)
    return (own - mean) / (variance.sqrt() + eps)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """Logarithm of the binomial coefficient; any number where it is 0."""
    n, k = n.clamp(min=0), k.clamp(min=0)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=0) + 1)


def whiten_batch(returns: Tensor, groups: Groups, lengths: Tensor | None, eps: float) -> Tensor:
    """Distance from the batch's mean in standard deviations."""
    return masked_whiten(returns, groups.valid, weight=lengths, eps=eps)


GroupEstimator = Callable[[Tensor, Groups, Tensor | None, float], Tensor]
"""``(returns, groups, lengths, eps) -> advantage``, ``[N]``; see :data:`GROUP_ESTIMATORS`."""

GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "max_rl": max_rl,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "batch": whiten_batch,
    "reinforce++": whiten_batch,
}
"""Estimators by kind, as documented in :func:`group_advantage`.

It overwrites the values of rejected and lone members and of groups without spread; an estimator only
has to keep those finite."""

OVER_BATCH = ("batch", "reinforce++")
"""Kinds that treat the whole batch as one group."""
