"""What every example promises: it runs, draws its curves, refuses bad arguments and stops cleanly."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.tiers import first_fast
from torchrl_mt.view.run_files import read_run

from .conftest import SHORT

INTERRUPTED = {
    "guess_number": "warm_start",
    "masked_cartpole": "td_errors",
    "pendulum_clips": "observe",
    "pixel_agent": "endless",
}
"""Functions of each that are called in a run."""
BAD_ARGUMENTS = [
    *(("guess_number", ["--numbers", "0"]), ("guess_number", ["--updates", "x"])),
    *(("guess_number", ["--seed", "a"]), ("guess_number", ["--nonsense"])),
    *(("guess_number", ["--prompt", text]) for text in ("guess {x}", "guess {", "guess {}")),
    *(("guess_number", ["--device", "nowhere"]), ("guess_number", ["--device", "cuda:99"])),
    *(("masked_cartpole", ["--updates", "0"]), ("masked_cartpole", ["--clips", "x"])),
    *(("pixel_agent", ["--side", "1"]), ("pixel_agent", ["--device", "nowhere"])),
    *(("pendulum_clips", ["--steps", "0"]), ("pendulum_clips", ["--slice-len", "101"])),
]


def refusal(capsys, module, *arguments):
    """What a program says that ends at once, with the status of wrong arguments."""
    with pytest.raises(SystemExit) as stopped:
        module.main([*map(str, arguments)])
    assert stopped.value.code == 2
    return capsys.readouterr().err


each_example = pytest.mark.parametrize("name", SHORT)
one_example_fast = pytest.mark.parametrize("name", first_fast(SHORT))


@one_example_fast
def test_a_short_run_draws_its_curves(load, name, tmp_path):
    out = tmp_path / "new" / "folder"
    assert load(name).main([*SHORT[name].split(), "--out", str(out)]) == 0
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_begun_anew_forgets_the_earlier_one(load, tmp_path):
    for steps in "31":
        module = load("pendulum_clips")
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        arguments = ["--steps", steps, *SHORT["pendulum_clips"].split()[2:]]
        assert module.main([*arguments, "--out", str(tmp_path)]) == 0
    assert list(read_run(tmp_path).rows) == [0, 1]


@pytest.mark.slow
@each_example
def test_without_matplotlib_a_run_says_how_to_get_the_curves(
    load, name, tmp_path, monkeypatch, capsys
):
    for missing in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, missing, None)  # its import fails
    assert load(name).main([*SHORT[name].split(), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "run.png").exists()
    assert "pip install 'torchrl-mt[examples]'" in capsys.readouterr().out


@each_example
def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    load, name, tmp_path, monkeypatch, capsys
):
    module = load(name)
    monkeypatch.setattr(module, "train", lambda *args: pytest.fail("work had begun"))
    (tmp_path / "file").touch()
    told = refusal(capsys, module, "--out", tmp_path / "file" / "out")
    assert "--out: cannot write into" in told


@pytest.mark.parametrize(("name", "arguments"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(load, name, arguments, tmp_path, capsys):
    assert arguments[0] in refusal(capsys, load(name), *arguments, "--out", tmp_path)


@one_example_fast
def test_control_c_stops_cleanly(load, name, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    module = load(name)
    monkeypatch.setattr(module, INTERRUPTED[name], interrupt)
    assert module.main([*SHORT[name].split(), "--out", str(tmp_path)]) == 130
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["masked_cartpole", "pendulum_clips", "pixel_agent"])
def test_a_folder_with_a_run_is_refused(load, name, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert "has a run: --resume goes on" in refusal(capsys, load(name), "--out", tmp_path)


@each_example
def test_help(load, name, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(name).main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--seed", "--lr", "--out", "--device"))
