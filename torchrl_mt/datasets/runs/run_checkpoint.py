"""Checkpoints of a whole run: all its parts, as they were at one moment, or nothing.

However a save ends, the folder holds whole checkpoints: those before it, and the new one if the save
returned. A run that is restored goes on as if it had never stopped.
"""

from __future__ import annotations

import difflib
import json
import logging
import operator
import shutil
import threading
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data._store.files.versions import (
    RUN,
    newest,
    newest_whole,
    number_of,
    save_version,
)
from torchrl_mt.data._store.plain import is_plain, load_plainly, save_plainly, trusting
from torchrl_mt.data.checkpoint import batches_saved_plainly
from torchrl_mt.datasets.runs.run_parts import (
    check_state,
    check_trust,
    kinds_of,
    load_parts,
    random_states,
    set_random_states,
    state_of,
)

__all__ = ["RunCheckpoint"]

_logger = logging.getLogger("torchrl_mt")

_STATES = "states.pt"
"""Random states, and plain states of parts, in one file: tensors that parts share are saved once."""
_PARTS = "parts"
"""Folder of the other parts: ``<name>.pt``, or the folder ``<name>`` that ``dumps`` wrote."""


class RunCheckpoint:
    """Saves all parts of a run as one step, and restores the last whole one.

    A save is atomic: however it ends, the earlier checkpoints are still there. Every file has a hash.
    A damaged checkpoint is skipped, with a warning, and the one before it is restored.

    Parts are named by the caller; :meth:`save` says what may be one. The global random states of PyTorch
    (CPU and CUDA), NumPy and Python are saved and restored as well. :ref:`resuming` shows a whole run.

    One process saves to a folder, which is new or was restored from. Any number may restore from it.

    Args:
        folder: folder of the checkpoints, created by the first save. Other files in it are not touched.
        keep: number of checkpoints to keep. The disk needs room for one more.

    Raises:
        ValueError: if ``keep`` is not a positive integer.
        NotADirectoryError: if ``folder`` is a file.

    Examples:
        >>> import tempfile, torch
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
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        self.folder = Path(folder).expanduser().absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"folder must be a folder, but {self.folder} is a file.")
        self.keep = check_positive_integer("keep", keep)
        self._id = uuid.uuid4().hex
        self._known = 0
        """Number of the newest version when this object last restored one."""
        self._damaged: list[Path] = []
        """Damaged checkpoints that the next save deletes."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RunCheckpoint({str(self.folder)!r}, keep={self.keep})"

    def save(self, /, step: int, **parts: Any) -> None:
        """Save all parts as they are now, between two updates.

        A :class:`~torchrl_mt.collectors.MultiTurnCollector` that collects in the background delivers
        nothing meanwhile. A part may be

        - anything with ``state_dict`` and ``load_state_dict``: models, losses, optimizers, schedulers, a
          ``GradScaler``, an :class:`~torchrl_mt.objectives.ExperienceMaker`, a
          :class:`~torchrl_mt.collectors.MultiTurnCollector`;
        - anything with ``dumps`` and ``loads`` that take a folder: replay buffers and storages;
        - a ``dict`` or a ``list``, whose content is replaced;
        - a ``torch.Generator``, ``numpy.random.Generator`` or ``random.Random``;
        - an :class:`~torchrl_mt.engines.Engine`, which saves nothing and takes the restored weights. The
          engine of a collector takes them too and need not be given.

        Args:
            step: the step that :meth:`restore` returns, such as the number of updates. The last
                checkpoint is the one that was saved last, whatever its step.
            **parts: the parts by name.

        Raises:
            TypeError: if ``step`` is not an integer, or a part is none of the above.
            ValueError: if the last checkpoint in the folder is one that this object neither saved nor
                restored: another run's, or that of another process. Nothing has changed.
            RuntimeError: if a part cannot be saved; names it.
            OSError: if the disk is full or cannot be written.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step must be an integer, got {step!r}.") from None
        kinds = kinds_of(parts)
        with self._lock, ExitStack() as held:
            self._check_last()
            for part in parts.values():
                if hasattr(part, "hold_deliveries"):
                    held.enter_context(part.hold_deliveries())
            while self._damaged:
                shutil.rmtree(self._damaged.pop(), ignore_errors=True)
            record = {"step": step, "saved_by": self._id, "parts": kinds}
            save_version(self.folder, lambda new: _write(new, record, parts), keep=self.keep)

    def restore(self, /, *, trust: bool = False, **parts: Any) -> int | None:
        """Load the last whole checkpoint into the given parts, in an order that is right.

        Give parts that were made as for the first run and have not run yet: a collector that has
        collected nothing, an optimizer over the same parameters. Weights are loaded first, then the
        engines take them (the part named ``model``, or ``None``: those of the model that the engine
        was made from), then the collectors are loaded, and the random states come last. A part's
        ``check_state_dict(state)``, which raises for what ``load_state_dict`` would refuse, is asked
        before any part is changed.

        Nothing that is read runs code, unless you give ``trust``. Tensors, arrays, numbers, strings,
        images and containers of them need none, and so do most parts of a run. Other Python objects do,
        such as a buffer's tensorclasses, and your own parts with ``dumps`` and ``loads``; the error
        says which part.

        Args:
            trust: whether to read any Python object: give True only if you trust whoever wrote the
                checkpoint.
            **parts: the parts by the names that they were saved under. Those that were saved and are
                not given are left out, with a warning.

        Returns:
            The saved step; ``None`` if the folder has no checkpoint: the run is new.

        Raises:
            TypeError: if a part is none of what :meth:`save` lists.
            ValueError: if a part needs ``trust``, was not saved or is of another kind, a model has other
                entries or shapes, or a collector other data: nothing has changed. If a part refuses its
                state later: the message says which, and what was loaded before. If the folder has
                checkpoints and all of them are damaged.
        """
        kinds = kinds_of(parts)
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
            with trusting(trust):
                states, of_generators = _read_states(found, kinds)
            for name, part in parts.items():
                if name in states:
                    check_state(name, part, states[name])
                elif kinds[name] == "folder":
                    check_trust(name, part, trust)
            with trusting(trust):
                load_parts(parts, states, found / _PARTS)
            set_random_states(of_generators)
            self._known = number_of(max([found, *damaged], key=number_of))
            # Not those that only could not be read this time.
            certain = (ValueError, FileNotFoundError)
            self._damaged = [each for each, error in damaged.items() if isinstance(error, certain)]
            return int(record["step"])

    def _check_last(self) -> None:
        """Refuse to save beside the checkpoints of another run, which its own would push out."""
        last = newest(self.folder)
        if last is None or number_of(last) <= self._known:
            return
        record = _read_record(last)
        if record["saved_by"] != self._id:
            raise ValueError(
                f"folder must be empty or restored from, but {self.folder} has step {record['step']} "
                "from another run or process: call restore() first to go on from there, or give an "
                "empty folder."
            )


# ---- writing ------------------------------------------------------------------------------------


def _write(folder: Path, record: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Write a checkpoint to an empty folder."""
    states: dict[str, Any] = {"random": random_states(), "parts": {}}
    (folder / _PARTS).mkdir()
    for name, part in parts.items():
        place = folder / _PARTS / name
        try:
            if record["parts"][name] == "folder":
                with batches_saved_plainly(part):
                    part.dumps(place)
            elif record["parts"][name] != "engine":
                state = state_of(part)
                if is_plain(state):
                    states["parts"][name] = state
                else:
                    with open(place.with_suffix(".pt"), "wb") as file:
                        save_plainly(state, file)
        except OSError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"part {name!r} ({type(part).__name__}) cannot be saved: {error}"
            ) from error
    with open(folder / _STATES, "wb") as file:
        save_plainly(states, file)
    (folder / RUN).write_text(json.dumps(record), encoding="utf-8")


# ---- reading ------------------------------------------------------------------------------------


def _read_record(folder: Path) -> dict[str, Any]:
    """Read the step and the kinds of the parts."""
    try:
        return dict(json.loads((folder / RUN).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"folder must hold checkpoints of runs, but {folder} is damaged or none of them "
            f"({error}): restore() skips damaged ones, and a buffer has a folder of its own."
        ) from error


def _check_names(kinds: Mapping[str, str], record: Mapping[str, Any], folder: Path) -> None:
    """Refuse parts that were not saved, or as another kind; warn of those that are not given."""
    saved = {name: kind for name, kind in record["parts"].items() if kind != "engine"}
    given = {name: kind for name, kind in kinds.items() if kind != "engine"}
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


def _read_states(folder: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the states of parts by name, and the random states. Large tensors are mapped, not read."""
    read = load_plainly(folder / _STATES, mmap=True)
    states = {}
    for name, kind in kinds.items():
        if name in read["parts"]:
            states[name] = read["parts"][name]
        elif kind not in ("folder", "engine"):
            file = folder / _PARTS / f"{name}.pt"
            try:
                states[name] = load_plainly(file)
            except Exception as error:
                raise ValueError(f"part {name!r} cannot be read from {file}: {error}") from error
    return states, read["random"]
