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
from torchrl_mt.collectors import Limits, MultiTurnCollector
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
    "maker_kwargs": tuple(inspect.signature(ExperienceMaker).parameters),
    "loss_kwargs": tuple(inspect.signature(MultiTurnLoss).parameters),
}
"""Keys of the tables whose keys are known."""


def trainer_from_file(path: str | Path, *, resume: bool = False) -> MultiTurnTrainer:
    """Make the trainer of a run that a file describes.

    ``task``, ``data`` and ``eval_data`` are names as ``"module.name"``, of modules beside the file or
    installed ones; ``data`` and ``eval_data`` may also be files of JSON lines, an item each. Paths are
    relative to the file.

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
    for key, value in config.items():
        check_choice("a key", key, sorted(_KEYS))
        if isinstance(value, Mapping):
            for each in value if key in _TABLES else ():
                check_choice(f"a key of [{key}]", each, _TABLES[key])
    if lacking := [key for key in ("model", "task", "folder") if key not in config]:
        raise ValueError(f"{path} must have the key {lacking[0]!r}.")
    here = path.absolute().parent
    sys.path.insert(0, str(here))
    try:
        config["task"] = named(config["task"], "task")
        for key in {"data", "eval_data"} & config.keys():
            config[key] = _items(config[key], key, here)
    finally:
        sys.path.remove(str(here))
    if "eval_data" in config and callable(config["eval_data"]):
        config["eval_data"] = config["eval_data"]()
    config["folder"] = here / config["folder"]
    if (here / config["model"]).is_dir():
        config["model"] = str(here / config["model"])
    return MultiTurnTrainer(**config, resume=resume)


def explain_keys() -> str:
    """Return what each key means, a paragraph each, as the docstring of the trainer says."""
    lines = inspect.cleandoc(MultiTurnTrainer.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    plain = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`|``(.*?)``", r"\1\2", inspect.cleandoc(lines))
    entries = re.split(r"\n(?=\w)", plain)
    return "\n".join(entry for entry in entries if entry.partition(":")[0] in _KEYS)


def _items(name: str, key: str, here: Path) -> Any:
    """The items that a key names."""
    if not name.endswith(".jsonl"):
        return named(name, key)
    with open(here / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]
