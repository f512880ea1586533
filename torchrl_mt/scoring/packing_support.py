"""Whether a model can be given packed rows: found out by giving it a few, not by its name.

A model passes if no other row's embedding has a gradient in a packed row's states, which tells a leak
however weak the weights are, and if those states are those of the row alone.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_mt.scoring.forward import (
    accepts,
    hooked,
    run_model,
    scoring_mode,
    unwrapped,
)
from torchrl_mt.scoring.packing import ForwardPass, forward_passes

LENGTHS = (12, 4, 4, 4)
"""Tokens of the rows that are tried: the first is a sequence, the others share one."""
LOOKED_AT = 2
"""The row whose states are looked at: one lies before it, one after it."""
ROUNDING = 1e-3
"""Share of a row's states that rounding in other orders may change."""
LOW_ROUNDING = 0.05
"""The same of sums in half precision."""

_FAULTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def check_packing(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse a model that cannot be given packed rows.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens that it knows.
        dtype: What it will be computed in; see
            :func:`~torchrl_mt.scoring.forward.run_model`.

    Raises:
        ValueError: If packed rows are not what they are alone, or nothing can be told: see
            :func:`packing_fault`.
        TypeError: If the model returns no tensor.
    """
    fault = packing_fault(model, tokens, dtype)
    if fault is not None:
        raise ValueError(
            "packed=True needs a model that keeps packed rows apart, but "
            f"{type(model).__name__} {fault}; pass packed=False."
        )


def packing_fault(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Find out why a model cannot be given packed rows.

    It is found out once per model, attention implementation, type that is computed in and kind of
    device. What is excluded: influence of a row on another, earlier or later one of its sequence or of
    its batch, that has a gradient (it must be zero, not small) or that is above rounding; and states
    other than the row's alone by more than rounding. What is not: what sets in only with longer rows or
    more of them than are tried; what goes through a weight that is exactly zero now; influence without
    a gradient, or use of a position, that is below rounding. Where no gradient can be had (compiled
    code, kernels or weights without one) other rows must not change a single bit.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens that it knows.
        dtype: What to compute in.

    Returns:
        The reason, to follow the model's name, or ``None`` if it can.

    Raises:
        ValueError: If the model's states are not finite or do not depend on its tokens, which tells
            nothing and is not remembered.
        TypeError: If it returns no tensor.
    """
    known = _FAULTS.setdefault(model, {})
    kind = (_attention_kind(model), *_types(model, dtype))
    if kind not in known:
        try:
            # What is run is not the wrapper, by which workers would wait for each other.
            known[kind] = _signature_fault(model) or _leak(unwrapped(model), tokens, dtype)
        except _MisfitError as misfit:
            known[kind] = str(misfit)
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


def _types(model: nn.Module, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, str]:
    """Type of the model's weights, type that their products are computed in, and kind of device."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    device = weight.device.type
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return weight.dtype, dtype or weight.dtype, device


def _signature_fault(model: nn.Module) -> str | None:
    """Why the model cannot be called with packed rows, or not with long ones."""
    if not accepts(model, "position_ids"):
        return "does not take position_ids"
    mask = inspect.signature(unwrapped(model).forward).parameters.get("attention_mask")
    if mask is not None and mask.default is mask.empty:
        return "cannot do without an attention_mask"
    config = getattr(unwrapped(model), "config", None)
    find = getattr(config, "get_text_config", None)
    config = find() if callable(find) else config
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or [""]):
        return f"attends within chunks of {chunk} tokens that do not begin where a row does"
    return None


def _leak(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why packed rows are not what they are alone."""
    some = torch.cat([tokens.new_tensor([0, 1]), tokens.reshape(-1)]).unique().cpu()
    longest = max(LENGTHS)
    attended = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    itself = (torch.arange(len(LENGTHS)) == LOOKED_AT)[:, None]
    generator = torch.Generator().manual_seed(0)
    choice = torch.randint(0, len(some), attended.shape, generator=generator)
    changed = (choice + 1) % len(some)
    with_lengths = takes_lengths(model)

    def step(index: Tensor, packed: bool = True) -> ForwardPass:
        (only,) = forward_passes(
            some[index], attended, attended & itself, packed=packed, with_lengths=with_lengths
        )
        return only

    # In this order: to leave inference mode is to record gradients.
    with torch.inference_mode(False), scoring_mode(model):
        alone = _row_states(model, step(choice, packed=False), dtype)
        try:
            together = _row_states(model, step(choice), dtype)
        except TypeError as error:
            return f"cannot be called with position_ids and without attention_mask ({error})"
        beside_others = _row_states(model, step(torch.where(itself, choice, changed)), dtype)
        other = _row_states(model, step(torch.where(itself, changed, choice)), dtype)
        heard = _has_gradient_of_others(model, step(choice), dtype)
    if not all(bool(x.isfinite().all()) for x in (alone, together, beside_others, other)):
        raise ValueError(
            f"packed=True is tried with a few tokens first, but {type(model).__name__} computes NaN or "
            "infinity of them; look at its weights and at dtype."
        )
    if torch.equal(together, other):
        raise ValueError(
            f"packed=True is tried with a few tokens first, but {type(model).__name__} computes the "
            "same of any, which does not tell whether it keeps rows apart; give it weights other than "
            "zero, or pass packed=False until it is trained."
        )
    low = _types(model, dtype)[1].itemsize <= 2
    tolerance = (LOW_ROUNDING if low else ROUNDING) * float(alone.double().norm())
    # Without a gradient, a weak leak looks as rounding does.
    most = 0.0 if heard is None else tolerance
    if heard or not _distance(beside_others, together) <= most:
        return "lets packed rows see each other"
    if not _distance(alone, together) <= tolerance:
        return "computes a packed row otherwise than the row alone"
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    """Norm of a difference."""
    return float((a.double() - b.double()).norm())


def _has_gradient_of_others(
    model: nn.Module, step: ForwardPass, dtype: torch.dtype | None
) -> bool | None:
    """Whether other rows' embeddings have a gradient in the row's states; ``None`` if none has one."""
    ids = step.inputs["input_ids"]
    own = torch.zeros(ids.numel(), dtype=torch.bool)
    own[int(step.state.min()) : int(step.state.max()) + 2] = True
    inside, outside = [], []
    try:
        for gradient in _gradients(model, step, dtype):
            flat = gradient.flatten(0, 1).cpu()
            inside.append(flat[own].flatten())
            outside.append(flat[~own].flatten())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None  # Of kernels without a backward pass.
    told = bool(inside) and bool(torch.cat(inside + outside).isfinite().all())
    # States that depend on the row by steps alone have no gradient in it, nor in others.
    told = told and bool(torch.cat(inside).any())
    return bool(torch.cat(outside).any()) if told else None


def _gradients(model: nn.Module, step: ForwardPass, dtype: torch.dtype | None) -> list[Tensor]:
    """Gradients of the row's states in the embeddings ``[B, L, H]`` of all tokens."""
    ids = step.inputs["input_ids"]
    embedded: list[Tensor] = []
    calls: list[bool] = []

    def before(args: tuple[Any, ...]) -> None:
        given = args[0] if args else None
        calls.append(isinstance(given, Tensor) and torch.equal(given.to(ids.device), ids))

    def after(output: Any) -> Tensor | None:
        if not calls.pop() or not isinstance(output, Tensor):
            return None
        embedded.append(output.detach().requires_grad_())
        # What is done to it in place must not be done to the leaf.
        return embedded[-1].clone()

    find = getattr(model, "get_input_embeddings", None)
    first = find() if callable(find) else None
    with ExitStack() as stack:
        for module in model.modules():
            if module is first or isinstance(module, nn.Embedding):
                stack.enter_context(hooked(module, before=before, after=after))
        stack.enter_context(torch.enable_grad())
        states = _row_states(model, step, dtype)
        if not embedded or not states.requires_grad:
            return []
        generator = torch.Generator().manual_seed(1)
        # Norms and means hide what is the same in all directions.
        weight = torch.randn(states.shape, generator=generator).to(states)
        found = torch.autograd.grad(states, embedded, weight, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _row_states(model: nn.Module, step: ForwardPass, dtype: torch.dtype | None) -> Tensor:
    """States of the row that is looked at."""
    inner = _inner_states(model, step.inputs, dtype)
    if not isinstance(inner, Tensor):
        raise TypeError(
            f"{type(model).__name__} must return a tensor or an object that has one as `logits`, got "
            f"{type(inner).__name__}."
        )
    shape = step.inputs["input_ids"].shape
    if inner.shape[:2] != shape:
        raise _MisfitError(f"gives states {tuple(inner.shape)} for input_ids {tuple(shape)}")
    return inner.flatten(0, 1)[step.state.to(inner.device)]


class _MisfitError(Exception):
    """States that do not fit the tokens; why, to follow the model's name."""


def _inner_states(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None) -> Any:
    """States below the output layer where the model tells which: a new layer may say nothing."""
    seen: list[Any] = []
    base = getattr(model, "base_model", None)
    with hooked(base, after=seen.append) if isinstance(base, nn.Module) else nullcontext():
        output = run_model(model, inputs, dtype)
    output = seen[-1] if seen else output
    for name in ("last_hidden_state", "logits"):
        output = getattr(output, name, output)
    return output
