"""Models with PEFT adapters that do something: fresh ones add 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def lora(model: nn.Module, seed: int = 3, **options: Any) -> Any:
    """Give a model LoRA with random weights; it is a ``PeftModel`` then."""
    peft = pytest.importorskip("peft")
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return stirred(peft.get_peft_model(model, peft.LoraConfig(**defaults | options)).eval(), seed)


def stirred(model: nn.Module, seed: int = 3) -> Any:
    """Change what is trained."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    return model
