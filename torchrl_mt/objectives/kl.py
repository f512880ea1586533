"""The KL coefficient: a number or a KL controller of TorchRL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torchrl.data import AdaptiveKLController, ConstantKLController

KLCoefficient: TypeAlias = float | ConstantKLController | AdaptiveKLController


def kl_coefficient(kl_coef: KLCoefficient) -> float:
    """Read the current coefficient of a number or a controller.

    Raises:
        TypeError: If ``kl_coef`` is neither.
        ValueError: If the number is not finite, or an adaptive one is 0: it would stay 0.
    """
    adaptive = isinstance(kl_coef, AdaptiveKLController)
    return _checked(getattr(kl_coef, "coef", kl_coef), kl_coef, adaptive)


def _checked(value: Any, given: Any, adaptive: bool) -> float:
    """Check a coefficient and convert it to a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"kl_coef must be a number or a KL controller of TorchRL, got {given!r}.")
    value = float(value)
    if not math.isfinite(value) or (adaptive and value == 0):
        expected = "finite and not 0, or it stays 0" if adaptive else "finite"
        raise ValueError(f"kl_coef must be {expected}, got {value}.")
    return value


def update_kl_coefficient(kl_coef: KLCoefficient, kl: Tensor, mask: Tensor) -> None:
    """Update a controller with the KL of one batch, ``[N, S]`` under a mask; a number stays.

    As in TorchRL's ``RolloutFromModel``, the controller gets the mean KL reward, ``-coef * KL``, and
    one batch is one step. A mean that is not finite is refused.

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
                f"the KL of a controller's update must be finite on sampled tokens, got mean {mean}; "
                "one of the two policies gave a log-probability that is not finite."
            )
        kl_coef.update([-kl_coefficient(kl_coef) * mean])
        if isinstance(kl_coef.coef, Tensor):
            kl_coef.coef = float(kl_coef.coef)


def kl_state(kl_coef: KLCoefficient) -> dict[str, float | None]:
    """Return the state to save: the coefficient if it is adaptive, else ``None``.

    Examples:
        >>> kl_state(AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)), kl_state(0.1)
        ({'kl_coef': 0.1}, {'kl_coef': None})
    """
    adaptive = isinstance(kl_coef, AdaptiveKLController)
    return {"kl_coef": kl_coefficient(kl_coef) if adaptive else None}


def load_kl_state(kl_coef: KLCoefficient, state: Mapping[str, float | None]) -> None:
    """Restore an adaptive controller from the result of :func:`kl_state`.

    Nothing changes if ``kl_coef``, or the coefficient that was saved, is fixed.
    """
    if not isinstance(state, Mapping) or set(state) != {"kl_coef"}:
        raise ValueError(f"state must be {{'kl_coef': a number or None}}, got {state!r}.")
    value = state["kl_coef"]
    if isinstance(kl_coef, AdaptiveKLController) and value is not None:
        kl_coef.coef = _checked(value, value, adaptive=True)
        if kl_coef.model is not None:
            kl_coef.model.kl_coef = kl_coef.coef
