"""Whether a model keeps packed rows apart: tried once with a few tokens, not told by its name.

A model passes if a packed row's states are those of the row alone, and if no other row's embedding has a
gradient in them. The gradient must be zero, not small: it tells a leak through weights that are still so
weak that the states differ by less than rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_mt._hosts.transformers import attention_implementation
from torchrl_mt.scoring.forward import (
    accepts,
    hooked,
    run_model,
    scoring_mode,
    text_config,
    unwrapped,
)
from torchrl_mt.scoring.packing import ForwardPass, check_rows, forward_passes
from torchrl_mt.scoring.passes import Passes

LENGTHS = (12, 4, 4, 4)
"""Tokens of the rows that are tried: the first is a sequence, the others share one."""
LOOKED_AT = 2
"""The row whose states are looked at: one lies before it, one after it."""
ROUNDING = 1e-3
"""Share of a row's states that rounding in other orders may change."""
LOW_ROUNDING = 0.05
"""The same of sums in half precision."""

_FAULTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def passes_over(
    model: nn.Module, tokens: Tensor, attention_mask: Tensor, mask: Tensor, passes: Passes
) -> Iterator[ForwardPass]:
    """Check rows, and cut them into forward passes of a model.

    Raises:
        ValueError: If shapes differ, a sampled token lies on padding, or the model cannot be given
            packed rows.
        TypeError: If a mask is not boolean.
    """
    check_rows(tokens, attention_mask, mask)
    if passes.packed:
        check_packing(model, tokens[attention_mask], passes.dtype)
    yield from forward_passes(
        tokens, attention_mask, mask, passes, with_lengths=passes.packed and takes_lengths(model)
    )


def check_packing(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuse a model that cannot be given packed rows, for the reason of :func:`packing_fault`."""
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
    its batch, that has a gradient or is above rounding; and states other than the row's alone by more
    than rounding. What is not: what sets in only with longer rows or more of them than are tried; what
    goes through a weight that is exactly zero now; influence without a gradient, or use of a position,
    that is below rounding. Where no gradient can be had (compiled code, kernels without one) other rows
    must not change a single bit.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens that it knows.
        dtype: What to compute in.

    Returns:
        The reason, to follow the model's name, or ``None`` if it can.

    Raises:
        ValueError: If the model gives no state for each token, or states that are not finite or do not
            depend on its tokens, which tells nothing and is not remembered.
        TypeError: If it returns no tensor.
    """
    known = _FAULTS.setdefault(model, {})
    kind = (attention_implementation(model), *_types(model, dtype))
    if kind not in known:
        # What is run is not the wrapper, by which workers would wait for each other.
        known[kind] = _signature_fault(model) or _trial_fault(unwrapped(model), tokens, dtype)
    return known[kind]


def takes_lengths(model: nn.Module) -> bool:
    """Tell whether a model's attention is told the lengths of packed rows rather than given a mask.

    That is so of transformers' flash attention, whatever its version.
    """
    return "flash" in (attention_implementation(model) or "") and accepts(model, "cu_seq_lens_q")


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
    config = text_config(model)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or [""]):
        return f"attends within chunks of {chunk} tokens that do not begin where a row does"
    return None


def _trial_fault(model: nn.Module, tokens: Tensor, dtype: torch.dtype | None) -> str | None:
    """Why packed rows are not what they are alone."""
    name = type(model).__name__
    some = torch.cat([tokens.new_tensor([0, 1]), tokens.reshape(-1)]).unique().cpu()
    attended = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    looked_at = attended & (torch.arange(len(LENGTHS)) == LOOKED_AT)[:, None]
    choice = torch.randint(0, len(some), attended.shape, generator=torch.Generator().manual_seed(0))

    def trial(index: Tensor, packed: bool) -> ForwardPass:
        with_lengths = packed and takes_lengths(model)
        (step,) = forward_passes(
            some[index], attended, looked_at, Passes(packed=packed), with_lengths=with_lengths
        )
        return step

    # In this order: to leave inference mode is to record gradients.
    with torch.inference_mode(False), scoring_mode(model):
        alone = _states(model, trial(choice, packed=False), dtype)
        step = trial(choice, packed=True)
        try:
            together = _states(model, step, dtype)
        except TypeError as error:
            return f"cannot be called with position_ids and without attention_mask ({error})"
        if not bool(alone.isfinite().all() & together.isfinite().all()):
            raise ValueError(
                f"packed=True is tried with a few tokens first, but {name} computes NaN or infinity of "
                "them; look at its weights and at dtype."
            )
        leaks = _has_gradient_of_others(model, step, dtype)
        if leaks is None:
            changed = (choice + 1) % len(some)
            others = _states(model, trial(torch.where(looked_at, choice, changed), True), dtype)
            itself = _states(model, trial(torch.where(looked_at, changed, choice), True), dtype)
            leaks = not torch.equal(others, together)
            if torch.equal(itself, together):
                raise ValueError(
                    f"packed=True is tried with a few tokens first, but {name} computes the same of "
                    "any, which does not tell whether it keeps rows apart; give it weights other than "
                    "zero, or pass packed=False until it is trained."
                )
    low = _types(model, dtype)[1].itemsize <= 2
    tolerance = (LOW_ROUNDING if low else ROUNDING) * float(alone.double().norm())
    if leaks:
        return "lets packed rows see each other"
    if not float((alone.double() - together.double()).norm()) <= tolerance:
        return "computes a packed row otherwise than the row alone"
    return None


def _has_gradient_of_others(
    model: nn.Module, step: ForwardPass, dtype: torch.dtype | None
) -> bool | None:
    """Whether other rows' embeddings have a gradient in the row's states; ``None`` if none has one."""
    ids = step.inputs["input_ids"]
    embedded: list[Tensor] = []

    def cut(args: tuple[Any, ...], output: Any) -> Tensor | None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or not torch.equal(given.to(ids.device), ids):
            return None
        embedded.append(output.detach().requires_grad_())
        # What is done to it in place must not be done to the leaf.
        return embedded[-1].clone()

    find = getattr(model, "get_input_embeddings", None)
    first = find() if callable(find) else None
    with ExitStack() as stack:
        for module in model.modules():
            if module is first or isinstance(module, nn.Embedding):
                stack.enter_context(hooked(module, after=cut))
        stack.enter_context(torch.enable_grad())
        try:
            states = _states(model, step, dtype)
            if not embedded or not states.requires_grad:
                return None
            # Norms and means hide what is the same in all directions.
            weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
            found = torch.autograd.grad(states, embedded, weight.to(states), allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None  # Of kernels without a backward pass.
    own = torch.zeros(ids.numel(), dtype=torch.bool)
    own[int(step.state.min()) : int(step.state.max()) + 2] = True
    gradients = [gradient.flatten(0, 1).cpu() for gradient in found if gradient is not None]
    # States that depend on the row by steps alone have no gradient in it, nor in others.
    if not any(bool(x[own].any()) for x in gradients):
        return None
    if not all(bool(x.isfinite().all()) for x in gradients):
        return None
    return any(bool(x[~own].any()) for x in gradients)


def _states(model: nn.Module, step: ForwardPass, dtype: torch.dtype | None) -> Tensor:
    """States of the row that is looked at.

    They are those below the output layer where the model tells which: a new layer may say nothing.
    """
    seen: list[Any] = []
    base = getattr(model, "base_model", None)

    def look(args: tuple[Any, ...], output: Any) -> None:
        seen.append(output)

    with hooked(base, after=look) if isinstance(base, nn.Module) else nullcontext():
        output = run_model(model, step.inputs, dtype)
    output = seen[-1] if seen else output
    for name in ("last_hidden_state", "logits"):
        output = getattr(output, name, output)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{type(model).__name__} must return a tensor or an object that has one as `logits`, got "
            f"{type(output).__name__}."
        )
    shape = step.inputs["input_ids"].shape
    if output.shape[:2] != shape:
        raise ValueError(
            f"packed=True is tried with a few tokens first, but {type(model).__name__} gives states "
            f"{tuple(output.shape)} for input_ids {tuple(shape)}."
        )
    return output.flatten(0, 1)[step.state.to(output.device)]
