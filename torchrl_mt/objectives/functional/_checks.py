"""Argument checks shared by the functions of this package: every refusal names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def check_mask(name: str, mask: Tensor, shape: torch.Size) -> None:
    """Refuse a mask that is not boolean or not of ``shape``."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {mask.dtype}; pass `{name}.bool()`.")
    check_shape(name, mask, shape)


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Refuse a tensor whose shape is not ``shape``."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}.")


def check_unit_interval(name: str, value: float) -> None:
    """Refuse a discount outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}.")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0."""
    if not value > 0.0:
        raise ValueError(f"{name} must be positive, got {value}.")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_finite(name: str, value: float) -> None:
    """Refuse what is not a finite number; NaN, infinity, text and truth values are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}.")


def check_gae(reward: Tensor, value: Tensor, mask: Tensor, **discounts: float) -> None:
    """Refuse what no generalised advantage estimate takes."""
    check_mask("mask", mask, reward.shape)
    check_shape("value", value, reward.shape)
    for name, discount in discounts.items():
        check_unit_interval(name, discount)
