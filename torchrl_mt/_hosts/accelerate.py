"""Private names of accelerate."""

from __future__ import annotations

import torch
from torch import nn


def execution_device(model: nn.Module) -> torch.device | None:
    """Return where a model computes that accelerate keeps elsewhere; None without its hooks."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None
