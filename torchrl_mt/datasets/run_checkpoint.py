"""Checkpoints of a whole run: all its parts, as they were at one moment, or nothing.

However a save ends, the folder holds whole checkpoints: those before it, and the new one if the save
returned. A run that is restored goes on as if it had never stopped.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import operator
import random
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data._store.files.manifest import HASHES, HashedFiles, write_manifest
from torchrl_mt.data._store.files.versions import (
    delete_unfinished,
    newest,
    newest_whole,
    number_of,
    save_version,
)

__all__ = ["RunCheckpoint"]

_logger = logging.getLogger("torchrl_mt")

_RUN = "run.json"
"""The step, the kind of each part, and which object saved them."""
_STATES = "states.pt"
"""The generators' states, and the parts' if they are plain: one file, so shared tensors are saved once."""
_PARTS = "parts"
"""Folder of the other parts: ``<name>.pt``, or the folder ``<name>`` that ``dumps`` wrote."""


class RunCheckpoint:
    """Saves all parts of a run as one step, and restores the last whole one.

    A save is atomic. If it is killed (``SIGKILL``), fails or fills the disk, the earlier checkpoints are
    still there, and the next save deletes what is left over. Every file has a hash. A damaged checkpoint
    is skipped, with a warning, and the one before it is restored.

    The global random states of PyTorch (CPU and CUDA), NumPy and Python are saved and restored as well.
    Parts are named by the caller and may be

    - anything with ``state_dict`` and ``load_state_dict``: models, losses, optimizers, schedulers, a
      ``GradScaler``, an :class:`~torchrl_mt.objectives.ExperienceMaker`, a
      :class:`~torchrl_mt.collectors.MultiTurnCollector`;
    - anything with ``dumps`` and ``loads`` that take a folder: replay buffers and storages;
    - a ``dict`` or a ``list``, whose content is replaced;
    - a ``torch.Generator``, ``numpy.random.Generator`` or ``random.Random``;
    - an :class:`~torchrl_mt.engines.Engine`, which saves nothing and takes the restored weights. The
      engine of a collector takes them too and need not be given.

    One process saves to a folder. Any number may restore from it.

    Args:
        folder: folder of the checkpoints, created by the first save. Other files in it are not touched.
        keep: number of checkpoints to keep. The disk needs room for one more.

    Raises:
        ValueError: if ``keep`` is not a positive integer.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> def make_run():
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.Adam(model.parameters())
        ...     return {"model": model, "optimizer": optimizer, "scores": []}
        >>> run = make_run()
        >>> checkpoint = RunCheckpoint(folder)
        >>> step = checkpoint.restore(**run) or 0
        >>> while step < 3:
        ...     run["scores"].append(torch.rand(()).item())
        ...     step += 1
        ...     checkpoint.save(step, **run)

        In the next process:

        >>> again = make_run()
        >>> RunCheckpoint(folder).restore(**again)
        3
        >>> again["scores"] == run["scores"]
        True
        >>> torch.equal(again["model"].weight, run["model"].weight)
        True
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        self.folder = Path(folder).absolute()
        self.keep = check_positive_integer("keep", keep)
        self._id = uuid.uuid4().hex
        self._known = 0
        """Number of the newest version when this object last restored one."""
        self._damaged: list[Path] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RunCheckpoint({str(self.folder)!r}, keep={self.keep})"

    def save(self, step: int, **parts: Any) -> None:
        """Save all parts as they are now, between two updates.

        A :class:`~torchrl_mt.collectors.MultiTurnCollector` that collects in the background delivers
        nothing meanwhile.

        Args:
            step: the step that :meth:`restore` returns, such as the number of updates.
            **parts: the parts by name; see the class.

        Raises:
            TypeError: if ``step`` is not an integer, or a part is none of what the class lists.
            ValueError: if the folder has a checkpoint of this step or a later one that this object
                neither saved nor restored: another run's, or that of another process.
            RuntimeError: if a part cannot be saved; names it.
            OSError: if the disk is full or cannot be written.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step must be an integer, got {step!r}.") from None
        kinds = _kinds(parts)
        with self._lock, ExitStack() as held:
            self._check_new(step)
            for part in parts.values():
                if hasattr(part, "hold_deliveries"):
                    held.enter_context(part.hold_deliveries())
            delete_unfinished(self.folder)
            while self._damaged:
                shutil.rmtree(self._damaged.pop(), ignore_errors=True)
            record = {"step": step, "saved_by": self._id, "parts": kinds}
            save_version(self.folder, lambda new: _write(new, record, parts), keep=self.keep)

    def restore(self, **parts: Any) -> int | None:
        """Load the last whole checkpoint into the given parts, in an order that is right.

        Give parts that were made as for the first run and have not run yet: a collector that has
        collected nothing, an optimizer over the same parameters. Weights are loaded first, then the
        engines take them (the part named ``model``, or ``None``: those of the model that the engine
        was made from), then the collectors are loaded, and the random states come last.

        A checkpoint may hold any Python object, in buffers and in parts whose state has more than
        tensors, numbers, strings and containers: restore only checkpoints that you trust. The other
        parts are read with ``torch.load(weights_only=True)``.

        Args:
            **parts: the parts by the names that they were saved under. Those that were saved and are
                not given are left out, with a warning.

        Returns:
            The saved step; ``None`` if the folder has no checkpoint: the run is new.

        Raises:
            TypeError: if a part is none of what the class lists.
            ValueError: if a part was not saved, or is of another kind or shape: nothing has changed. If
                a part refuses its state: the message says which, and what was loaded before. If
                the folder has checkpoints and all of them are damaged.
        """
        kinds = _kinds(parts)
        with self._lock:
            found, damaged = newest_whole(self.folder)
            for folder, error in damaged.items():
                _logger.warning("%s is skipped: %s", folder, error)
            if found is None and damaged:
                raise ValueError(
                    f"no checkpoint in {self.folder} is whole: {', '.join(x.name for x in damaged)} are "
                    "damaged; restore a copy, or start anew in another folder."
                )
            if found is None:
                return None
            record = _read_record(found)
            _check_names(kinds, record, found)
            states, random_states = _read_states(found, kinds)
            for name, part in parts.items():
                if isinstance(part, nn.Module) and isinstance(states.get(name), dict):
                    _check_shapes(name, part, states[name])
            _load_all(parts, states, found)
            _set_random_states(random_states)
            self._known = number_of(max([found, *damaged], key=number_of))
            self._damaged = list(damaged)
            return int(record["step"])

    def _check_new(self, step: int) -> None:
        """Refuse to save beside the later steps of another run, which its own would push out."""
        last = newest(self.folder)
        if last is None or number_of(last) <= self._known:
            return
        try:
            record = _read_record(last)
        except (OSError, ValueError):
            record = {"step": step}
        if record.get("saved_by") != self._id and step <= record["step"]:
            raise ValueError(
                f"step must be after {record['step']}, which {self.folder} has from another run or "
                f"process, got {step}: call restore() first to go on from there, or save to another "
                "folder."
            )


# ---- kinds of parts -----------------------------------------------------------------------------

_FOLDER, _STATE, _GENERATOR, _DATA, _ENGINE = "folder", "state", "generator", "data", "engine"


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Find out how each part is saved."""
    for name in parts:
        if not name.isidentifier():
            raise ValueError(f"parts must have names like those of arguments, got {name!r}.")
    return {name: _kind(name, part) for name, part in parts.items()}


def _kind(name: str, part: Any) -> str:
    def has(*methods: str) -> bool:
        return all(hasattr(part, method) for method in methods)

    if has("dumps", "loads") and not isinstance(part, TensorDictBase):
        return _FOLDER
    if has("state_dict", "load_state_dict"):
        return _STATE
    if isinstance(part, (torch.Generator, np.random.Generator, random.Random)):
        return _GENERATOR
    if has("generate", "update_weights"):
        return _ENGINE
    if isinstance(part, (dict, list)):
        return _DATA
    raise TypeError(
        f"part {name!r} must have state_dict and load_state_dict, or dumps and loads, or be an engine, "
        f"a random generator, a dict or a list, got {type(part).__name__}: put numbers into a dict."
    )


def _state_of(part: Any) -> Any:
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
    """Load what :func:`_state_of` returned."""
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


def _engine_of(part: Any) -> Any:
    """Return the engine of a collector, or the part itself if it is one; None otherwise."""
    for engine in (part, getattr(part, "engine", None)):
        if hasattr(engine, "generate") and hasattr(engine, "update_weights"):
            return engine
    return None


# ---- writing ------------------------------------------------------------------------------------


def _write(folder: Path, record: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Write a checkpoint to an empty folder."""
    states: dict[str, Any] = {"random": _random_states(), "parts": {}}
    (folder / _PARTS).mkdir()
    for name, part in parts.items():
        place = folder / _PARTS / name
        try:
            if record["parts"][name] == _FOLDER:
                part.dumps(place)
            elif record["parts"][name] != _ENGINE:
                state = _state_of(part)
                if _is_plain(state):
                    states["parts"][name] = state
                else:
                    with open(place.with_suffix(".pt"), "wb") as file:
                        torch.save(state, file)
        except OSError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"part {name!r} ({type(part).__name__}) cannot be saved: {error}"
            ) from error
    files = HashedFiles(folder)
    with files.create(_STATES) as file:
        torch.save(states, file)
    write_manifest(folder / HASHES, files.sizes_and_hashes)
    (folder / _RUN).write_text(json.dumps(record), encoding="utf-8")


_PLAIN = (type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device)


def _is_plain(state: Any) -> bool:
    """Whether ``torch.load(weights_only=True)`` reads a state."""
    if type(state) in (dict, OrderedDict):
        inside: Iterable[Any] = [*state, *state.values(), *getattr(state, "__dict__", {}).values()]
    elif type(state) in (list, tuple, set):
        inside = state
    elif type(state) is Tensor:
        return state.layout is torch.strided and not (state.is_nested or vars(state))
    else:
        return type(state) in _PLAIN
    return all(map(_is_plain, inside))


def _random_states() -> dict[str, Any]:
    """Return the states of the global random generators."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


# ---- reading ------------------------------------------------------------------------------------


def _read_record(folder: Path) -> dict[str, Any]:
    """Read the step and the kinds of the parts."""
    if not (folder / _RUN).is_file():
        raise ValueError(
            f"folder must hold checkpoints of runs, but {folder} is none: a buffer saved there has a "
            "loads() of its own."
        )
    return dict(json.loads((folder / _RUN).read_text(encoding="utf-8")))


def _check_names(kinds: Mapping[str, str], record: Mapping[str, Any], folder: Path) -> None:
    """Refuse parts that were not saved, or as another kind; warn of those that are not given."""
    saved = {name: kind for name, kind in record["parts"].items() if kind != _ENGINE}
    given = {name: kind for name, kind in kinds.items() if kind != _ENGINE}
    for name, kind in given.items():
        if name not in saved:
            close = difflib.get_close_matches(name, saved.keys() - given.keys(), 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"part {name!r} was not saved: {folder} (step {record['step']}) has "
                f"{', '.join(sorted(saved)) or 'no parts'}; give the names that were saved.{meant}"
            )
        if saved[name] != kind:
            raise ValueError(
                f"part {name!r} must be what it was saved from, a {saved[name]}, got a {kind}: give "
                "the same parts as to save()."
            )
    if left_out := sorted(saved.keys() - given.keys()):
        _logger.warning(
            "restore() was not given %s of step %s in %s, which is left out.",
            ", ".join(left_out),
            record["step"],
            folder,
        )


def _read_states(
    folder: Path, kinds: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the states of parts by name, and the random states. Large tensors are mapped, not read."""
    read = torch.load(folder / _STATES, map_location="cpu", mmap=True, weights_only=True)
    states = {}
    for name, kind in kinds.items():
        if name in read["parts"]:
            states[name] = read["parts"][name]
        elif kind not in (_FOLDER, _ENGINE):
            file = folder / _PARTS / f"{name}.pt"
            try:
                states[name] = torch.load(file, map_location="cpu", weights_only=False)
            except Exception as error:
                raise ValueError(f"part {name!r} cannot be read from {file}: {error}") from error
    return states, read["random"]


def _check_shapes(name: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse tensors of other shapes: ``load_state_dict`` says so after it has loaded the rest."""
    own = module.state_dict()
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


def _load_all(parts: Mapping[str, Any], states: dict[str, Any], folder: Path) -> None:
    """Load every part: models, what belongs to them, engines, collectors."""
    loaded: list[str] = []
    engines: list[Any] = []
    for name in sorted(parts, key=lambda name: _rank(parts[name])):
        part = parts[name]
        engine = _engine_of(part)
        try:
            if engine is not None and not any(engine is other for other in engines):
                engines.append(engine)
                _update(engine, parts.get("model"))
            if name in states:
                # A copy: the part may keep it, and the file may be deleted.
                _load_state(part, copy.deepcopy(states.pop(name)))
            elif engine is not part:
                part.loads(folder / _PARTS / name)
        except Exception as error:
            raise ValueError(
                f"part {name!r} cannot be restored from {folder}: {error}\nLoaded before it: "
                f"{', '.join(loaded) or 'nothing'}; make all parts as the saved run did."
            ) from error
        loaded.append(name)


def _rank(part: Any) -> int:
    """Order of loading. Weight versions of a collector go on from its engine's, so that is updated first."""
    if isinstance(part, nn.Module):
        return 0
    engine = _engine_of(part)
    return 1 if engine is None else 2 if engine is part else 3


def _update(engine: Any, model: Any) -> None:
    """Pass restored weights to an engine."""
    try:
        # One that shares weights has them, but not under the names of whatever wraps the model.
        engine.update_weights(None if getattr(engine, "shares_weights", False) else model)
    except NotImplementedError as error:
        _logger.warning(
            "%s keeps its weights: pass them on before you collect. %s", type(engine).__name__, error
        )


def _set_random_states(states: Mapping[str, Any]) -> None:
    """Set the global random generators."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(states["torch"].clone())
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states["cuda"][:here]):
        torch.cuda.set_rng_state(state.clone(), device)
    if len(states["cuda"]) > here:
        _logger.warning(
            "the random states of %d CUDA devices are left out: there are %d.",
            len(states["cuda"]) - here,
            here,
        )
