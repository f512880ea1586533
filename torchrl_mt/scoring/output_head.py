"""Inputs of a language model's output layer, from which logits can be recomputed.

Every call compares recomputed logits with the model's own at a few positions; where they differ, whole
logits are returned. Changes to other positions' logits only, or to larger logits than those, go
unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchrl_mt._hosts.torch import is_changed, is_compiled
from torchrl_mt.scoring.forward import hooked, run_model, text_config, unwrapped

PROBED = 4
"""Positions at which a call's logits are compared."""

# Models whose logits were found to differ: they are always asked for whole logits.
WHOLE_ONLY: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class OutputStates:
    """States with the logits ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``."""

    hidden: Tensor
    """``[B, L, H]``."""
    weight: Tensor
    """``[V, H]``."""
    bias: Tensor | None
    """``[V]``."""
    scale: float
    """Factor of the layer's output."""
    softcap: float | None
    """Bound of the logits; ``None`` for no bound and no ``tanh``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of some states ``[K, H]``: ``[K, V]``."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        x = self.scale * nn.functional.linear(hidden, self.weight.to(hidden.dtype), bias)
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


def output_states(
    model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None
) -> OutputStates | Tensor:
    """Run a language model up to its output layer.

    Args:
        model: A causal language model.
        inputs: Its keyword arguments, with ``input_ids`` ``[B, L]``.
        dtype: See :func:`~torchrl_mt.scoring.forward.run_model`.

    Returns:
        The states; or whole logits ``[B, L, V]`` if the output layer is not a plain ``nn.Linear`` (an
        adapter, a shard, a hook), is compiled, or is called with other arguments than states
        ``[B, L, H]``; if the logits undergo more than a factor and soft-capping; or if the states lost
        their graph (a reentrant checkpoint around the model). This is tested on the last logits of the
        first row: a bound that they do not reach (a clamp) goes unnoticed. Let
        ``get_output_embeddings`` of such a model return ``None``.

    Raises:
        ValueError: If the logits have another shape.
        TypeError: If the model returns no logits.
    """
    layer = None if model in WHOLE_ONLY else _output_layer(model)
    if layer is None:
        return whole_logits(model, inputs, dtype)
    shape = inputs["input_ids"].shape
    states: list[Tensor] = []
    raw: list[Tensor] = []

    def keep(args: tuple[Any, ...], output: Tensor) -> None:
        raw.append(output)

    def cut(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0] if len(args) == 1 else None
        if not isinstance(x, Tensor) or x.shape[:-1] != shape:
            return None  # Unknown arguments cannot be cut.
        states.append(x)
        return (x[:1, -PROBED:].detach(),)

    failed = False
    try:
        with hooked(layer, before=cut, after=keep):
            output = run_model(model, inputs, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if not states:
            raise
        failed = True
    if failed:
        # The model may need all logits; an unrelated error occurs again.
        logits = whole_logits(model, inputs, dtype)
        WHOLE_ONLY.add(model)
        return logits
    if not states:
        # The layer was bypassed, as by compiled code: nothing was cut.
        return checked(model, logits_of(model, output), shape)
    if len(states) == 1 and not lost_graph(model, layer, states[0]):
        logits = logits_of(model, output)
        for scale, softcap in post_processing(model):
            if same(raw[0], scale, softcap, logits):
                return OutputStates(states[0], layer.weight, layer.bias, scale, softcap)
    # NaN cannot be compared: decide in a later pass.
    if not raw or bool(raw[0].isfinite().all()):
        WHOLE_ONLY.add(model)
    return whole_logits(model, inputs, dtype)


def whole_logits(
    model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None = None
) -> Tensor:
    """Compute a language model's logits ``[B, L, V]``; see :func:`output_states`."""
    logits = logits_of(model, run_model(model, inputs, dtype))
    return checked(model, logits, inputs["input_ids"].shape)


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """Return the logits of a model's output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            "actor must return logits [B, L, V], or an object that has them as `logits`; from "
            f"{type(model).__name__} got {type(output).__name__}."
        )
    return logits


def checked(model: nn.Module, logits: Tensor, shape: torch.Size) -> Tensor:
    """Refuse logits that are not one distribution per token."""
    if logits.ndim != 3 or logits.shape[:2] != shape:
        rows, length = shape
        raise ValueError(
            f"actor must return logits ({rows}, {length}, vocabulary), one distribution after each "
            f"token of input_ids {(rows, length)}; from {type(model).__name__} got "
            f"{tuple(logits.shape)}; cut off those of a soft prompt, and put the batch first."
        )
    return logits


def lost_graph(model: nn.Module, layer: nn.Linear, states: Tensor) -> bool:
    """Whether states of trained layers have no graph, as under a reentrant checkpoint."""
    if states.requires_grad or not torch.is_grad_enabled():
        return False
    others = (module for module in model.modules() if module is not layer)
    return any(p.requires_grad for module in others for p in module.parameters(recurse=False))


def _output_layer(model: nn.Module) -> nn.Linear | None:
    """Return the model's output layer if its product may be computed outside of the model."""
    if getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False):
        return None  # DistributedDataParallel would trace gradients through the cut logits.
    outer, model = model, unwrapped(model)
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return None
    if layer.weight.shape != (layer.out_features, layer.in_features):
        return None  # A shard, which is whole only inside the model's forward pass.
    if any(parameter.is_meta for parameter in model.parameters()):
        return (
            None  # Offloaded: the layer may have its weights only inside the model's forward pass.
        )
    special = is_compiled(outer) or is_compiled(model) or is_compiled(layer) or is_changed(layer)
    return None if special else layer


def post_processing(model: nn.Module) -> list[tuple[float, float | None]]:
    """List candidate (scale, softcap) pairs from a transformers configuration, likeliest first."""
    config = text_config(model)
    factor = getattr(config, "logit_scale", None) or 1.0
    scaling = getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    # Small logits hardly show a soft cap: configured values come first.
    scales = dict.fromkeys([factor, 1.0 / scaling, scaling, 1.0])
    if scaling != 1.0:
        scales = dict.fromkeys([1.0 / scaling, scaling, factor, 1.0])
    caps = [None] if softcap is None else [float(softcap), None]
    return [(float(scale), cap) for cap in caps for scale in scales]


@torch.no_grad()
def same(raw: Tensor, scale: float, softcap: float | None, logits: Tensor) -> bool:
    """Whether scale and soft cap turn the layer's output into the logits."""
    if raw.shape != logits.shape:
        return False
    low = raw.dtype.itemsize == 2
    expected = raw.double() * scale
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    error = (expected - logits.double()).abs().max()
    return bool(error <= (0.02 if low else 1e-4) * expected.abs().max())
