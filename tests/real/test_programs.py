"""The README's program and the programs for real models, run as users run them.

All but the README's make fewer updates than by default. Measured results with three seeds
are in the programs; one seed must reach less here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import RESULTS, real_model_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def results(command: list[str], cwd: Path) -> list[float]:
    """What a program says in the end: right before, after; likelihood of plain text before, after."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [float(x) for x in re.fullmatch(RESULTS, done.stdout.splitlines()[-1]).groups()]


@pytest.mark.parametrize(
    ("program", "most_before", "least_after"),
    [
        ("guess_number --updates 4 --eval-episodes 32", 0.5, 0.45),
        ("offline_dialogues --updates 1 --held-out 16", 0.1, 0.3),
        ("openai_agent --updates 5 --held-out 16", 0.4, 0.4),
        ("tool_agent --updates 2", 0.1, 0.3),
        ("README", 0.4, 0.6),
    ],
)
def test_a_program_ends_far_above_its_start_and_damages_nothing(
    program, most_before, least_after, folder, tmp_path
):
    if program == "README":
        (tmp_path / "program.py").write_text(real_model_program(folder), encoding="utf-8")
        command = ["program.py"]
    else:
        name, *options = program.split()
        command = [str(ROOT / "examples" / f"{name}.py"), "--model", folder, *options]
    before, after, nll_before, nll_after = results(command, tmp_path)
    assert before < most_before
    assert after > max(least_after, before + 0.1)
    assert nll_after < nll_before + 0.3
