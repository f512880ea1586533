"""The tokens at which the policy was least certain: the forks of a text.

The share is taken over the whole batch, so it does not matter how the batch lies in rows.
"""

from __future__ import annotations

import math

from torch import Tensor

from torchrl_mt.checks import check_mask


def entropy_mask(entropy: Tensor, mask: Tensor, rho: float = 0.2) -> Tensor:
    """Keep the share ``rho`` of the sampled tokens that has the highest entropy.

    The policy gradient of Wang et al., 2025 (https://arxiv.org/abs/2506.01939) is taken over
    ``H >= tau``, ``tau`` being such that ``ceil(rho * M)`` of the batch's ``M`` sampled tokens reach
    it; tokens that tie with ``tau`` are all kept. Use the result as the mask of the objective, not of
    the advantage or the returns.

    Args:
        entropy: ``[N, S]`` floating: that of the distribution that each token was sampled from; not
            read on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        rho: Share, in (0, 1].

    Returns:
        ``[N, S]`` bool, false on masked tokens.

    Raises:
        ValueError: If shapes differ, ``rho`` is out of range, or a sampled token's entropy is NaN.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> import torch
        >>> entropy = torch.tensor([[0.1, 9.0, 2.0], [0.3, 0.0, 0.2]])
        >>> mask = torch.tensor([[True, False, True], [True, False, True]])
        >>> entropy_mask(entropy, mask, rho=0.5)
        tensor([[False, False,  True],
                [ True, False, False]])
    """
    check_mask("mask", mask, entropy.shape)
    if not 0.0 < rho <= 1.0:
        raise ValueError(f"rho must lie in (0, 1], got {rho}; to keep no token, drop the term.")
    sampled = entropy.detach()[mask].float()
    total = sampled.numel()
    if not total:
        return mask.clone()
    if bool(sampled.isnan().any()):
        raise ValueError("entropy must not be NaN on sampled tokens: the model is at fault.")
    # The product is rounded: 0.28 of 25 tokens are 7 of them, not 8.
    kept = max(1, math.ceil(round(rho * total, 6)))
    threshold = sampled.kthvalue(total - kept + 1).values
    return mask & (entropy.detach().float() >= threshold)
