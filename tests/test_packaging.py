"""What is installed, and what the package does without."""

import re
import subprocess
import sys
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_everything_is_imported_without_the_extras():
    code = """
import importlib, pkgutil, sys
for name in ("gymnasium", "httpx", "matplotlib", "mcp", "psutil", "ray", "starlette", "tenacity",
             "uvicorn", "websockets"):
    sys.modules[name] = None  # its import fails
import torchrl_mt
for module in pkgutil.walk_packages(torchrl_mt.__path__, "torchrl_mt."):
    if not module.name.startswith("torchrl_mt.agents"):
        importlib.import_module(module.name)
try:
    import torchrl_mt.agents
except ImportError as error:
    assert str(error).endswith("pip install 'torchrl-mt[agents]'."), error
else:
    raise AssertionError("torchrl_mt.agents was imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", [p.relative_to(ROOT) for p in (*ROOT.glob("*.md"), ROOT / ".ci" / "run")], ids=str
)
def test_commands_install_extras_that_there_are(path):
    named = re.findall(r"pip install [^\n]*?\.\[([\w,]+)\]", (ROOT / path).read_text())
    known = set(metadata("torchrl-mt").get_all("Provides-Extra"))
    assert {extra for extras in named for extra in extras.split(",")} <= known


def test_the_examples_extra_has_agents_and_adapters():
    text = (ROOT / "pyproject.toml").read_text()
    (examples,) = re.findall(r"\nexamples = \[(.*?)\n\]", text, re.S)
    assert '"torchrl-mt[agents,lora]"' in examples


def test_the_core_asks_for_little_and_excludes_no_later_release():
    core = [line for line in requires("torchrl-mt") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line).group() for line in core}
    named = {"torch", "torchrl", "tensordict", "transformers", "numpy", "tqdm", "jinja2"}
    assert names == named | {"tomli"}  # the last before Python 3.11 only
    releases = [line.partition(";")[0] for line in core]
    assert [line for line in releases if re.search("<|==|~=", line)] == ["torchrl<0.15,>=0.14.1"]
