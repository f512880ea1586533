"""New weights for what samples: checked whole before any is copied, or handed on to where they lie."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm import LLMWrapperBase

__all__ = ["hand_on", "load_weights", "weights_for"]


def weights_for(
    module: nn.Module, source: nn.Module | TensorDictBase | Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Find in ``source`` the weights of ``module``.

    Args:
        module: what the weights are for.
        source: a module of the same kind, a TorchRL wrapper around one, a state dict, or parameters in
            a TensorDict. A tied weight may be given under any of its names.

    Returns:
        Tensors by name, as in ``module.state_dict()``.

    Raises:
        TypeError: if ``source`` is none of these.
        ValueError: if names or shapes do not fit.

    Examples:
        >>> sorted(weights_for(nn.Linear(2, 3), nn.Linear(2, 3)))
        ['bias', 'weight']
    """
    own = module.state_dict()
    if isinstance(source, LLMWrapperBase):
        source = source.model
    if isinstance(source, nn.Module):
        weights: Mapping[str, torch.Tensor] = source.state_dict()
    elif isinstance(source, TensorDictBase):
        computed = dict(module.named_buffers()).keys() - own.keys()
        weights = dict(source.flatten_keys(".").exclude(*computed).items())
    elif isinstance(source, Mapping):
        weights = source
    else:
        raise TypeError(
            "source must be a module, a state dict or parameters in a TensorDict, got "
            f"{type(source).__name__}."
        )
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = sorted(
        name for name in own if name not in weights and own[name].data_ptr() not in given
    )
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            "source must have the weights of the engine's model, got "
            f"{len(missing)} missing {missing[:3]} and {len(unknown)} unknown {unknown[:3]}."
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"source[{name!r}] must have shape {tuple(own[name].shape)}, "
                f"got {tuple(value.shape)}."
            )
    return weights


def load_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights in place; those that are in place already are left alone.

    Args:
        module: what the weights are for.
        weights: what :func:`weights_for` returned for it.
    """
    own = module.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            if value.data_ptr() != own[name].data_ptr():
                own[name].copy_(value)
    for device in {value.device for value in own.values() if value.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # sampling may run on another stream


def hand_on(on_update: Callable[[Any], Any], source: Any) -> None:
    """Call a user's function, which may be a coroutine function, and wait for it.

    Args:
        on_update: called with ``source``; what it returns is waited for if it can be.
        source: of the weights.
    """
    result = on_update(source)
    if inspect.isawaitable(result):
        # In a loop of its own: this may be called where one is running.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, _awaited(result)).result()


async def _awaited(result: Any) -> None:
    """Wait for anything that can be awaited."""
    await result
