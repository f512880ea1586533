from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.small_families import SMALL_FAMILIES
from torchrl_mt.envs import optimal_return

README = Path(__file__).parents[1] / "README.md"


NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
RESULTS = r"right before ([\d.]+) after ([\d.]+), plain text nll ([\d.]+) -> ([\d.]+)"
"""The last line of the programs that train a real model."""


def code_of(title: str) -> str:
    section = README.read_text(encoding="utf-8").split(title)[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)


def real_model_program(folder: str) -> str:
    """The one with a real model; it comes from a folder here."""
    code = code_of("## A real model")
    assert len(code.splitlines()) <= 40
    assert NAME in code
    return code.replace(NAME, folder)


def test_the_quickstart_is_that_of_the_front_page():
    """Which the trainer's tests run."""
    code = textwrap.indent(code_of("## Quickstart"), " " * 4)
    assert len(code.split("\n\n", 1)[1].strip().splitlines()) < 12
    assert code in (README.parent / "docs" / "index.rst").read_text(encoding="utf-8")


def output_of(code: str, folder: Path) -> str:
    """What a program prints in a folder."""
    (folder / "program.py").write_text(code)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_is_short_and_learns(tmp_path):
    """With half of its games, and the best that it promises."""
    code = code_of("## The loop")
    assert len(code.strip().splitlines()) <= 18
    assert "total_episodes=12_800" in code
    printed = output_of(code.replace("12_800", "6_400"), tmp_path)
    before, after, best = map(float, re.findall(r"\d\.\d+", printed))
    assert before < 0.3
    assert 2 * before < after > 0.45  # the best without a look at the hints is 0.5
    assert best == optimal_return(numbers=4, turns=2, gamma=1.0)


def test_importing_is_quick_and_light(tmp_path):
    loaded = output_of("import sys, torchrl_mt; print(*sys.modules)", tmp_path).split()
    assert not {"torch", "torchrl", "transformers", "matplotlib"} & set(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_the_program_of_a_real_model_runs_with_other_families(family, tmp_path):
    for part in SMALL_FAMILIES[family]():
        part.save_pretrained(tmp_path / "model")
    printed = output_of(real_model_program("model"), tmp_path)
    assert "model: trains LoRA" in printed
    assert re.fullmatch(RESULTS, printed.splitlines()[-1])


@pytest.mark.slow
def test_subpackages_are_attributes():
    code = "import torchrl_mt as mt; mt.data.EpisodeStorage; assert 'envs' in dir(mt); mt.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr
