"""A run from a TOML file: its keys are the arguments of ``MultiTurnTrainer``."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchrl_mt.checks import check_choice
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.collectors.playing.env_factory import named
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes
from torchrl_mt.trainers.trainer import MultiTurnTrainer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["explain_keys", "trainer_from_file"]

_KEYS = tuple(inspect.signature(MultiTurnTrainer).parameters.keys() - {"critic", "resume"})
_TABLES: dict[str, tuple[str, ...]] = {
    "limits": tuple(field.name for field in fields(Limits)),
    "passes": tuple(field.name for field in fields(Passes)),
    "collector_kwargs": tuple(inspect.signature(MultiTurnCollector).parameters),
    "collector_kwargs.options": tuple(field.name for field in fields(CollectorOptions)),
    "maker_kwargs": tuple(inspect.signature(ExperienceMaker).parameters),
    "loss_kwargs": tuple(inspect.signature(MultiTurnLoss).parameters),
}
"""Keys of the tables whose keys are known."""


def trainer_from_file(path: str | Path, *, resume: bool = False) -> MultiTurnTrainer:
    """Make the trainer of a run that a file describes.

    ``task``, ``data`` and ``eval_data`` are names as ``"module.name"``, of modules beside the file or
    installed ones; ``data`` and ``eval_data`` may also be lists of items, or files of JSON lines, an
    item each. Paths are relative to the file.

    Args:
        path: The TOML file.
        resume: Go on with the run.

    Raises:
        ValueError: If the file is no TOML, or has an unknown key; names the nearest one.
        ImportError: If a name cannot be imported.
    """
    path = Path(path)
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} must be a TOML file: {error}.") from error
    for key in config:
        check_choice("a key", key, sorted(_KEYS))
    collecting = config.get("collector_kwargs", {})
    for table, known in _TABLES.items():
        given = config.get(table, {}) if "." not in table else collecting.get("options", {})
        if not isinstance(given, Mapping):
            raise ValueError(f"{table} must be a table, got {given!r}.")
        for key in given:
            check_choice(f"a key of [{table}]", key, known)
    if "options" in collecting:
        options = {"seed": config.get("seed", 0), **collecting["options"]}
        collecting["options"] = CollectorOptions(**options)
    for key in ("model", "task", "folder"):
        if not isinstance(config.get(key), str):
            raise ValueError(f'{path} must have {key} = "...", got {config.get(key, "nothing")!r}.')
    here = path.absolute().parent
    if str(here) not in sys.path:
        # It stays, as a script's folder does: functions may import later.
        sys.path.insert(0, str(here))
    config["task"] = named(config["task"], "task")
    for key in {"data", "eval_data"} & config.keys():
        config[key] = _items(config[key], key, here)
    if "eval_data" in config and callable(config["eval_data"]):
        config["eval_data"] = config["eval_data"]()
    config["folder"] = here / Path(config["folder"]).expanduser()
    if (model := here / Path(config["model"]).expanduser()).is_dir():
        config["model"] = str(model)
    return MultiTurnTrainer(**config, resume=resume)


def explain_keys() -> str:
    """Return what each key means, a paragraph each, as the docstring of the trainer says."""
    lines = inspect.cleandoc(MultiTurnTrainer.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    plain = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``(.*?)``", r"\1\2", inspect.cleandoc(lines))
    entries = re.split(r"\n(?=\w)", plain)
    return "\n".join(entry for entry in entries if entry.partition(":")[0] in _KEYS)


def _items(given: Any, key: str, here: Path) -> Any:
    """The items that a key gives or names."""
    if not isinstance(given, str):
        return given
    if not given.endswith(".jsonl"):
        return named(given, key)
    path = here / Path(given).expanduser()
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            items += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path} is no JSON in line {number}: {error}.") from error
    return items
