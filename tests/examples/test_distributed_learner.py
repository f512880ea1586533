"""The learner of several processes ends with the weights of a single one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.rank_processes import needs_gloo

from .conftest import EXAMPLES

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "PROGRAM", "--parallel", "fsdp"],
    "accelerate": [*ACCELERATE, "--main_process_port", "0", "PROGRAM"],
}


def weights_of(launcher, out, *more, updates=2):
    """Run two updates, of which the second has rewards to learn from; return the weights."""
    program = str(EXAMPLES / "distributed_learner.py")
    command = [program if word == "PROGRAM" else word for word in launcher or ["PROGRAM"]]
    command += ["--updates", str(updates), "--out", str(out), "--device", "cpu", *more]
    command = ["-m", *command] if launcher else command
    subprocess.run(
        [sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return torch.load(out / "weights.pt")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return weights_of(None, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_processes_train_what_one_does(load, expected, name, tmp_path):
    if importlib.util.find_spec(name) is None and name == "accelerate":
        pytest.skip("needs accelerate")
    more = []
    if name == "torchrun":  # it stops after the first update
        weights_of(LAUNCHERS[name], tmp_path, updates=1)
        more = ["--resume"]
    found = weights_of(LAUNCHERS[name], tmp_path, *more)
    example = load("distributed_learner", short=False)
    torch.manual_seed(0)
    words = [*example.WORDS, *map(str, range(1, example.NUMBERS + 1))]
    start = example.tiny_chat_model(words)[0].state_dict()
    assert found.keys() == expected.keys()
    moved = sum(float((expected[key] - start[key]).square().sum()) for key in expected)
    apart = sum(float((expected[key] - found[key]).square().sum()) for key in expected)
    assert moved > 0
    # Adam divides by the gradient's size, so that rounding counts more than in the gradient.
    assert apart < 1e-6 * moved


def test_a_single_process_needs_no_launcher(load, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    example = load("distributed_learner", short=False)
    example.EPISODES_PER_UPDATE = 8
    assert example.main(["--updates", "1", "--out", str(tmp_path)]) == 0
    assert "update 1: reward" in capsys.readouterr().out
    assert (tmp_path / "weights.pt").exists()
