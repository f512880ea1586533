"""Weight updates of engines: check all tensors before copying any, or call the user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules.llm import LLMWrapperBase

from torchrl_mt._hosts.peft import base_of, has_adapter_layers
from torchrl_mt.engines.adapters import merged_weights, peft_model
from torchrl_mt.ranks import is_dtensor, is_sharded
from torchrl_mt.scoring.forward import unwrapped
from torchrl_mt.threads import run_all

__all__ = [
    "check_whole",
    "copy_weights",
    "fitting_weights",
    "hand_on",
    "own_tensors",
    "plain_source",
]

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, torch.Tensor]


def fitting_weights(source: Weights, model: nn.Module) -> dict[str, torch.Tensor]:
    """Get the tensors of ``source`` by their names in ``model``'s state dict.

    Args:
        source: a model, a TorchRL wrapper or ``DistributedDataParallel`` around one, a state dict, or
            parameters in a TensorDict, of any dtype and on any device. The adapters of a PEFT model are
            merged into its weights, unless ``model`` has adapters itself.
        model: the model that will load them.

    Returns:
        All weights by name; a tied weight may have one name only.

    Raises:
        TypeError: if ``source`` is none of these.
        ValueError: if names or shapes do not match those of ``model``, weights that it shares between
            layers differ, adapters cannot be merged, or the weights are divided
            among ranks.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> sorted(fitting_weights(model.state_dict(), model))
        ['bias', 'weight']
    """
    source = plain_source(source)
    own = model.state_dict()
    adapted = peft_model(source)
    weights = own_tensors(source) if adapted is None else _weights_of_adapted(adapted, model)
    if isinstance(source, TensorDictBase):
        for computed in dict(model.named_buffers()).keys() - own.keys():
            weights.pop(computed, None)
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
            f"{_adapter_advice(weights) or _prefix_advice(weights, own)}."
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"source[{name!r}] must have shape {tuple(own[name].shape)}, "
                f"got {tuple(value.shape)}."
            )
    _check_tied(weights, own)
    return weights


def plain_source(source: Any) -> Any:
    """Take a model out of its wrappers, TorchRL's and those of ranks; other sources stay as they are.

    Raises:
        ValueError: if the weights are divided among ranks.
    """
    _check_gathered(source)
    if not isinstance(source, nn.Module):
        return source
    model = unwrapped(source)
    return plain_source(model.model) if isinstance(model, LLMWrapperBase) else model


def own_tensors(source: Any, *, or_folder: bool = False) -> dict[str, torch.Tensor]:
    """Get the tensors of a model, a state dict or a TensorDict by their names.

    Args:
        source: one of these, without wrappers.
        or_folder: whether the caller takes a folder too, for the error.

    Raises:
        TypeError: if ``source`` is none of these.
    """
    if isinstance(source, nn.Module):
        return dict(source.state_dict())
    if isinstance(source, TensorDictBase):
        return dict(source.flatten_keys(".").items())
    if isinstance(source, Mapping):
        return dict(source)
    kinds = "a model, a state dict or a TensorDict of parameters"
    raise TypeError(
        f"source must be {kinds}{', or a folder of safetensors' * or_folder}, got "
        f"{type(source).__name__}."
    )


def _weights_of_adapted(source: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Get the weights of a PEFT model: merged, unless ``model`` has adapters itself."""
    if has_adapter_layers(model):
        own_names = model.state_dict().keys()
        whole: dict[str, torch.Tensor] = source.state_dict()
        return whole if whole.keys() == own_names else dict(base_of(source).state_dict())
    trained = {p.data_ptr() for p in source.parameters() if p.numel()}
    if any(p.data_ptr() in trained for p in model.parameters()):
        raise ValueError(
            "the engine shares its weights with the base model of source, so merging the adapter into "
            "them would change what is trained: make the engine of the PEFT model itself, or with "
            "share_weights=False."
        )
    return merged_weights(source)


def _check_tied(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Refuse different values for names that are one tensor in the engine's model."""
    first: dict[int, str] = {}
    for name, value in weights.items():
        other = first.setdefault(own[name].data_ptr(), name)
        if other == name or not value.numel() or own[other].shape != own[name].shape:
            continue
        same = value.data_ptr() == weights[other].data_ptr()
        if not (same or torch.equal(value, weights[other].to(value.device))):
            raise ValueError(
                f"source[{name!r}] and source[{other!r}] must be equal, since they are one tensor in "
                "the engine's model: load that with tie_word_embeddings=False."
            )


def _adapter_advice(given: Iterable[str]) -> str:
    """Advice for an error, if the names are those of layers with adapters."""
    if any(".base_layer." in name or ".lora_A." in name for name in given):
        return (
            ": for an engine of the base model, give the PEFT model itself, not its state dict (if "
            "ranks divide it, a whole copy that has loaded the gathered one)"
        )
    return ""


def _check_gathered(source: Weights) -> None:
    """Refuse weights of which each rank has a part (``ValueError``)."""
    if isinstance(source, nn.Module):
        divided = is_sharded(source)
    elif isinstance(source, TensorDictBase):
        divided = any(map(is_dtensor, source.values(True, True)))
    else:
        divided = isinstance(source, Mapping) and any(map(is_dtensor, source.values()))
    if divided:
        raise ValueError(
            "source must have whole weights, but they are divided among ranks (DTensor): gather them on "
            "all ranks, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) of torch.distributed.checkpoint.state_dict, and give the result on "
            "rank 0, which alone gets it."
        )


def check_whole(model: nn.Module) -> None:
    """Refuse a model to sample from that is divided among ranks, who would wait for each other."""
    if is_sharded(model):
        raise ValueError(
            f"model must be whole, but {type(model).__name__} is divided among ranks (fully_shard): "
            "each token would need all of them. Make the engine of a copy, before fully_shard, and give "
            "update_weights the full state dict after each step."
        )


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
        run_all([result])
