"""Weights of models with PEFT adapters: merged for engines of the base model, or the adapter alone.

The trained model is left as it was, to the bit. Files appear whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrl_mt._hosts import peft
from torchrl_mt.ranks import is_sharded
from torchrl_mt.scoring.forward import unwrapped

__all__ = [
    "adapter_weights",
    "merged_weights",
    "peft_model",
    "save_adapter",
    "whole_folder",
    "write_adapter",
]


def peft_model(model: object) -> Any | None:
    """Return the ``PeftModel`` inside wrappers, such as ``DistributedDataParallel``; else ``None``."""
    if not isinstance(model, nn.Module):
        return None
    inner = getattr(model, "model", None)
    given = (model, inner) if isinstance(inner, nn.Module) else (model,)
    return next((m for m in map(unwrapped, given) if peft.is_peft_model(m)), None)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Compute the weights of a model whose active PEFT adapters are merged into its layers.

    ``update_weights`` of an engine calls this by itself. Layers with adapters are copied: memory for
    them is needed twice.

    Args:
        model: A ``PeftModel``, or a wrapper around one.

    Returns:
        All weights by the names that the base model's ``state_dict`` has, in its dtypes. Tensors
        without an adapter are the model's own, not copied.

    Raises:
        TypeError: If ``model`` has no PEFT adapter.
        ValueError: If PEFT cannot merge the adapter, a layer is quantised, a layer with an
            adapter shares its weight with another, or the model is divided among ranks.

    Examples:
        >>> served.load_state_dict(merged_weights(actor))  # doctest: +SKIP
    """
    return peft.merged_weights(_given(model))


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's active PEFT adapter, by the names of PEFT's files.

    Args:
        model: A ``PeftModel``, or a wrapper around one, with one active adapter.

    Returns:
        The adapter's tensors, not copied; ``peft.load_peft_weights`` reads the same from
        :func:`save_adapter`'s folder.

    Raises:
        TypeError: If ``model`` has no PEFT adapter.
        ValueError: If several adapters are active, or the model is divided among ranks.

    Examples:
        >>> sorted(adapter_weights(actor))  # doctest: +SKIP
        ['base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight', ...]
    """
    return peft.adapter_weights(_given(model))


def save_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Save a model's active PEFT adapter to a new folder, for servers and ``PeftModel.from_pretrained``.

    Args:
        model: A ``PeftModel``, or a wrapper around one, with one active adapter.
        folder: The folder to make; take a new one for each version, since servers may still read the
            last.

    Returns:
        The folder, with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        TypeError: If ``model`` has no PEFT adapter.
        ValueError: If several adapters are active, or the model is divided among ranks.
        FileExistsError: If the folder exists.

    Examples:
        >>> save_adapter(actor, f"adapters/{engine.version + 1}")  # doctest: +SKIP
    """
    folder, given = Path(folder), _given(model)
    if folder.exists():
        raise FileExistsError(f"folder {str(folder)!r} exists: give a new one for each version.")
    with whole_folder(folder) as partial:
        peft.save_adapter_files(given, partial)
    return folder


def write_adapter(model: nn.Module, folder: Path) -> None:
    """Write what :func:`save_adapter` saves into a folder."""
    peft.save_adapter_files(_given(model), folder)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that gets its name when it is whole."""
    # Beside the place, so that renaming it is atomic.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _given(model: nn.Module) -> Any:
    found = peft_model(model)
    if found is None:
        raise TypeError(
            f"model must have a PEFT adapter (peft.get_peft_model), got {type(model).__name__}."
        )
    if is_sharded(found):
        raise ValueError(
            "model must be whole, but its weights are divided among ranks (fully_shard): gather them on "
            "all ranks, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            "cpu_offload=True)) of torch.distributed.checkpoint.state_dict, load them on rank 0 into a "
            "copy of the PEFT model made before fully_shard, and give that copy."
        )
    return found
