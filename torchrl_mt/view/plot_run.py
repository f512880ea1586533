"""Curves of runs: a picture, and a page in one file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from torchrl_mt.checks import import_extra
from torchrl_mt.json_lines import to_json
from torchrl_mt.paths import replace_file
from torchrl_mt.view.health import RULES, judge_run
from torchrl_mt.view.pages import render, script_json
from torchrl_mt.view.run_files import Run, read_run

__all__ = ["page_data", "plot_run", "render_page"]


_CHARTS = """
Reward | per episode | reward: reward, reward/*/mean: *, eval/reward: evaluation
Return | per episode, discounted | return: training
Success | share of episodes | success: training, success/*: *, eval/success: evaluation
KL to the reference | nats per token | kl/mean: before the update, kl_to_ref: in the loss
KL to the old policy | nats per token | approx_kl: estimate
Entropy | nats per token | entropy: in the loss, entropy/mean: before the update
Clipped ratios | share of tokens | clip_fraction: all, clip_fraction_low: low, clip_fraction_high: high
Effective samples | share of tokens | ess: new to old policy, correction_ess: old policy to sampler
Staleness | weight versions | staleness/mean: mean of the batch, staleness/max: oldest of the batch
Length of a turn | sampled tokens | tokens_per_turn: mean of the batch
Turns of an episode | model calls | turns_per_episode: mean of the batch
Rejected episodes by cause | share of those that ended | rejected/*: * | accepted, rejected
Ends of episodes | share of the accepted | stop/*: * | accepted
Time of episodes | share | time/engine: model, time/environment: environment, time/waiting: waiting
Groups with equal rewards | share of groups | groups/without_spread: groups
Gradient norm | before clipping | grad_norm: norm
Speed | accepted tokens per second | tokens_per_second: mean since the start
Losses | to minimise | loss: sum, loss_*: *
"""
"""Title, unit and curves: patterns of metrics with a plain name, in which ``*`` is what it matches.
Counters are shown as a share of what the counters of the fourth column grew by."""
_TABLE = [[part.strip() for part in line.split("|")] for line in _CHARTS.strip().splitlines()]
_BUCKETS = 300
"""A curve has its lowest and its highest point of so many parts."""


def plot_run(*folders: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Plot runs into a PNG and a page: findings first, then curves, config, versions and episodes.

    Several runs share axes, with a legend by folder. The page is one file and loads nothing from
    elsewhere.

    Args:
        *folders: folders of a :class:`~torchrl_mt.view.RunLog`; may still be written.
        out: the page; the picture has the same name with ``.png``. By default ``run.html`` in the
            folder, of several runs ``runs.html`` in the first one.

    Returns:
        The path of the page.

    Raises:
        TypeError: if there is no folder.
        FileNotFoundError: if one is no folder of a run.
        ValueError: if a file is damaged, or ``out`` has another ending than ``.html`` or ``.png``.
        ImportError: if matplotlib is missing: ``pip install 'torchrl-mt[examples]'``.

    Examples:
        >>> import tempfile
        >>> from torchrl_mt.view import RunLog
        >>> with RunLog(tempfile.mkdtemp(), loggers=()) as run:
        ...     for step in range(3):
        ...         run.log(step, reward=step / 2)
        >>> plot_run(run.folder).name
        'run.html'
    """
    if not folders:
        raise TypeError("folders must be at least one folder of a RunLog, got none.")
    runs = [read_run(folder) for folder in folders]
    name = "run.html" if len(runs) == 1 else "runs.html"
    path = Path(runs[0].folder / name if out is None else out).expanduser()
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"out must end in .html or .png, got {str(out)!r}.")
    path = path.with_suffix(".html")
    data = page_data(runs, path.parent)
    _draw(data, path.with_suffix(".png"))
    return replace_file(path, render_page(data).encode())


def page_data(runs: Sequence[Run], base: Path | None = None) -> dict[str, Any]:
    """Collect what a page of runs shows, as JSON.

    Args:
        runs: the runs.
        base: the folder that links to pages of episodes start from; by default that of each run.
    """
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    charts: dict[tuple[int, str], dict[str, Any]] = {}
    for number, run in enumerate(runs):
        for place, chart in _charts(run):
            shared = charts.setdefault((place, chart["title"]), {**chart, "curves": []})
            for curve in chart["curves"]:
                label = f"{names[number]}: " * (len(runs) > 1) + curve["label"]
                shared["curves"].append({**curve, "run": number, "label": label})
    described = [_described(run, name, base) for run, name in zip(runs, names, strict=True)]
    return to_json({"runs": described, "charts": [charts[key] for key in sorted(charts)]})


def render_page(data: dict[str, Any], *, live: bool = False) -> str:
    """Render the page of :func:`page_data`; a live one asks for ``metrics`` again and again."""
    title = " and ".join(run["name"] for run in data["runs"])
    return render("run", title=title, data=script_json({**data, "live": live}))


def _described(run: Run, name: str, base: Path | None) -> dict[str, Any]:
    """A run without its curves."""
    findings, missing = judge_run(run)
    base = (run.folder if base is None else base).resolve()
    return {
        "name": name,
        "steps": len(run.rows),
        "findings": [asdict(finding) for finding in findings],
        "unchecked": [f"{RULES[rule][0]} (rule {rule})" for rule in missing],
        "episodes": [
            {"step": step, "href": quote(Path(os.path.relpath(path.resolve(), base)).as_posix())}
            for step, path in run.pages.items()
        ],
        "facts": dict(run.facts),
    }


def _charts(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    """The charts of a run, each with its place; numbers that no chart names have one each, folded."""
    left = set(run.columns)
    for place, (title, unit, patterns, *per) in enumerate(_TABLE):
        whole = run.growth(*", ".join(per).split(", "))
        curves: list[dict[str, Any]] = []
        for pattern, label in (each.split(": ") for each in patterns.split(", ")):
            for name, part in run.matching(pattern).items():
                left.discard(name)
                points = run.series(name)
                if per:
                    share = run.growth(name)[whole > 0] / whole[whole > 0]
                    points = run.steps[whole > 0], share
                curve = {"label": label.replace("*", part), "name": name, "nth": len(curves)}
                curves.append(curve | {"points": _thinned(*points)})
        if curves:
            yield place, {"title": title, "unit": unit, "folded": False, "curves": curves}
    for name in left:
        curve = {"label": name, "name": name, "nth": 0, "points": _thinned(*run.series(name))}
        yield len(_TABLE), {"title": name, "unit": "", "folded": True, "curves": [curve]}


def _thinned(steps: np.ndarray, values: np.ndarray) -> list[list[float]]:
    """The points of a curve; of a long one the lowest and the highest of each part, and NaN."""
    kept = np.arange(len(steps))
    if len(steps) > 2 * _BUCKETS:
        parts = np.array_split(kept, _BUCKETS)
        kept = np.unique([part[i(values[part])] for part in parts for i in (np.argmin, np.argmax)])
    return [[int(steps[i]), float(f"{values[i]:.6g}")] for i in kept]


def _draw(data: dict[str, Any], path: Path) -> None:
    """Draw the charts that are not folded, as a PNG."""
    figures = import_extra("matplotlib.figure", "examples")
    charts = [chart for chart in data["charts"] if not chart["folded"]]
    columns = min(3, max(1, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    figure = figures.Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    many = len(data["runs"]) > 1
    for number, chart in enumerate(charts, 1):
        axes = figure.add_subplot(rows, columns, number, xlabel="step", ylabel=chart["unit"])
        axes.set_title(chart["title"])
        axes.grid(alpha=0.3)
        for curve in chart["curves"]:
            axes.plot(
                [step for step, _ in curve["points"]],
                [float(value) for _, value in curve["points"]],
                "-" if not many else ("-", "--", ":", "-.")[curve["nth"] % 4],
                color=f"C{(curve['run'] if many else curve['nth']) % 10}",
                # Matplotlib reads "$" as mathematics, and leaves out names that begin with "_".
                label=curve["label"].replace("$", r"\$").lstrip("_"),
                marker="." if len(curve["points"]) == 1 else "",
            )
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
