"""Weight updates of engines: check all tensors before copying any, or call the user's function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm import LLMWrapperBase

__all__ = ["copy_weights", "fitting_weights", "hand_on"]

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, torch.Tensor]


def fitting_weights(source: Weights, model: nn.Module) -> dict[str, torch.Tensor]:
    """Get the tensors of ``source`` by their names in ``model``'s state dict.

    Args:
        source: a model or a TorchRL wrapper around one, a state dict, or parameters in a TensorDict, of
            any dtype and on any device.
        model: the model that will load them.

    Returns:
        All weights by name; a tied weight may have one name only.

    Raises:
        TypeError: if ``source`` is none of these.
        ValueError: if names or shapes do not match those of ``model``.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> sorted(fitting_weights(model.state_dict(), model))
        ['bias', 'weight']
    """
    own = model.state_dict()
    if isinstance(source, LLMWrapperBase):
        source = source.model
    if isinstance(source, nn.Module):
        weights = dict(source.state_dict())
    elif isinstance(source, TensorDictBase):
        computed = dict(model.named_buffers()).keys() - own.keys()
        weights = dict(source.flatten_keys(".").exclude(*computed).items())
    elif isinstance(source, Mapping):
        weights = dict(source)
    else:
        raise TypeError(
            "source must be a model, a state dict or a TensorDict of parameters, got "
            f"{type(source).__name__}."
        )
    # A tied weight has two names, but ``parameters()`` lists one of them.
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = sorted(
        name for name in own if name not in weights and own[name].data_ptr() not in given
    )
    unknown = sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            "source must have the weights of the engine's model, got "
            f"{len(missing)} missing {missing[:3]} and {len(unknown)} unknown {unknown[:3]}"
            f"{_prefix_advice(weights, own)}."
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"source[{name!r}] must have shape {tuple(own[name].shape)}, "
                f"got {tuple(value.shape)}."
            )
    return weights


def _prefix_advice(given: Iterable[str], own: Iterable[str]) -> str:
    """Advice for an error, if all names differ by the same prefix."""
    # The longest name is the least likely to end like another by chance.
    name = max(given, key=len, default="")
    for other in own:
        if other.endswith("." + name):
            return f": its names lack {other.removesuffix(name)!r} in front"
        if name.endswith("." + other):
            return f": its names have {name.removesuffix(other)!r} in front, which must go"
    return ""


@torch.no_grad()
def copy_weights(weights: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Copy weights into the model's tensors in place, converting dtype and device."""
    own = model.state_dict()
    for name, value in weights.items():
        if value.device != own[name].device or value.data_ptr() != own[name].data_ptr():
            own[name].copy_(value, non_blocking=True)
    if own and next(iter(own.values())).device.type == "cuda":
        # The next step of generation may run on another stream.
        torch.cuda.synchronize(next(iter(own.values())).device)


def hand_on(on_update: Callable[[Any], Any], source: Any) -> None:
    """Call ``on_update(source)`` and wait for it; it may be a coroutine function."""
    result = on_update(source)
    if inspect.isawaitable(result):
        # In its own thread and loop: the caller may be inside a running loop.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, _awaited(result)).result()


async def _awaited(result: Any) -> None:
    """Await ``result``; ``asyncio.run`` takes coroutines only."""
    await result
