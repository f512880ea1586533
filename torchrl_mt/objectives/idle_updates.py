"""Updates that follow regularisers alone are counted, and a run of them ends in an error."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from torchrl_mt._hosts.torch import times_changed


class IdleUpdates:
    """Counter of updates in a row on rows whose advantages are all 0.

    Calls with the same weights (micro-batches) belong to one update, which is idle if all are.
    """

    def __init__(self) -> None:
        self._count = 0
        self._weights: int | None = None
        self._idle = False

    def count(self, idle: bool, parameters: Iterable[Tensor], most: int | None) -> None:
        """Count the updates before a call of the loss.

        Args:
            idle: Whether the rows' advantages are all 0.
            parameters: What the updates change.
            most: Number of idle updates in a row that raises an error.

        Raises:
            RuntimeError: If too many updates in a row were idle.
        """
        weights = sum(map(times_changed, parameters))  # an optimizer step changes it
        if weights != self._weights:
            self._count = self._count + 1 if self._idle else 0
            self._weights, self._idle = weights, True
        self._idle &= idle
        if self._idle and self._count == most:
            raise RuntimeError(
                f"the advantage was 0 on all trained tokens in {self._count} updates in a row, so only "
                "the entropy bonus or the KL changed the model, which destroys it. Stop if the rewards "
                "are as good as they can be. Otherwise: were the answers cut (stop strings, "
                "Limits(max_response_tokens=...))? Do the rewards of the episodes that are compared "
                "differ? loss_module.max_idle_updates = None goes on."
            )
