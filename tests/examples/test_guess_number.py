from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.chat.templates import CHATML, byte_level
from tests.examples import killed_runs
from tests.waiting import PATIENCE
from torchrl_mt.view.run_files import read_run

from .conftest import EXAMPLES, SHORT, save_model

QUICK = SHORT["guess_number"].split()


@pytest.mark.slow
def test_it_learns(example, tmp_path):
    """From imitation of random games to well above it, on a game small enough for a minute."""
    args = "--numbers 8 --turns 4 --updates 30 --warm-start-steps 120 --eval-episodes 512 --seed 0"
    reached = example.train(example.parse([*args.split(), "--out", str(tmp_path)]))
    assert reached["before"] < 0.76  # random guesses that keep to the hints are worth 0.710
    assert reached["after"] > reached["before"] + 0.05
    assert reached["after"] > 0.93 * reached["optimum"]


def test_a_run_writes_what_it_says(example, tmp_path, capsys):
    out = tmp_path
    assert example.main([*QUICK, "--out", str(out)]) == 0
    written = ["after.html", "before.html", "metrics.jsonl", "run.html", "run.json", "run.png"]
    assert sorted(p.name for p in out.iterdir()) == written
    rows = read_run(out).rows
    assert [row["accepted"] for row in rows.values()] == [8, 16]
    assert 0 <= rows[2]["return"] <= 1
    for name in ("before", "after"):
        assert "guess" in (out / f"{name}.html").read_text()
    printed, bars = capsys.readouterr()
    for name in ("return", "success", "optimum", "episodes", "tokens", "seconds"):
        assert f"\n{name} " in printed
    assert f"\ncurves      {out / 'run.html'}" in printed
    assert printed.splitlines()[-1].startswith(f"games       {out / 'after.html'}")
    for name in ("warm start", "evaluation"):
        assert f"{name}: 100%" in bars


def test_a_saved_model_is_trained_without_warm_start(example, tmp_path, capsys):
    pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
    args = [*QUICK, "--model", save_model(tmp_path, CHATML.on(byte_level()))]
    assert example.main([*args, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/after.html").exists()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"right before .+ after .+, plain text nll \d+\.\d\d -> \d+\.\d\d", last)


@pytest.mark.parametrize(
    ("attribute", "what"),
    [("chat_template", "a chat template"), ("eos_token", "an end-of-turn token")],
)
def test_an_unusable_tokenizer_ends_the_run_before_it_begins(
    example, tmp_path, capsys, attribute, what
):
    pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
    tokenizer = CHATML.on(byte_level())
    setattr(tokenizer, attribute, None)
    args = [*QUICK, "--model", save_model(tmp_path, tokenizer), "--out", str(tmp_path / "out")]
    assert example.main(args) == 1
    assert f"must have {what}" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_model_is_reported(example, tmp_path, capsys):
    args = [*QUICK, "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    assert example.main(args) == 1
    assert "nowhere" in capsys.readouterr().err


def test_a_full_disk_ends_the_run_with_what_was_logged(example, tmp_path, capsys, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(example, "plot_run", full)
    assert example.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(read_run(tmp_path).rows) == [1, 2]


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    command = [sys.executable, str(EXAMPLES / "guess_number.py"), "--out", str(tmp_path)]
    command += ["--updates", "500", "--warm-start-steps", "5", "--eval-episodes", "16"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    shown = ""
    while "return=" not in shown:  # the bar shows the running return after the first update
        character = run.stderr.read(1)
        assert character, shown
        shown += character
    run.send_signal(signal.SIGINT)
    out, err = run.communicate()
    assert run.returncode == 0, err
    assert "of optimum" in out
    assert 1 <= len(read_run(tmp_path).rows) < 500
    assert (tmp_path / "after.html").exists()


def check_equal(metrics, expected):
    """Counters and data must be the same; what depends on weights, up to rounding."""
    assert len(metrics) == len(expected)
    for got, row in zip(metrics, expected, strict=True):
        assert got.pop("entropy") == pytest.approx(row.pop("entropy"), rel=1e-4, abs=1e-6)
        assert got == row


def test_a_stopped_run_goes_on_from_its_checkpoint(example, tmp_path, monkeypatch, capsys):
    args = [*QUICK, "--numbers", "4", "--turns", "2"]
    out, checkpoints = tmp_path / "out", ["--checkpoints", str(tmp_path / "checkpoints")]
    assert example.main([*args, "--out", str(tmp_path / "undisturbed")]) == 0
    with monkeypatch.context() as patch:
        save = example.RunCheckpoint.save

        def stop_after_saving(self, step, **parts):
            save(self, step, **parts)
            raise OSError("stopped")

        patch.setattr(example.RunCheckpoint, "save", stop_after_saving)
        assert example.main([*args, "--out", str(out), *checkpoints]) == 1
    capsys.readouterr()
    monkeypatch.delattr(example, "warm_start")
    assert example.main([*args, "--lr", "0.5", "--out", str(out), *checkpoints]) == 1
    assert "began with lr=0.001: give the same arguments" in capsys.readouterr().err
    assert example.main([*args, "--out", str(out), *checkpoints]) == 0
    check_equal(*(killed_runs.metrics(each) for each in (out, tmp_path / "undisturbed")))
    printed, bars = capsys.readouterr()
    assert "start:" not in printed
    assert "1/2" in bars


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_a_run_that_is_killed_twenty_times_goes_on_as_if_undisturbed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, killed_runs.__file__, str(tmp_path), "20"]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    log = report["log"]
    assert [kill["status"] for kill in log] == [-signal.SIGKILL] * 20
    # The kills came while saving, too: before a checkpoint counted and after it.
    assert sum(kill["unfinished"] for kill in log) >= 5
    assert any(len(kill["found"]) - kill["unfinished"] > 3 for kill in log)
    assert len({tuple(sorted(kill["found"])) for kill in log}) >= 10
    assert report["end"] == 0
    last = [f"checkpoint-{killed_runs.UPDATES - k}" for k in (2, 1, 0)]
    assert report["left"] == ["arguments.json", *last]
    check_equal(report["killed"], report["undisturbed"])
    assert len({row["data_order"] for row in report["killed"]}) == killed_runs.UPDATES
