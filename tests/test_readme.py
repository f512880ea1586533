from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def quickstart() -> str:
    section = README.read_text().split("## Quickstart")[1]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)


def test_the_quickstart_is_short_and_runs_as_it_stands(tmp_path):
    code = quickstart()
    assert len(code.strip().splitlines()) <= 15
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_is_quick_and_light():
    code = "import sys, torchrl_mt; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "torchrl", "transformers", "matplotlib"} & set(loaded)


def test_subpackages_are_attributes():
    code = "import torchrl_mt as mt; mt.data.EpisodeStorage; assert 'envs' in dir(mt); mt.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr
