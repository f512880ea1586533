"""The tutorials run, and what they train learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.fixture
def run(monkeypatch):
    """Runs a tutorial and returns its names; puts back the number of threads that it sets."""
    plt = pytest.importorskip("matplotlib.pyplot", reason="tutorials draw")
    plt.switch_backend("Agg")
    threads = torch.get_num_threads()
    yield lambda name: runpy.run_path(str(TUTORIALS / name))
    plt.close("all")
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_an_agent_learns_to_use_its_tools(run, capsys):
    pytest.importorskip("openai", reason="agents need the extra [agents]")
    names = run("tools.py")
    rewards = names["rewards"]
    assert len(rewards) == names["UPDATES"]
    assert sum(rewards[:3]) / 3 < 0.45  # any call, and the answers that are right by chance
    assert sum(rewards[-3:]) / 3 > 0.7
    assert "forks: 0" in capsys.readouterr().out


@pytest.mark.slow
def test_an_environment_is_served_and_played(run, capsys):
    pytest.importorskip("websockets", reason="served environments need the extra [remote]")
    names = run("remote.py")
    ends = names["batch"]["next", "done"].squeeze().nonzero()
    assert names["stats"]["accepted"] == len(ends) == 64
    assert names["stats"]["rejected"] == 0
    assert "0 sessions are open" in capsys.readouterr().out
