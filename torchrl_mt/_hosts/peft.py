"""PEFT's adapters: switched off, merged, saved. The trained model is left as it was.

PEFT is never imported here: a model that has adapters comes with it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "adapter_off",
    "adapter_weights",
    "base_of",
    "has_adapter_layers",
    "is_peft_model",
    "merged_weights",
    "save_adapter_files",
]


def is_peft_model(model: object) -> bool:
    """Whether a model is a ``PeftModel``, not a wrapper around one."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)


def has_adapter_layers(model: nn.Module) -> bool:
    """Whether a model has layers with adapters, as the base of a ``PeftModel`` does."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def base_of(model: Any) -> nn.Module:
    """Return the model inside a ``PeftModel``, with the adapters in its layers.

    Raises:
        ValueError: If the adapter is none of layers (prompt tuning).
    """
    kinds = sorted({str(config.peft_type.value) for config in model.peft_config.values()})
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ValueError(
            f"the adapter must change layers, as LoRA does, got {', '.join(kinds)}, which changes the "
            "prompt."
        )
    base: nn.Module = model.get_base_model()
    return base


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Run a ``PeftModel`` without its adapters, as the base model.

    Raises:
        ValueError: If the model without adapters is not the base model: they are merged, or other
            parameters are trained.
    """
    base = base_of(model)
    if any(getattr(module, "merged_adapters", None) for module in base.modules()):
        raise ValueError(
            "the adapter is merged into the base model: call unmerge_adapter() on the PEFT model."
        )
    # PEFT sets requires_grad of adapters, whatever it was.
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with model.disable_adapter():
            changed = [
                name
                for name, p in model.named_parameters()
                if p.requires_grad and ".modules_to_save." not in name
            ]
            if changed:
                raise ValueError(
                    "the base model must be frozen, but these of its parameters are trained: "
                    f"{', '.join(changed[:3])}{', and others' * (len(changed) > 3)}. Freeze them "
                    "(bias='none' in LoraConfig), list their modules in modules_to_save, or give a copy "
                    "of the base model."
                )
            yield
    finally:
        for p, flag in trained:
            if p.requires_grad is not flag:
                p.requires_grad_(flag)


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """Compute the weights of the base model with the active adapters merged in, by the base's names.

    PEFT merges them itself, into copies of the layers that have adapters. All other tensors are the
    model's own, not copied.

    Raises:
        ValueError: If they cannot be merged: an adapter of the prompt, a quantised or sharded layer, a
            layer that shares its weight with another, or a kind that PEFT cannot merge.
    """
    base = base_of(model)
    adapted = _adapted(base)
    _check_mergeable(base, adapted)
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for p in model.parameters():
        value = p.detach().clone() if id(p) in adapted else p.detach()
        memo[id(p)] = nn.Parameter(value, requires_grad=False)
    try:
        merged = copy.deepcopy(model, memo).merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the adapters {_active(model)} cannot be merged: {error} Give the engine the PEFT model "
            "itself, not its base."
        ) from error
    return dict(merged.state_dict())


def _adapted(base: nn.Module) -> dict[int, str]:
    """Find the parameters that merging changes: the name of their layer, by ``id``."""
    layers = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
    return {
        id(p): name
        for name, layer in base.named_modules()
        if isinstance(layer, layers)
        for p in layer.get_base_layer().parameters()
    }


def _check_mergeable(base: nn.Module, adapted: dict[int, str]) -> None:
    """Refuse layers whose merged weight would not be a plain tensor of their own."""
    owners: dict[int, list[str]] = {}
    for name, module in base.named_modules():
        for p in module.parameters(recurse=False):
            if id(p) not in adapted:
                continue
            owners.setdefault(id(p), []).append(name.removesuffix(".base_layer"))
            plain = type(p) is nn.Parameter and type(p.data) is Tensor
            if not (plain and p.is_floating_point()):
                raise ValueError(
                    f"the adapter of {adapted[id(p)]} cannot be merged: the layer is quantised or "
                    f"sharded ({type(p.data).__name__}, {p.dtype}). Give the engine the PEFT model "
                    "itself, or the adapter alone (save_adapter)."
                )
    for which, names in owners.items():
        if len(names) > 1:
            raise ValueError(
                f"the adapter of {adapted[which]} cannot be merged: {' and '.join(names)} are one "
                "weight. Leave it out of target_modules, load the model with "
                "tie_word_embeddings=False, or give the engine the PEFT model itself."
            )


def _active(model: Any) -> str:
    """Name the active adapters and their kinds."""
    names = model.active_adapters
    return ", ".join(f"{name!r} ({model.peft_config[name].peft_type.value})" for name in names)


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Return the active adapter's tensors, not copied, named as PEFT's files name them."""
    from peft import get_peft_model_state_dict

    return dict(get_peft_model_state_dict(model, adapter_name=_only_active(model)))


def save_adapter_files(model: Any, folder: Path) -> None:
    """Write the active adapter's files into a folder."""
    name = _only_active(model)
    model.save_pretrained(folder, selected_adapters=[name])
    inner = folder / name  # PEFT's place for any adapter but "default".
    if inner.is_dir():
        for file in inner.iterdir():
            file.rename(folder / file.name)
        inner.rmdir()


def _only_active(model: Any) -> str:
    """Return the name of the only active adapter."""
    names = list(model.active_adapters)
    if len(names) != 1:
        raise ValueError(
            f"one adapter must be active, got {names}: choose it with set_adapter(name)."
        )
    return str(names[0])
