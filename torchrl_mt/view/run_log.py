"""The log of a run: numbers by step in a folder, in TorchRL's loggers and on the terminal.

Each call appends one whole line to ``metrics.jsonl``. A second log on the same folder goes on.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger, MLFlowLogger, get_logger
from tqdm.auto import tqdm

from torchrl_mt.checks import check_at_least, check_choice, check_integer, check_positive_integer
from torchrl_mt.installed import devices, versions
from torchrl_mt.json_lines import append_lines, to_json, to_line
from torchrl_mt.paths import replace_file
from torchrl_mt.view.health import check_run
from torchrl_mt.view.report import Report
from torchrl_mt.view.run_files import (
    EPISODES,
    FACTS,
    METRICS,
    RESERVED,
    Run,
    flat_numbers,
    read_run,
)

__all__ = ["RunLog"]

_LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


class RunLog:
    """Write the numbers of a run, step by step: into a folder, TorchRL's loggers and a terminal bar.

    ``run.log(step, collector.stats(), maker.metrics, losses, grad_norm=norm)`` logs a step.

    The folder gets ``metrics.jsonl`` (a line per call), ``run.json`` (config, versions, devices, command
    line) and ``episodes/<step>.html``. :func:`~torchrl_mt.view.check_run` and
    :func:`~torchrl_mt.view.plot_run` read it. A second log on the same folder goes on: steps that are
    logged again replace the earlier ones. Of several ranks, one writes.

    Args:
        folder: the run's folder; made if missing.
        loggers: names among ``"csv"``, ``"tensorboard"``, ``"wandb"`` and ``"mlflow"``, or loggers of
            TorchRL. Those by name write into the folder and are closed with the log; ``"wandb"`` obeys
            ``WANDB_MODE`` and ``WANDB_PROJECT``, ``"mlflow"`` obeys ``MLFLOW_TRACKING_URI``.
        config: a mapping, a dataclass or argparse's namespace, kept in ``run.json``.
        episodes_every: steps between two pages of :meth:`episodes`.
        total_steps: the last step, for the time to go.
        progress: whether to show a bar; by default, if stderr is a terminal.

    Raises:
        ValueError: if a logger is unknown, or a number is not positive.
        TypeError: if an argument has another type.
        ImportError: if a logger's library is missing.

    Examples:
        >>> import tempfile
        >>> with RunLog(tempfile.mkdtemp(), loggers=(), config={"lr": 1e-5}) as run:
        ...     run.log(0, {"time": {"engine": 0.5}, "name": "left out"}, grad_norm=2.0)
        >>> line = json.loads((run.folder / "metrics.jsonl").read_text())
        >>> line["step"], line["time/engine"], line["grad_norm"]
        (0, 0.5, 2.0)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loggers: Sequence[str | Logger] = ("csv",),
        *,
        config: Any = None,
        episodes_every: int = 10,
        total_steps: int | None = None,
        progress: bool | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.episodes_every = check_positive_integer("episodes_every", episodes_every)
        if total_steps is not None:
            check_positive_integer("total_steps", total_steps)
        if isinstance(loggers, str) or not isinstance(loggers, Sequence):
            raise TypeError(f"loggers must be a sequence of names and loggers, got {loggers!r}.")
        for each in loggers:
            if isinstance(each, str):
                check_choice("loggers", each, _LOGGERS)
            elif not hasattr(each, "log_metrics"):
                raise TypeError(f"loggers must be names or TorchRL's loggers, got {each!r}.")
        if config is not None and not isinstance(config := _plain(config), dict):
            raise TypeError(f"config must be a mapping or a dataclass, got {config!r}.")
        is_new = not (self.folder / FACTS).exists()
        before = Run(self.folder, {}, {}) if is_new else read_run(self.folder)
        facts = _facts(before.facts, config)
        self._session, self._zero = len(facts["sessions"]), 0 in before.rows
        self.folder.mkdir(parents=True, exist_ok=True)
        self._loggers: list[Any] = [each for each in loggers if not isinstance(each, str)]
        self._own: dict[str, Logger] = {}
        for name in (each for each in loggers if isinstance(each, str)):
            try:
                self._own[name] = _logger(name, self.folder.resolve(), facts)
            except ImportError as error:
                raise ImportError(f"the logger {name!r} needs it: pip install {name}.") from error
        self._loggers += self._own.values()
        replace_file(self.folder / FACTS, json.dumps(facts, indent=1).encode())
        self._bar = None
        if sys.stderr.isatty() if progress is None else progress:
            done = max(before.rows, default=0) + self._zero
            self._bar = tqdm(total=total_steps, unit="step", desc=self.folder.name, initial=done)
        self._closed = False

    def log(self, step: int, *dicts: Any, **numbers: Any) -> None:
        """Log the numbers of a step.

        Names of nested dicts are joined by ``/``. What is no number (bools are) is left out. Call this
        once per step if you can; numbers of several calls at one step are kept together.

        Args:
            step: the step, 0 or more.
            *dicts: dicts or TensorDicts of numbers and zero-dimensional tensors; may be nested.
            **numbers: further ones.

        Raises:
            TypeError: if ``step`` is no integer, or one of ``dicts`` is no dict.
            ValueError: if ``step`` is negative, a name is ``"step"``, ``"session"`` or ``"time"``, or
                the log is closed.
        """
        _check_step(step)
        self._check_open()
        found: dict[str, Any] = {}
        for each in (*dicts, numbers):
            if not isinstance(each, (Mapping, TensorDictBase)):
                came = f"{type(each).__name__}{': call it' if callable(each) else ''}"
                raise TypeError(f"dicts must be dicts or TensorDicts, got {came}.")
            found.update(flat_numbers(each))
        if taken := found.keys() & {*RESERVED}:
            raise ValueError(
                f"no number may be named {min(taken)!r}: each line has that. Rename it."
            )
        line = {"step": step, "session": self._session, "time": time.time(), **found}
        append_lines(self.folder / METRICS, [to_line(line)])
        safe = {_safe(name): float(value) for name, value in found.items()}
        for logger in self._loggers:
            logger.log_metrics(safe, step=step)
        self._zero |= step == 0
        if self._bar is not None:
            self._bar.set_postfix(_summary(found), refresh=False)
            self._bar.n = step + self._zero
            self._bar.refresh()

    def episodes(self, step: int, source: Any, tokenizer: Any = None) -> Path | None:
        """Write a page of episodes if ``step`` is a multiple of ``episodes_every``; else do nothing.

        Its first panel says what :func:`~torchrl_mt.view.check_run` finds wrong with the run so far.

        Args:
            step: the step.
            source: as of :func:`~torchrl_mt.view.write_report`.
            tokenizer: likewise.

        Returns:
            The path of ``episodes/<step>.html``, or ``None``.
        """
        _check_step(step)
        if step % self.episodes_every:
            return None
        faults = [asdict(each) for each in check_run(self.folder) if each.level != "good"]
        title = f"{self.folder.name}, step {step}"
        page = Report(source, tokenizer=tokenizer, title=title, health=faults)
        return page.write(self.folder / EPISODES / f"{step}.html")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the log of {self.folder} is closed: make a new RunLog to go on.")

    def close(self) -> None:
        """Close the bar and the loggers that were given by name; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        for name, logger in self._own.items():
            logger.close()
            if name == "mlflow":
                # The host leaves its run open, and no other can be started then.
                import mlflow

                mlflow.end_run()

    def __enter__(self) -> RunLog:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _facts(before: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """What ``run.json`` is to hold, after what it held."""
    session = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.orig_argv,
        "versions": versions(),
        "devices": devices(),
    }
    return {
        "id": before.get("id", uuid4().hex[:12]),
        "config": before.get("config") if config is None else to_json(config),
        "sessions": [*before.get("sessions", []), session],
    }


def _logger(name: str, folder: Path, facts: Mapping[str, Any]) -> Logger:
    """One of TorchRL's loggers, which writes into the folder."""
    if name == "mlflow":
        # get_logger's file store is refused by MLflow since 3.10.
        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        artifacts = (folder / "mlflow").as_uri() if store.startswith("sqlite:") else None
        return MLFlowLogger(folder.name, store, artifact_location=artifacts)
    project = os.environ.get("WANDB_PROJECT", "torchrl_mt")
    options = {"id": facts["id"], "project": project, "config": facts["config"]}
    title = folder.name if name == "wandb" else name
    return get_logger(name, str(folder), title, wandb_kwargs=options)


def _check_step(step: Any) -> None:
    check_integer("step", step)
    check_at_least("step", step, 0)


def _safe(name: str) -> str:
    """A name that every logger takes: none leads out of a folder, and MLflow knows few characters."""
    parts = (re.sub(r"[^\w\-. ]", "_", part, flags=re.ASCII) for part in name.split("/"))
    return "/".join(part for part in parts if part.strip(".")) or "_"


def _plain(value: Any) -> Any:
    """Dataclasses, namespaces and paths within a config, as dicts and strings."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _summary(found: Mapping[str, float]) -> dict[str, Any]:
    """What the bar shows beside the steps."""
    rewards = [name for name in sorted(found) if re.fullmatch(r"reward(/[^/]+/mean)?", name)]
    ended = found.get("accepted", 0) + found.get("rejected", 0)
    shown = {
        "reward": found[rewards[0]] if rewards else None,
        "return": found.get("return"),
        "tokens/s": found.get("tokens_per_second"),
        "rejected": f"{found.get('rejected', 0) / ended:.0%}" if ended else None,
        "cut": f"{found['cut'] / found['turns']:.0%}" if found.get("cut") else None,
        "staleness": found.get("staleness/mean"),
    }
    return {name: value for name, value in shown.items() if value is not None}
