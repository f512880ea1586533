"""The log of a run: what is logged reads back equal, in the folder and in TorchRL's loggers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torchrl.record.loggers import CSVLogger

from torchrl_mt.collectors import Episode, StopReason, Turn
from torchrl_mt.engines import Completion
from torchrl_mt.view import RunLog, plot_run
from torchrl_mt.view.__main__ import main as view
from torchrl_mt.view.plot_run import page_data, render_page
from torchrl_mt.view.run_files import read_run

NUMBERS = st.integers(-(2**40), 2**40) | st.floats(width=64) | st.booleans()
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("step", "session", "time"))


def rows(run: RunLog) -> dict:
    return {step: dict(row) for step, row in read_run(run.folder).rows.items()}


@given(st.dictionaries(st.integers(0, 50), st.dictionaries(NAMES, NUMBERS)))
def test_every_number_reads_back(tmp_path_factory, given_rows):
    with RunLog(tmp_path_factory.mktemp("run"), loggers=()) as run:
        for step, numbers in given_rows.items():
            run.log(step, numbers)
    found = rows(run)
    assert list(found) == sorted(given_rows)
    for step, numbers in given_rows.items():
        assert found[step].keys() == numbers.keys()
        for name, value in numbers.items():
            assert found[step][name] == value or math.isnan(value)


def test_what_is_no_number_is_left_out(tmp_path):
    losses = TensorDict(
        {"loss": torch.tensor(0.5, requires_grad=True), "in": {"kl": torch.ones(())}}
    )
    losses["text"] = NonTensorData("hello")
    with RunLog(tmp_path, loggers=()) as run:
        run.log(3, losses, {"a": "text", "b": np.arange(2), "c": None, "d": torch.ones(1), "e": 1j})
        run.log(4, {"a": {"b": np.float32(2)}, ("c", "d"): True}, e=torch.tensor(7))
    assert rows(run) == {3: {"loss": 0.5, "in/kl": 1.0}, 4: {"a/b": 2.0, "c/d": 1.0, "e": 7.0}}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_second_log_goes_on_and_replaces_steps(tmp_path):
    with RunLog(tmp_path, config={"lr": 1}, loggers=()) as run:
        for step in range(4):
            run.log(step, a=step, b=0)
        run.log(3, evaluation=1.0)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "sess')  # of a writer that was killed
    assert rows(run)[3] == {"a": 3, "b": 0, "evaluation": 1}
    with RunLog(tmp_path, loggers=()) as run:
        run.log(3, a=30)
        run.log(4, a=40)
    found = rows(run)
    assert found[2] == {"a": 2, "b": 0}
    assert (found[3], found[4]) == ({"a": 30}, {"a": 40})
    facts = read_run(tmp_path).facts
    assert facts["config"] == {"lr": 1}
    assert len(facts["sessions"]) == 2
    assert facts["sessions"][0]["versions"]["torch"] == torch.__version__


@dataclass
class Config:
    lr: float = float("inf")
    path: Path = Path("data")
    inner: Namespace = field(default_factory=lambda: Namespace(layers=(1, 2), f=len))


@pytest.mark.parametrize("config", [Config(), vars(Config()), Namespace(**vars(Config()))])
def test_config_becomes_json(tmp_path, config):
    RunLog(tmp_path, loggers=(), config=config).close()
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert config["lr"] == "Infinity"
    assert config["path"] == "data"
    assert config["inner"]["layers"] == [1, 2]


def test_csv_and_own_loggers_get_the_numbers(tmp_path):
    own = CSVLogger("own", str(tmp_path))
    with RunLog(tmp_path / "run", ["csv", own]) as run:
        run.log(5, {"reward/../../../x": 1, "a/b": 2, "a:/c": math.nan})
    for folder in (tmp_path / "own", tmp_path / "run" / "csv"):
        assert (folder / "scalars" / "a" / "b.csv").read_text() == "5,2.0\n"
        assert (folder / "scalars" / "reward" / "x.csv").read_text() == "5,1.0\n"
    assert own.is_alive
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_other_loggers_write_into_the_folder(tmp_path, monkeypatch, kind):
    pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in range(2):  # the second goes on
        with RunLog(tmp_path, [kind], config={"lr": 1}) as run:
            run.log(step, {"rejected/Time<out>": 2}, loss=math.nan)
    where = {"tensorboard": "tensorboard/*", "mlflow": "mlflow.db", "wandb": "wandb/offline-run-*"}
    assert list(tmp_path.glob(where[kind]))
    if kind == "tensorboard":
        module = "tensorboard.backend.event_processing.event_accumulator"
        events = pytest.importorskip(module).EventAccumulator(str(tmp_path / "tensorboard"))
        scalars = events.Reload().Scalars("rejected/Time_out_")
        assert [(e.step, e.value) for e in scalars] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_library_is_named(tmp_path, monkeypatch, kind):
    flag = "_has_tb" if kind == "tensorboard" else f"_has_{kind}"
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.setattr(f"torchrl.record.loggers.{kind}.{flag}", False)
    with pytest.raises(ImportError, match=f"pip install {kind}"):
        RunLog(tmp_path / "run", [kind])
    assert not (tmp_path / "run" / "run.json").exists()


def test_pages_of_episodes(tmp_path):
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    turn = Turn([1, 2], Completion([3], [-0.5], [7], "stop"), messages=said, reward=1.0)
    episode = Episode(None, 0, 0, [turn], StopReason.DONE)
    with RunLog(tmp_path / "run", loggers=(), episodes_every=3) as run:
        written = []
        for step in range(5):
            written.append(run.episodes(step, [episode]))
            run.log(step, loss=math.nan)
    assert [path and path.name for path in written] == ["0.html", None, None, "3.html", None]
    first, fourth = (path.read_text() for path in written if path)
    assert "<title>run, step 0</title>" in first
    assert "Numbers that are not finite" not in first
    assert "Numbers that are not finite" in fourth


def test_the_bar_shows_what_there_is(tmp_path, capsys):
    with RunLog(tmp_path, loggers=(), total_steps=4, progress=True) as run:
        stats = {"reward/default/mean": 0.25, "accepted": 3, "rejected": 1, "tokens_per_second": 99}
        run.log(0, stats, {"cut": 2, "turns": 4})
        run.log(1, {"staleness/mean": 1})
    with RunLog(tmp_path, loggers=(), total_steps=4, progress=True) as run:
        run.log(2)
    shown = capsys.readouterr().err
    parts = "1/4 reward=0.25 rejected=25% cut=50% tokens/s=99 staleness=1 3/4"
    assert all(part in shown for part in parts.split()), shown
    RunLog(tmp_path, loggers=(), progress=False).close()
    assert capsys.readouterr().err == ""


def test_the_viewer_says_what_to_do_with_the_folder_of_a_run(tmp_path, capsys):
    with RunLog(tmp_path, loggers=()) as run:
        run.log(0, loss=1.0)
    with pytest.raises(SystemExit):
        view([str(tmp_path)])
    assert "is the folder of a run: follow it with --live" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda p: RunLog(p, "csv"), TypeError, "loggers must be a sequence"),
        (lambda p: RunLog(p, ["cvs"]), ValueError, "Did you mean 'csv'"),
        (lambda p: RunLog(p, [3]), TypeError, "loggers must be names"),
        (lambda p: RunLog(p, config=3), TypeError, "config must be a mapping.*got 3"),
        (lambda p: RunLog(p, episodes_every=0), ValueError, "episodes_every must be"),
        (lambda p: RunLog(p, total_steps=-1), ValueError, "total_steps must be"),
        (lambda p: RunLog(p).log(1.5), TypeError, "step must be an int, got 1.5"),
        (lambda p: RunLog(p).log(-1), ValueError, "step must be at least 0"),
        (lambda p: RunLog(p).log(1, len), TypeError, "dicts must be dicts.*call it"),
        (lambda p: RunLog(p).log(1, {"time": 3}), ValueError, "'time'"),
        (lambda p: read_run(p / "no"), FileNotFoundError, "folder must be that of a RunLog"),
        (lambda p: plot_run(), TypeError, "folders must be"),
    ],
)
def test_bad_arguments_are_named(tmp_path, make, error, said):
    with pytest.raises(error, match=said):
        make(tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_damage_names_the_line_and_a_closed_log_refuses(tmp_path):
    run = RunLog(tmp_path, loggers=())
    run.log(0, a=1)
    run.close()
    run.close()
    with pytest.raises(ValueError, match="is closed"):
        run.log(1, a=1)
    with pytest.raises(ValueError, match="is closed"), run:
        pass
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("nonsense\n")
    with pytest.raises(ValueError, match="damaged at line 2"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        RunLog(tmp_path, loggers=())


EVIL = "</script><img src=x onerror=alert(1)>$x$"


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    for name in ("a", "b"):
        with RunLog(tmp_path / name, loggers=(), config={"note": EVIL}) as run:
            for step in range(2000 if name == "a" else 3):
                accepted = 8 * (step + 1)
                stats = {"accepted": accepted, "rejected": accepted / 4, "time": {"engine": 0.5}}
                stats |= {f"rejected/{EVIL}": accepted / 4, "mine": math.nan}
                run.log(step, stats, {f"reward/_{EVIL[9:]}/mean": 999 if step == 777 else 0})
    (tmp_path / "a" / "episodes").mkdir()
    (tmp_path / "a" / "episodes" / "10.html").write_text("")
    return [tmp_path / "a", tmp_path / "b"]


def test_a_page_has_curves_of_all_runs(runs):
    data = page_data([read_run(folder) for folder in runs])
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert charts["mine"]["folded"]
    reward = charts["Reward"]["curves"]
    assert [curve["run"] for curve in reward] == [0, 1]
    assert [777, 999.0] in reward[0]["points"]  # a spike survives the thinning
    assert len(reward[0]["points"]) <= 600
    rejected = charts["Rejected episodes by cause"]["curves"][1]["points"]
    assert rejected == [[0, 0.2], [1, 0.2], [2, 0.2]]
    assert data["runs"][0]["episodes"] == [{"step": 10, "href": "episodes/10.html"}]
    page = render_page(data)
    assert "<img" not in page
    assert page.count("</script>") == 2


@pytest.mark.filterwarnings("error")
def test_a_plot_is_a_picture_and_a_page(runs, tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_run(*runs, out=tmp_path / "plots" / "both.png")
    assert path == tmp_path / "plots" / "both.html"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "../a/episodes/10.html" in path.read_text()
    assert plot_run(runs[0]) == runs[0] / "run.html"


@pytest.mark.slow
def test_a_plot_without_matplotlib_names_the_extra(runs):
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"from torchrl_mt.view import plot_run; plot_run({str(runs[1])!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'torchrl-mt[examples]'" in done.stderr
