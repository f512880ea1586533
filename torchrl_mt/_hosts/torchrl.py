"""Private names of TorchRL: what its losses know of masks."""

from __future__ import annotations

from tensordict import NestedKey
from torchrl.objectives import LossModule

__all__ = ["loss_mask_keys"]

# --- Losses ---------------------------------------------------------------------------------------


def loss_mask_keys(loss: LossModule) -> tuple[NestedKey, ...]:
    """Where a loss looks for masks of what counts: ``loss_mask_key``, or the host's usual places."""
    return loss._loss_mask_keys()
