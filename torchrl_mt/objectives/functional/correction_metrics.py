"""What is reported of the weights of an off-policy correction."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.objectives.functional.importance import effective_sample_size


@torch.no_grad()
def correction_metrics(weight: Tensor, mask: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """Summarise weights over the sampled tokens.

    Args:
        weight: ``[N, S]`` floating, not negative; zero on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        clipped: ``[N, S]`` bool: weights that were cut to a bound; not read on masked tokens.

    Returns:
        Float32 scalars: ``"ess"``, the effective share of the samples
        (:func:`~torchrl_mt.objectives.functional.effective_sample_size`); ``"clip_fraction"``, the
        share of weights that were cut to a bound; ``"mask_fraction"``, the share that is 0.

    Examples:
        >>> weight, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> correction_metrics(weight, mask, weight >= 2)
        {'ess': tensor(0.5000), 'clip_fraction': tensor(0.5000), 'mask_fraction': tensor(0.5000)}
    """
    count = mask.count_nonzero()
    share = 1.0 / count.clamp(min=1)
    return {
        "ess": effective_sample_size(weight, mask),
        "clip_fraction": (clipped & mask).count_nonzero() * share,
        "mask_fraction": (count - weight.count_nonzero()) * share,
    }
