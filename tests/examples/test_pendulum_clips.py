"""The pendulum script learns, and refuses or stops cleanly."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "pendulum_clips.py"


def load():
    spec = importlib.util.spec_from_file_location("pendulum_clips", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script():
    threads = torch.get_num_threads()
    yield load()
    torch.set_num_threads(threads)


def test_the_error_falls_and_the_curve_is_drawn(script, tmp_path, capsys):
    out = tmp_path / "a" / "b"
    arguments = f"--steps 150 --episodes 8 --slice-len 8 --clips 32 --out {out}"
    assert script.main(arguments.split()) == 0
    printed = capsys.readouterr().out
    first, last = map(float, re.search(r"open loop: (\S+) -> (\S+)", printed).groups())
    still = float(re.search(r"nothing moves: (\S+)", printed).group(1))
    assert last < first / 4
    assert last < still
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("script")
def test_without_matplotlib_it_is_said_how_to_get_the_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import fails
    arguments = f"--steps 2 --episodes 4 --slice-len 8 --clips 4 --out {tmp_path}"
    assert load().main(arguments.split()) == 0
    assert not list(tmp_path.iterdir())
    assert "needs matplotlib: pip install 'torchrl-mt[examples]'" in capsys.readouterr().out


def test_the_buffer_holds_whole_episodes_that_the_collector_cut(script):
    buffer = script.collect(episodes=6, slice_len=5, clips=3, seed=0)
    assert set(buffer.storage.lengths.tolist()) == {script.EPISODE_LENGTH}
    clips = buffer.sample().reshape(3, 5)
    steps = clips["step_count"].squeeze(-1)
    assert (steps.diff(dim=1) == 1).all()
    assert torch.equal(clips["next", "th"][:, :-1], clips["th"][:, 1:])


def test_the_same_seed_gives_the_same_episodes(script):
    def episodes(seed):
        torch.manual_seed(seed)
        return script.collect(episodes=4, slice_len=5, clips=3, seed=seed).storage[:]

    first, again, other = episodes(0), episodes(0), episodes(1)
    assert torch.equal(first["th"], again["th"])
    assert not torch.equal(first["th"], other["th"])


def test_an_unwritable_folder_is_refused_before_any_work(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "collect", lambda *args: pytest.fail("work had begun"))
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as exit_:
        script.main(["--out", str(tmp_path / "file" / "run")])
    assert exit_.value.code == 2
    assert "--out: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--slice-len", "101"]])
def test_bad_arguments_are_refused(script, arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.main(arguments)
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("where", ["observe", "Dynamics"])
def test_control_c_stops_cleanly(script, where, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, where, interrupt)
    assert script.main(["--steps", "1", "--episodes", "4", "--out", str(tmp_path)]) == 130
    assert "stopped" in capsys.readouterr().err


def test_help():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--steps", "--seed", "--out"):
        assert option in done.stdout
