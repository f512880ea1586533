"""The coefficient of the KL in the reward: a number, or TorchRL's controller of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torchrl.data import AdaptiveKLController, ConstantKLController

KLCoefficient: TypeAlias = float | ConstantKLController | AdaptiveKLController


def kl_coefficient(kl_coef: KLCoefficient) -> float:
    """Read the coefficient that holds now, of a number or a controller.

    Raises:
        TypeError: If it is neither.
        ValueError: If the number is not finite, or an adaptive one is 0, which no factor changes.
    """
    adaptive = isinstance(kl_coef, AdaptiveKLController)
    return _checked(getattr(kl_coef, "coef", kl_coef), kl_coef, adaptive)


def _checked(value: Any, given: Any, adaptive: bool) -> float:
    """The number, if it is one that may be a coefficient."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"kl_coef must be a number or a KL controller of TorchRL, got {given!r}.")
    value = float(value)
    if not math.isfinite(value) or (adaptive and value == 0):
        expected = "finite and not 0, or it stays 0" if adaptive else "finite"
        raise ValueError(f"kl_coef must be {expected}, got {value}.")
    return value


def update_kl_coefficient(kl_coef: KLCoefficient, kl: Tensor, mask: Tensor) -> None:
    """Tell a controller the KL of one batch, ``[N, S]`` under a mask; a number stays as it is.

    As in TorchRL's ``RolloutFromModel``, a controller is told the mean reward that the KL was, which
    is ``-coef * KL``, and one batch is one of its steps. A mean that is not finite is refused.

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


def kl_state(kl_coef: KLCoefficient) -> dict[str, float | None]:
    """Read what a run must keep to go on: an adaptive coefficient, ``None`` where it is fixed.

    Examples:
        >>> kl_state(AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)), kl_state(0.1)
        ({'kl_coef': 0.1}, {'kl_coef': None})
    """
    adaptive = isinstance(kl_coef, AdaptiveKLController)
    return {"kl_coef": kl_coefficient(kl_coef) if adaptive else None}


def load_kl_state(kl_coef: KLCoefficient, state: Mapping[str, float | None]) -> None:
    """Let an adaptive controller go on from where another was, by what :func:`kl_state` returned.

    A coefficient that is fixed stays what it was given as, and an adaptive one where it is if the state
    is that of a fixed one.
    """
    if not isinstance(state, Mapping) or set(state) != {"kl_coef"}:
        raise ValueError(f"state must be {{'kl_coef': a number or None}}, got {state!r}.")
    value = state["kl_coef"]
    if isinstance(kl_coef, AdaptiveKLController) and value is not None:
        kl_coef.coef = _checked(value, value, adaptive=True)
        if kl_coef.model is not None:
            kl_coef.model.kl_coef = kl_coef.coef
