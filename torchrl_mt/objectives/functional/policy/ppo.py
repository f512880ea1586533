"""The clipped surrogate of PPO, per token: symmetric, "clip higher" and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_clip_epsilon, check_shape
from torchrl_mt.objectives.functional.importance import clip_side, log_ratio, ratio_of


def ppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_epsilon: float | tuple[float, float] = (0.2, 0.2),
    *,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Pessimistic clipped objective (Schulman et al., 2017, https://arxiv.org/abs/1707.06347).

    With ``w = exp(log_prob - old_log_prob)``::

        loss = -min(w * A, clip(w, 1 - low, 1 + high) * A)

    Different bounds are DAPO's "clip higher" (https://arxiv.org/abs/2503.14476). ``dual_clip`` ``c``
    bounds the loss of tokens of negative advantage whose probability grew much (Ye et al., 2019,
    https://arxiv.org/abs/1912.09729, eq. 5)::

        loss = -max(min(w * A, clip(w, 1 - low, 1 + high) * A), c * A)    where A < 0

    The log-ratio is clamped to ±20, so that the loss and its gradient stay finite.

    Args:
        log_prob: ``[N, S]`` floating, under the policy being trained.
        old_log_prob: ``[N, S]`` floating, under the old policy.
        advantage: ``[N, S]`` floating.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        clip_epsilon: ``(low, high)``, or a number for both.
        dual_clip: ``c``, above 1 (3 in the paper); ``None`` for none.

    Returns:
        Loss per token ``[N, S]`` float32, zero on masked tokens; and clip sides ``[N, S]`` int8: -1
        where the ratio is below its bounds, 1 above, else 0.

    Examples:
        >>> log_prob, old = torch.tensor([[1.5, 0.9]]).log(), torch.zeros(1, 2)
        >>> ppo(log_prob, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
        (tensor([[-1.2000, -0.9000]]), tensor([[1, 0]], dtype=torch.int8))
    """
    check_shape("advantage", advantage, log_prob.shape)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1 or None, got {dual_clip}.")
    ratio = ratio_of(log_ratio(log_prob, old_log_prob, mask))
    advantage = torch.where(mask, advantage.float(), 0.0)
    loss, clipped = pessimistic(ratio, advantage, clip_epsilon)
    if dual_clip is not None:
        bound = torch.where(advantage < 0, -dual_clip * advantage, torch.inf)
        loss = torch.minimum(loss, bound)
    return loss, clipped


def pessimistic(
    ratio: Tensor, advantage: Tensor, clip_epsilon: float | tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Compute the worse of the plain and the clipped objective, and the clip sides.

    ``ratio`` and ``advantage`` are ``[N, S]`` float32, 1 and 0 on masked tokens.
    """
    low, high = check_clip_epsilon(clip_epsilon)
    low, high = 1.0 - low, 1.0 + high
    loss = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).neg_()
    return loss, clip_side(ratio.detach(), low, high)
