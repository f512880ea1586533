"""OTB: each token's return less a baseline of its own, the one of least variance in the gradient.

Tokens are compared by their number among the sampled ones of the episode, wherever these lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_shape
from torchrl_mt.objectives.functional.group import group_advantage
from torchrl_mt.objectives.functional.time.episodes import index_episodes
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype


def otb_advantage(
    returns: Tensor,
    gradient_norm: Tensor,
    mask: Tensor,
    turns: Tensor,
    episode: Tensor,
    group: Tensor,
    *,
    lone_value: float = 0.0,
) -> Tensor:
    """Advantage over the optimal token baseline (https://arxiv.org/abs/2602.07078).

    For the ``t``-th sampled token of each episode, over the episodes ``i`` of its group that have one::

        W[i, t] = sum of gradient_norm[i, s] over s <= t
        A[i, t] = returns[i, t] - sum of W[j, t] * returns[j, t] over j / sum of W[j, t] over j

    Episodes of which little was left to chance so far have little weight. If all weights are 0, all
    count alike. With one turn this is verl's ``optimal_token_baseline``, with several its
    ``tir_optimal_token_baseline``, but for ``lone_value`` where verl may leave the return.

    Args:
        returns: ``[N, S]`` floating: return-to-go of each sampled token, or of its turn.
        gradient_norm: ``[N, S]`` floating, 0 or more: squared norm of the gradient of each sampled
            token's log-probability by the logits, ``1 - 2 p[token] + sum of p ** 2``.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row.
        group: ``[N]`` int64 group id of each row; one per episode.
        lone_value: Advantage of tokens where no other episode of the group has one.

    Returns:
        ``[N, S]`` float32, zero on masked tokens and where returns are equal.

    Examples:
        >>> returns, norms = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.5, 1], [0.5, 0]])
        >>> mask, turns = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2).long()
        >>> otb_advantage(returns, norms, mask, turns, torch.arange(2), torch.zeros(2).long())
        tensor([[ 0.5000,  0.2500],
                [-0.5000, -0.7500]])
    """
    check_shape("returns", returns, mask.shape)
    check_shape("gradient_norm", gradient_norm, mask.shape)
    check_shape("group", group, mask.shape[:1])
    index = index_episodes(mask, turns, episode)
    token, of = index.token, index.of_token
    # Episodes' tokens come one after the other.
    number = torch.arange(len(of), device=of.device) - torch.searchsorted(of, of)
    size = max(1, mask.shape[1]) * len(mask)
    energy = torch.zeros(
        len(index.last_token),
        int(number.max()) + 1 if len(number) else 0,
        dtype=accumulation_dtype(mask.device),
        device=mask.device,
    )
    energy[of, number] = gradient_norm.flatten()[token].to(energy.dtype)
    member = torch.unique(group, return_inverse=True)[1][token // max(1, mask.shape[1])]
    advantage = group_advantage(
        returns.flatten()[token],
        member * size + number,
        "opo",
        lengths=energy.cumsum(-1)[of, number],
        lone_value=lone_value,
    )
    return index.write(advantage)
