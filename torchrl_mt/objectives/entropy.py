"""The entropy coefficient: a number, or a controller that holds the entropy near a target."""

from __future__ import annotations

import math
from typing import Any

from torchrl_mt.checks import check_finite, check_positive


class EntropyController:
    """Raises the coefficient of the entropy bonus step by step while the entropy is too low.

    After each optimizer step, with the entropy ``e`` of that step (Skywork-OR1,
    https://arxiv.org/abs/2505.22312)::

        c    = min(max(c + delta if e < target else c - delta, 0), max_coef)
        coef = c if e <= target else 0

    Used as TorchRL's KL controllers are: ``MultiTurnLoss(entropy_coef=controller)``, and
    ``controller.update(entropy)`` after each step.

    Args:
        target: Entropy per token to stay above, in nats.
        init_coef: First coefficient, which also counts before the first update.
        delta: Change at each update.
        max_coef: Largest coefficient.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If it is none.

    Examples:
        >>> controller = EntropyController(target=0.2, delta=0.01)
        >>> for entropy in (0.1, 0.1, 0.3):
        ...     controller.update(entropy)
        ...     print(controller.coef)
        0.01
        0.02
        0.0
    """

    def __init__(
        self, target: float, *, init_coef: float = 0.0, delta: float = 0.005, max_coef: float = 1.0
    ) -> None:
        check_finite("target", target)
        check_positive("delta", delta)
        check_positive("max_coef", max_coef)
        if not 0.0 <= init_coef <= max_coef:
            raise ValueError(f"init_coef must lie in [0, max_coef = {max_coef}], got {init_coef}.")
        self.target, self.delta, self.max_coef = target, delta, max_coef
        self._coef, self._is_low = float(init_coef), True

    @property
    def coef(self) -> float:
        """The coefficient for the next step."""
        return self._coef if self._is_low else 0.0

    def update(self, entropy: float) -> None:
        """Count the mean entropy per token of one step, over all its rows and ranks.

        Raises:
            ValueError: If it is not finite.
        """
        entropy = float(entropy)
        if not math.isfinite(entropy):
            raise ValueError(f"entropy must be finite, got {entropy}.")
        step = self.delta if entropy < self.target else -self.delta
        self._coef = min(max(self._coef + step, 0.0), self.max_coef)
        self._is_low = entropy <= self.target

    def state_dict(self) -> dict[str, Any]:
        """Return what to save."""
        return {"coef": self._coef, "is_low": self._is_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._coef, self._is_low = float(state["coef"]), bool(state["is_low"])


def entropy_coefficient(entropy_coef: float | EntropyController) -> float:
    """Read the current coefficient of a number or a controller.

    Raises:
        TypeError: If ``entropy_coef`` is neither.
        ValueError: If the number is not finite.
    """
    if isinstance(entropy_coef, EntropyController):
        return entropy_coef.coef
    check_finite("entropy_coef", entropy_coef)
    return entropy_coef
