"""Whether a model can be given packed rows: found out by giving it a few, not by its name.

A model passes if a packed row's states are those of the row alone, whatever lies beside it.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_mt.objectives.scoring.model_forward import (
    accepts,
    hooked,
    run_model,
    scoring_mode,
    unwrapped,
)
from torchrl_mt.objectives.scoring.packing import forward_passes

_FAULTS: WeakKeyDictionary[nn.Module, dict[str | None, str | None]] = WeakKeyDictionary()


def check_packing(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse a model that cannot be given packed rows.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens that it knows.
        dtype: What it will be computed in; see
            :func:`~torchrl_mt.objectives.scoring.model_forward.run_model`.

    Raises:
        ValueError: If packed rows are not what they are alone, or NaN or infinite.
        TypeError: If the model returns no tensor.
    """
    fault = packing_fault(model, tokens, dtype)
    if fault is not None:
        raise ValueError(
            "packed=True needs a model that keeps packed rows apart, but "
            f"{type(model).__name__} {fault}; pass packed=False."
        )


def packing_fault(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Find out, once per model and attention implementation, why it cannot be given packed rows.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens that it knows.
        dtype: What to compute in.

    Returns:
        The reason, to follow the model's name, or ``None`` if it can.

    Raises:
        ValueError: If the model's states are not finite, which tells nothing and is not remembered.
        TypeError: If it returns no tensor.
    """
    known = _FAULTS.setdefault(model, {})
    kind = _attention_kind(model)
    if kind not in known:
        known[kind] = _signature_fault(model) or _leak(model, tokens, dtype)
    return known[kind]


def takes_lengths(model: nn.Module) -> bool:
    """Tell whether a model's attention is told the lengths of packed rows rather than given a mask.

    Args:
        model: A causal language model or a critic.

    Returns:
        True for transformers' flash attention, whatever its version.
    """
    return "flash" in (_attention_kind(model) or "") and accepts(model, "cu_seq_lens_q")


def _attention_kind(model: nn.Module) -> str | None:
    """Name of a transformers model's attention implementation."""
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if isinstance(kind, str):
            return kind
    return None


def _signature_fault(model: nn.Module) -> str | None:
    """Why the model cannot be called with packed rows."""
    if not accepts(model, "position_ids"):
        return "does not take position_ids"
    mask = inspect.signature(unwrapped(model).forward).parameters.get("attention_mask")
    if mask is not None and mask.default is mask.empty:
        return "cannot do without an attention_mask"
    return None


@torch.no_grad()
def _leak(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why packed rows are not what they are alone."""
    some = torch.cat([tokens.new_tensor([0, 1]), tokens.reshape(-1)]).unique().cpu()
    # The second and the third row come to lie in one sequence; the third is looked at.
    attended = torch.arange(8) < torch.tensor([8, 4, 4])[:, None]
    mask = attended & (torch.arange(3) == 2)[:, None]
    choice = torch.randint(0, len(some), (3, 8), generator=torch.Generator().manual_seed(0))
    other = choice.clone()
    other[1] = (other[1] + 1) % len(some)
    with_lengths = takes_lengths(model)
    states = []
    with scoring_mode(model):
        for index, packed in ((choice, False), (choice, True), (other, True)):
            (step,) = forward_passes(
                some[index], attended, mask, packed=packed, with_lengths=with_lengths
            )
            try:
                inner = _inner_states(model, step.inputs, dtype)
            except TypeError as error:
                if not packed:
                    raise
                return f"cannot be called with position_ids and without attention_mask ({error})"
            _check_tensor(model, inner)
            shape = step.inputs["input_ids"].shape
            if inner.shape[:2] != shape:
                return f"gives states {tuple(inner.shape)} for input_ids {tuple(shape)}"
            states.append(inner.flatten(0, 1)[step.state.to(inner.device)])
    if not all(bool(x.isfinite().all()) for x in states):
        raise ValueError(
            f"packed=True is tried with a few tokens first, but {type(model).__name__} computes NaN or "
            "infinity of them; look at its weights and at dtype."
        )
    alone, together, beside_another = (x.double() for x in states)
    # Rounding in other orders is far below this, another row's influence far above.
    low = dtype is not None or states[0].dtype.itemsize == 2
    tolerance = (0.05 if low else 0.01) * float(alone.norm()) + 1e-30
    if not float((beside_another - together).norm()) <= tolerance:
        return "lets a packed row see the rows before it"
    if not float((alone - together).norm()) <= tolerance:
        return "computes a packed row otherwise than the row alone"
    return None


def _check_tensor(model: nn.Module, states: object) -> None:
    """Refuse what a model gives instead of states, logits or values."""
    if not isinstance(states, Tensor):
        raise TypeError(
            f"{type(model).__name__} must return a tensor or an object that has one as `logits`, got "
            f"{type(states).__name__}."
        )


def _inner_states(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None) -> Any:
    """States below the output layer where the model tells which: a new layer may say nothing."""
    seen: list[Any] = []
    base = getattr(unwrapped(model), "base_model", None)
    with hooked(base, after=seen.append) if isinstance(base, nn.Module) else nullcontext():
        output = run_model(model, inputs, dtype)
    output = seen[-1] if seen else output
    for name in ("last_hidden_state", "logits"):
        output = getattr(output, name, output)
    return output
