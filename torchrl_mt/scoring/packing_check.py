"""Test, once per model with a few tokens, of whether it keeps packed rows apart.

A model passes if a packed row's states equal those of the row alone, and have exactly zero gradient by
other rows' embeddings: the gradient reveals leaks through weights too small to change the states.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_mt._hosts.transformers import attention_implementation
from torchrl_mt.ranks import is_sharded, most
from torchrl_mt.scoring.forward import (
    accepts,
    device_of,
    hooked,
    run_model,
    scoring_mode,
    text_config,
    unwrapped,
)
from torchrl_mt.scoring.packing import ForwardPass, check_rows, forward_passes
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_trees import FLEX, tree_passes
from torchrl_mt.scoring.row_vision import RowVision, check_sampled, vision_model
from torchrl_mt.scoring.spare_image import SpareImage, small_image
from torchrl_mt.vision import RowImages

LENGTHS = (12, 4, 4, 4)
"""Lengths of the tested rows: the first is a sequence of its own, the others share one."""
LOOKED_AT = 2
"""The row whose states are compared, with one before and one after it."""
ROUNDING = 1e-3
"""Relative difference of a row's states that rounding may cause."""
LOW_ROUNDING = 0.05
"""The same in half precision."""

_FAULTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


def passes_over(
    model: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    passes: Passes,
    images: RowImages | None = None,
) -> Iterator[ForwardPass]:
    """Check rows, and cut them into forward passes of a model, made on the CPU.

    The ranks of a sharded model make equally many: a rank with fewer adds passes without rows,
    and those without images get a spare one (:mod:`~torchrl_mt.scoring.spare_image`).

    Raises:
        ValueError: If shapes differ, a sampled token is padding, a row's placeholders do not fit its
            images, or the model does not support packing.
        TypeError: If a mask is not boolean, or the model cannot take the rows' images.
    """
    tokens, attention_mask, mask = check_rows(tokens, attention_mask, mask)
    kind = vision_model(model)
    if kind is not None:
        check_sampled(kind, tokens, mask)
    vision = RowVision.of(model, tokens, attention_mask, images)
    if passes.packed:
        check_packing(model, tokens[attention_mask], passes.dtype, passes.packed)
    with_lengths = bool(passes.packed) and takes_lengths(model)
    # Without limits all rows are one pass.
    limited = passes.micro_batch_size is not None or passes.max_tokens is not None
    number = partial(most, model=model) if limited and is_sharded(model) else None
    if passes.packed == "tree":
        check_window(model, attention_mask)
        yield from tree_passes(
            tokens,
            attention_mask,
            mask,
            passes,
            width=tree_width(model),
            attention=attention_implementation(model),
            number=number,
        )
        return
    spare = SpareImage.of(model)
    for step in forward_passes(
        tokens,
        attention_mask,
        mask,
        passes,
        with_lengths=with_lengths,
        vision=vision,
        number=number,
    ):
        has_images = any(name.startswith("pixel_values") for name in step.inputs)
        yield step if spare is None or has_images else spare.added_to(step)


def tree_width(model: nn.Module) -> float:
    """Tokens at which a model's attention over a tree costs as much as its other layers.

    A layer of width ``h`` has about ``12 h ** 2`` weights, and attention has ``2 h`` products for each
    pair of tokens.
    """
    if attention_implementation(model) == FLEX:
        return math.inf
    return 6.0 * getattr(text_config(model), "hidden_size", 1024)


def check_window(model: nn.Module, attention_mask: Tensor) -> None:
    """Refuse rows that are longer than a model's attention reaches: the mask of a tree replaces it."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    longest = int(attention_mask.sum(-1).max()) if attention_mask.numel() else 0
    if window and "sliding_attention" in kinds and longest > window:
        raise ValueError(
            f"packed='tree' cannot be used for a row of {longest} tokens with {type(model).__name__}, "
            f"whose attention slides over {window}; pass packed=True."
        )


def check_packing(
    model: nn.Module,
    tokens: Tensor,
    dtype: torch.dtype | None = None,
    packed: bool | Literal["tree"] = True,
) -> None:
    """Refuse a model that has a :func:`packing_fault`."""
    fault = packing_fault(model, tokens, dtype, packed)
    if fault is not None:
        raise ValueError(
            f"packed={packed!r} needs a model that keeps packed rows apart, but "
            f"{type(model).__name__} {fault}; pass packed=False."
        )


def packing_fault(
    model: nn.Module,
    tokens: Tensor,
    dtype: torch.dtype | None = None,
    packed: bool | Literal["tree"] = True,
) -> str | None:
    """Find out why a model does not support packed rows.

    Packing is refused if another row of the pack changes a row's states, or could (a gradient shows
    it). Without gradients (compiled code, kernels without a backward pass) other rows must not change a
    single bit.

    The test runs once per model, attention implementation, computation type and kind of device, with an
    image in each row if images change the positions of tokens. It tries a few short rows, with the
    weights of now: effects of longer or more rows, and of weights that are exactly zero, escape it.

    Args:
        model: A causal language model or a critic.
        tokens: Any tokens of its vocabulary.
        dtype: Type to compute in.
        packed: ``True`` for rows one after the other, ``"tree"`` for trees of rows.

    Returns:
        The reason, phrased to follow the model's name, or ``None`` if packing is supported.

    Raises:
        ValueError: If the model does not return one state per token, or its states are not finite or do
            not depend on its tokens; such a result is not cached.
        TypeError: If the model returns no tensor.
    """
    known = _FAULTS.setdefault(model, {})
    kind = (packed, attention_implementation(model), *_types(model, dtype))
    if kind not in known:
        fault = _tree_fault(model) if packed == "tree" else _signature_fault(model)
        # Run the model inside its wrapper: the wrapper's ranks would wait for each other.
        known[kind] = fault or _trial_fault(unwrapped(model), tokens, dtype, packed)
    return known[kind]


def takes_lengths(model: nn.Module) -> bool:
    """Whether a model's attention takes packed rows' lengths, as transformers' flash attention."""
    return "flash" in (attention_implementation(model) or "") and accepts(model, "cu_seq_lens_q")


def _types(model: nn.Module, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, str]:
    """Return the type of a model's weights, the type of its products, and its kind of device."""
    weight = next(
        (p for p in model.parameters() if p.is_floating_point()), torch.empty(0, device="cpu")
    )
    device = (device_of(model) or weight.device).type
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return weight.dtype, dtype or weight.dtype, device


def _signature_fault(model: nn.Module) -> str | None:
    """Find out why a model cannot be called with packed rows, or with long ones."""
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


def _tree_fault(model: nn.Module) -> str | None:
    """Find out why a model cannot be called with trees of rows."""
    if vision_model(model) is not None:
        return "takes images, which rows of one prefix need not share"
    attention = attention_implementation(model) or ""
    if "flash" in attention:
        return f"has {attention}, which takes no mask (attn_implementation='sdpa' does)"
    return _signature_fault(model)


def _trial_fault(
    model: nn.Module,
    tokens: Tensor,
    dtype: torch.dtype | None,
    kind: bool | Literal["tree"],
) -> str | None:
    """Find out how packed rows differ from the rows alone."""
    name = type(model).__name__
    vision = vision_model(model)
    some = torch.cat([tokens.new_tensor([0, 1]), tokens.reshape(-1)]).unique().cpu()
    images = None
    if vision is not None:
        some = some[~torch.isin(some, torch.tensor(vision.barred, device="cpu"))]
        images = _trial_images(model)
    attended = (
        torch.arange(max(LENGTHS), device="cpu") < torch.tensor(LENGTHS, device="cpu")[:, None]
    )
    looked_at = attended & (torch.arange(len(LENGTHS), device="cpu") == LOOKED_AT)[:, None]
    choice = torch.randint(
        0, len(some), attended.shape, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    fixed = looked_at
    if kind == "tree":
        # All rows begin alike and differ from their third token on.
        choice[:, :2] = choice[LOOKED_AT, :2]
        choice[:, 2] = torch.arange(len(LENGTHS), device="cpu") % len(some)
        fixed = looked_at | (torch.arange(max(LENGTHS), device="cpu") < 3)

    def trial(index: Tensor, packed: bool) -> ForwardPass:
        with_lengths = packed and takes_lengths(model)
        ids = some[index]
        if packed and kind == "tree":
            attention = attention_implementation(model)
            (step,) = tree_passes(
                ids, attended, looked_at, Passes(), width=math.inf, attention=attention
            )
            return step
        if images is not None and vision is not None:
            # Behind the first token; its positions do not count on.
            ids[:, 1:3] = vision.image_token_id
        (step,) = forward_passes(
            ids, attended, looked_at, Passes(packed=packed), with_lengths=with_lengths,
            vision=RowVision.of(model, ids, attended, images),
        )  # fmt: skip
        return step

    # In this order: leaving inference mode enables gradients.
    with torch.inference_mode(False), scoring_mode(model):
        alone = _states(model, trial(choice, packed=False), dtype)
        step = trial(choice, packed=True)
        try:
            together = _states(model, step, dtype)
        except TypeError as error:
            return f"cannot be called with position_ids and without attention_mask ({error})"
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            if kind != "tree":
                raise
            return f"takes no attention_mask of shape [B, 1, L, L] ({error})"
        if not bool(alone.isfinite().all() & together.isfinite().all()):
            raise ValueError(
                f"packed={kind!r} is tried with a few tokens first, but {name} computes NaN or infinity "
                "from them; look at its weights and at dtype."
            )
        leaks = _has_gradient_of_others(model, step, dtype)
        if leaks is None:
            # Again, as compiled code may have been compiled anew since.
            together = _states(model, step, dtype)
            changed = (choice + 1) % len(some)
            others = _states(model, trial(torch.where(fixed, choice, changed), True), dtype)
            itself = _states(model, trial(torch.where(looked_at, changed, choice), True), dtype)
            leaks = not torch.equal(others, together)
            if torch.equal(itself, together):
                raise ValueError(
                    f"packed={kind!r} is tried with a few tokens first, but {name} computes the same "
                    "from any tokens, so it cannot be tested; give it weights other than zero, or pass "
                    "packed=False until it is trained."
                )
    low = _types(model, dtype)[1].itemsize <= 2
    tolerance = (LOW_ROUNDING if low else ROUNDING) * float(alone.double().norm())
    if leaks:
        return "lets packed rows see each other"
    if not float((alone.double() - together.double()).norm()) <= tolerance:
        return "computes a packed row otherwise than the row alone"
    return None


def _trial_images(model: nn.Module) -> RowImages | None:
    """Make an image of two tokens for each tested row, for models with M-RoPE.

    A mask made of its positions would end the row there. Other models' positions are those of text.
    """
    vision = vision_model(model)
    if vision is None or vision.merge_size is None:
        return None
    config = cast(Any, unwrapped(model)).config.vision_config
    pixels, grid = small_image(config, vision.merge_size)
    number = torch.arange(len(LENGTHS), device="cpu")
    g = torch.Generator().manual_seed(2)
    pixels = torch.rand(len(number) * len(pixels), pixels.shape[1], generator=g, device="cpu")
    grids = torch.tensor([grid] * len(number), device="cpu")
    return RowImages(pixels, grids, number, torch.ones_like(number))


def _has_gradient_of_others(
    model: nn.Module, step: ForwardPass, dtype: torch.dtype | None
) -> bool | None:
    """Whether a row's states have a gradient by other rows' embeddings; ``None`` if unknown."""
    ids = step.inputs["input_ids"]
    embedded: list[Tensor] = []

    def cut(args: tuple[Any, ...], output: Any) -> Tensor | None:
        given = args[0] if args else None
        if not isinstance(given, Tensor) or not torch.equal(given.to(ids.device), ids):
            return None
        embedded.append(output.detach().requires_grad_())
        # A copy: in-place changes of a leaf are errors.
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
            # Random, because norms and means hide changes that are equal in all directions.
            weight = torch.randn(
                states.shape, generator=torch.Generator().manual_seed(1), device="cpu"
            )
            found = torch.autograd.grad(states, embedded, weight.to(states), allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None  # A kernel without a backward pass.
    own = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
    own[step.state.cpu()] = True
    own[int(step.state.max()) + 1] = True
    gradients = [gradient.flatten(0, 1).cpu() for gradient in found if gradient is not None]
    # Without a gradient by the row itself, a zero gradient by others proves nothing.
    if not any(bool(x[own].any()) for x in gradients):
        return None
    if not all(bool(x.isfinite().all()) for x in gradients):
        return None
    return any(bool(x[~own].any()) for x in gradients)


def _states(model: nn.Module, step: ForwardPass, dtype: torch.dtype | None) -> Tensor:
    """Compute the states of the compared row, below the output layer if known (it may still be zero)."""
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
