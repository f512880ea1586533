"""Weights as folders of safetensors, one for each version: a folder is whole or absent."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_mt.engines.adapters import merged_weights, peft_model, whole_folder, write_adapter
from torchrl_mt.engines.weights import own_tensors, plain_source

__all__ = ["SavedModels", "named_weights", "saved_names"]


def named_weights(source: Any) -> dict[str, Tensor]:
    """Get the tensors of a source by their names.

    Args:
        source: a model or a wrapper around one, a state dict, parameters in a TensorDict, or a folder of
            safetensors. PEFT adapters are merged.

    Raises:
        TypeError: if ``source`` is none of these.
        ValueError: if it has no tensors, or they are divided among ranks.

    Examples:
        >>> sorted(named_weights(torch.nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    source = plain_source(source)
    if peft_model(source) is not None:
        found = merged_weights(source)
    elif isinstance(source, (str, Path)):
        found = dict(_read_folder(Path(source)))
    else:
        found = own_tensors(source, or_folder=True)
    if isinstance(source, TensorDictBase):
        # TensorDict.from_module also lists buffers that are computed, not loaded.
        found = {name: value for name, value in found.items() if not name.endswith("inv_freq")}
    if not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"source must hold tensors by name, got {type(source).__name__} without.")
    return {str(name): value.detach() for name, value in found.items()}


def saved_names(model: str) -> set[str]:
    """Names of the weights in a model's folder, or in the hub's cache; empty if they are in neither."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # Not in the cache, or no name of the hub.
            return set()
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return names


class SavedModels:
    """Saves sources of updates in a folder each, and keeps those of the last versions.

    Args:
        folder: where to make the folders; if ``None``, in a temporary folder that is removed at exit.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="torchrl_mt-weights-")
            folder = self._temporary.name
        self._folder = Path(folder).absolute()
        self._name = uuid.uuid4().hex[:8]
        """Part of the folders' names: other runs and models may have the same ``folder``."""
        self._paths: dict[int, tuple[Path, bool]] = {}
        """Folder of each version, and whether it was made here."""

    def path(self, version: int) -> Path | None:
        """The folder of a version; ``None`` if it is not kept."""
        return self._paths.get(version, (None, False))[0]

    def save(self, source: Any, version: int, *, adapter: bool = False) -> Path:
        """Save a source; a folder is taken as it is, and never deleted.

        Args:
            source: what :func:`named_weights` takes.
            version: the version of the weights.
            adapter: save the PEFT adapter alone.

        Raises:
            TypeError: if ``source`` is of no known kind.
            ValueError: if it has no tensors, or a folder has no safetensors.
            OSError: if it cannot be written.
        """
        if isinstance(source, (str, Path)):
            path = Path(source).absolute()
            if not any(path.glob("*.safetensors")):
                raise ValueError(f"source must be a folder with safetensors, got {str(path)!r}.")
            self._paths[version] = (path, False)
            return path
        path = self._folder / f"version-{version}-{self._name}"
        with whole_folder(path) as part:
            _write(plain_source(source), part, adapter)
            shutil.rmtree(path, ignore_errors=True)  # of an update that reached no server
        self._paths[version] = (path, True)
        return path

    def __len__(self) -> int:
        return len(self._paths)

    def keep(self, version: int, count: int = 1) -> None:
        """Delete the folders that were made here, but for ``version`` and ``count - 1`` before it."""
        kept = sorted(each for each in self._paths if each <= version)[-count:]
        for other in self._paths.keys() - set(kept):
            path, is_own = self._paths.pop(other)
            if is_own and path not in {self.path(each) for each in kept}:
                shutil.rmtree(path, ignore_errors=True)


def _write(source: Any, folder: Path, adapter: bool) -> None:
    """Write a source as safetensors, with its configuration if it has one."""
    if adapter:
        write_adapter(source, folder)
        return
    save = getattr(source, "save_pretrained", None)
    if callable(save) and peft_model(source) is None:
        own = isinstance(source, PreTrainedModel)
        save(folder, **({"state_dict": _untied(source.state_dict())} if own else {}))
        return
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(_untied(named_weights(source)), folder)


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with others: of tied ones, only one name would be saved.

    Some servers skip one of the names, and vLLM on a CPU has a copy of the head that it would not renew.
    """
    out: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in weights.items():
        place = value.untyped_storage().data_ptr()
        out[name] = value.clone() if place in storages else value.contiguous()
        storages.add(place)
    return out


def _read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()
