"""The coefficient of the KL in the reward: a number, or TorchRL's controller of one."""

from __future__ import annotations

import math
from typing import TypeAlias

from torch import Tensor
from torchrl.data import AdaptiveKLController, ConstantKLController

KLCoefficient: TypeAlias = float | ConstantKLController | AdaptiveKLController


def kl_coefficient(kl_coef: KLCoefficient) -> float:
    """Read the coefficient that holds now.

    Args:
        kl_coef: A number or a controller.

    Returns:
        The number.

    Raises:
        TypeError: If it is neither.
        ValueError: If the number is not finite, or an adaptive one is 0, which no factor changes.

    Examples:
        >>> kl_coefficient(ConstantKLController(kl_coef=0.1))
        0.1
    """
    value = getattr(kl_coef, "coef", kl_coef)
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"kl_coef must be a number or a KL controller of TorchRL, got {kl_coef!r}.")
    value = float(value)
    adaptive = isinstance(kl_coef, AdaptiveKLController)
    if not math.isfinite(value) or (adaptive and value == 0):
        expected = "finite and not 0, or it stays 0" if adaptive else "finite"
        raise ValueError(f"kl_coef must be {expected}, got {value}.")
    return value


def update_kl_coefficient(kl_coef: KLCoefficient, kl: Tensor, mask: Tensor) -> None:
    """Tell a controller the KL of one batch; a number stays as it is.

    As in TorchRL's ``RolloutFromModel``, a controller is told the mean reward that the KL was, which
    is ``-coef * KL``, and one batch is one of its steps.

    Args:
        kl_coef: A number or a controller.
        kl: ``[N, S]`` estimates per token.
        mask: ``[N, S]`` bool, true on sampled tokens.

    Raises:
        ValueError: If the mean is not finite; the controller is not told then.

    Examples:
        >>> import torch
        >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
        >>> update_kl_coefficient(controller, torch.tensor([[3.0]]), torch.tensor([[True]]))
        >>> round(float(controller.coef), 4)  # too far from the reference: it grows
        0.102
    """
    if isinstance(kl_coef, (ConstantKLController, AdaptiveKLController)) and bool(mask.any()):
        mean = float(kl[mask].double().mean())
        if not math.isfinite(mean):
            raise ValueError(
                f"the KL that a controller is told must be finite on sampled tokens, got mean {mean}; "
                "one of the two policies gave a log-probability that is no number."
            )
        kl_coef.update([-kl_coefficient(kl_coef) * mean])
        if isinstance(kl_coef.coef, Tensor):
            kl_coef.coef = float(kl_coef.coef)
