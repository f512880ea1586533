"""What the loss reports beside its terms: detached means over the sampled tokens, always finite."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional import aggregate, effective_sample_size, kl_estimate
from torchrl_mt.objectives.functional.importance import log_ratio, ratio_of

POLICY_DIAGNOSTICS = (
    "trained_tokens",
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "approx_kl",
    "ess",
    "entropy",
)
CRITIC_DIAGNOSTICS = ("value_clip_fraction", "explained_variance")
CORRECTION_DIAGNOSTICS = (
    "correction_ess",
    "correction_clip_fraction",
    "correction_mask_fraction",
)


@torch.no_grad()
def policy_diagnostics(
    log_prob: Tensor, old: Tensor, entropy: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Tokens, clip fractions, KL from the old policy (k3), effective share of samples, entropy."""
    difference = log_ratio(log_prob, old, mask)
    side = clipped.to(torch.int8)
    return {
        "trained_tokens": mask.sum().float(),
        "clip_fraction": aggregate(side != 0, mask),
        "clip_fraction_low": aggregate(side < 0, mask),
        "clip_fraction_high": aggregate(side > 0, mask),
        "approx_kl": aggregate(kl_estimate(torch.zeros_like(difference), difference, "k3"), mask),
        "ess": effective_sample_size(ratio_of(difference), mask),
        "entropy": aggregate(entropy, mask),
    }


@torch.no_grad()
def critic_diagnostics(
    value: Tensor, returns: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Share of clipped values, and ``1 - Var(returns - value) / Var(returns)``, 0 without variance."""
    spread, left = _variance(returns, mask), _variance(returns - value, mask)
    # Read from the data: the variance of equal returns is a rounding error, by which one divides.
    sampled = returns[mask]
    varied = (sampled != sampled[:1]).any() & (spread > 0)
    explained = torch.where(varied, 1.0 - left / torch.where(varied, spread, 1.0), 0.0)
    return {"value_clip_fraction": aggregate(clipped, mask), "explained_variance": explained}


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    """Variance over the sampled tokens."""
    return aggregate((x - aggregate(x, mask)).square(), mask)
