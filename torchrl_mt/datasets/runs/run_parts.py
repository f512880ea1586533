"""The parts of a run: how the state of each is taken, and in which order they are loaded.

Whatever order the caller names them in, buffers come first, which load all or nothing, then weights,
then engines take them, and collectors, whose weight versions go on from their engines', come last.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.data import ReplayBuffer

from torchrl_mt.data.checkpoint import batches_saved_plainly, check_pickles
from torchrl_mt.datasets.runs.trained_weights import TrainedWeights
from torchrl_mt.ranks import is_dtensor, is_sharded

__all__ = [
    "Kind",
    "check_state",
    "check_trust",
    "kinds_of",
    "load_parts",
    "random_states",
    "set_random_states",
    "state_of",
]

_logger = logging.getLogger("torchrl_mt")

Kind: TypeAlias = Literal["folder", "state", "generator", "data", "engine"]
"""How a part is saved: by ``dumps``, by ``state_dict``, as what it is, or (an engine) not at all."""


def kinds_of(parts: Mapping[str, Any]) -> dict[str, Kind]:
    """Find out how each part is saved; raises for names and parts that cannot be saved."""
    for name in parts:
        if not name.isidentifier():
            raise ValueError(f"parts must have names like those of arguments, got {name!r}.")
    for name, method in {"step": "save()", "trust": "restore()"}.items():
        if name in parts:
            raise ValueError(f"part {name!r} has the name of {method}'s argument: rename it.")
    return {name: _kind_of(name, part) for name, part in parts.items()}


def _kind_of(name: str, part: Any) -> Kind:
    def has(*methods: str) -> bool:
        return all(hasattr(part, method) for method in methods)

    if has("dumps", "loads") and not isinstance(part, TensorDictBase):
        return "folder"
    if has("state_dict", "load_state_dict"):
        _check_whole(name, part)
        return "state"
    if isinstance(part, (torch.Generator, np.random.Generator, random.Random)):
        return "generator"
    if has("generate", "update_weights"):
        return "engine"
    if isinstance(part, (dict, list)):
        return "data"
    raise TypeError(
        f"part {name!r} must have state_dict and load_state_dict, or dumps and loads, or be an engine, "
        f"a random generator, a dict or a list, got {type(part).__name__}: put numbers into a dict."
    )


def _check_whole(name: str, part: Any) -> None:
    """Refuse a model or an optimizer of which this rank has a part only."""
    divided = isinstance(part, nn.Module) and is_sharded(part)
    if isinstance(part, Optimizer):
        divided = any(is_dtensor(p) for group in part.param_groups for p in group["params"])
    if divided:
        raise TypeError(
            f"part {name!r} is divided among ranks (fully_shard), of which each has some of it: give "
            "whole state dicts instead, which get_state_dict of torch.distributed.checkpoint.state_dict "
            "gathers with StateDictOptions(full_state_dict=True, cpu_offload=True), and save on rank 0."
        )


def state_of(part: Any) -> Any:
    """Return the state of a part that is not saved to a folder."""
    if hasattr(part, "state_dict"):
        return part.state_dict()
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    if isinstance(part, random.Random):
        return part.getstate()
    return part


def _load_state(part: Any, state: Any) -> None:
    """Load what :func:`state_of` returned."""
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    elif isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, random.Random):
        part.setstate(state)
    elif isinstance(part, list):
        part[:] = state
    else:
        part.clear()
        part.update(state)


# ---- loading ------------------------------------------------------------------------------------


def check_state(name: str, part: Any, state: Any) -> None:
    """Refuse a state that does not fit its part; ``load_state_dict`` loads the rest before it does."""
    if hasattr(part, "check_state_dict"):
        try:
            part.check_state_dict(state)
        except Exception as error:
            raise ValueError(f"part {name!r} cannot be restored: {error}") from error
    if isinstance(part, nn.Module) and isinstance(state, dict):
        _check_module(name, part, state)
    elif not hasattr(part, "load_state_dict") and isinstance(part, list) != isinstance(state, list):
        raise ValueError(
            f"part {name!r} must be what it was saved from, a {type(state).__name__}, got a "
            f"{type(part).__name__}: give the same parts as to save()."
        )


def check_trust(name: str, part: Any, trust: bool) -> None:
    """Refuse a part that reads its files by itself, perhaps as pickles, unless it is trusted."""
    known = isinstance(part, ReplayBuffer) or "trust" in inspect.signature(part.loads).parameters
    if not (trust or known):
        raise ValueError(
            f"part {name!r} ({type(part).__name__}) reads its files by itself, which may run code: "
            "give trust=True if you trust whoever wrote them."
        )


def _check_module(name: str, part: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse other entries, unless the module has its own way to load, and other shapes."""
    own = part.state_dict()
    if type(part).load_state_dict is nn.Module.load_state_dict and own.keys() != state.keys():
        raise ValueError(
            f"part {name!r} must have the entries that were saved: it lacks "
            f"{_listed(state.keys() - own)}, and has {_listed(own.keys() - state)} besides; make the "
            "model of the saved run."
        )
    for key, value in state.items():
        there = own.get(key)
        if (
            isinstance(value, Tensor)
            and isinstance(there, Tensor)
            and not nn.parameter.is_lazy(there)
            and there.shape != value.shape
        ):
            raise ValueError(
                f"part {name!r} must have the shapes that were saved: {key} must be "
                f"{tuple(value.shape)}, got {tuple(there.shape)}; make the model of the saved run."
            )


def _listed(keys: Iterable[str]) -> str:
    """List the first keys; there may be thousands."""
    names = sorted(keys) or ["nothing"]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_parts(parts: Mapping[str, Any], states: dict[str, Any], folder: Path) -> None:
    """Load every part.

    Args:
        parts: the parts by name.
        states: what :func:`state_of` returned for them; each is removed once it is loaded.
        folder: has a folder for each part that has no state.

    Raises:
        ValueError: if a part refuses its state; the message says which, and what was loaded before.
    """
    loaded: list[str] = []
    engines: list[Any] = []
    for name in sorted(parts, key=lambda name: _rank(parts[name], name in states)):
        part = parts[name]
        engine = _engine_of(part)
        try:
            if engine is not None and not any(engine is other for other in engines):
                engines.append(engine)
                model = parts.get("model")
                _pass_weights(engine, model.module if isinstance(model, TrainedWeights) else model)
            if name in states:
                # A copy: a part may keep what it is given, whose file will be deleted.
                _load_state(part, copy.deepcopy(states.pop(name)))
            elif part is not engine:
                check_pickles(folder / name)
                with batches_saved_plainly(part):
                    part.loads(folder / name)
        except Exception as error:
            raise ValueError(
                f"part {name!r} cannot be restored from {folder.parent}: {error}\nLoaded before it: "
                f"{', '.join(loaded) or 'nothing'}; make all parts as the saved run did."
            ) from error
        loaded.append(name)


def _rank(part: Any, has_state: bool) -> int:
    """Where a part comes in the order of loading."""
    if isinstance(part, nn.Module):
        return 1
    engine = _engine_of(part)
    if engine is None:
        return 2 if has_state else 0
    return 3 if engine is part else 4


def _engine_of(part: Any) -> Any:
    """Return the engine of a collector, or the part itself if it is one; None otherwise."""
    for engine in (part, getattr(part, "engine", None)):
        if hasattr(engine, "generate") and hasattr(engine, "update_weights"):
            return engine
    return None


def _pass_weights(engine: Any, model: Any) -> None:
    """Pass restored weights to an engine."""
    try:
        # One that shares the weights has them, and need not know the names in what wraps the model.
        engine.update_weights(None if getattr(engine, "shares_weights", False) else model)
    except NotImplementedError as error:
        _logger.warning(
            "%s keeps its weights, pass it the restored ones: %s", type(engine).__name__, error
        )


# ---- global random generators -------------------------------------------------------------------


def random_states() -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy and PyTorch."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set what :func:`random_states` returned."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"].clone())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states["cuda"][:devices]):
        torch.cuda.set_rng_state(state.clone(), device)
    if left_out := states["cuda"][devices:]:
        _logger.warning(
            "random states of %d CUDA devices that are not here are left out.", len(left_out)
        )
