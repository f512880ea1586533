"""What these tests share: environments are closed however slow the machine is."""

from __future__ import annotations

import asyncio

import pytest

from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import Loop
from tests.waiting import PATIENCE
from torchrl_mt.collectors.event_loop import loop_thread


@pytest.fixture(autouse=True)
def time_to_close(monkeypatch):
    for name in ("CLOSE_SECONDS", "INTERRUPT_SECONDS"):
        monkeypatch.setattr(loop_thread, name, PATIENCE)


@pytest.fixture
def idle_clock(monkeypatch):
    """Limits of time are reached by what hangs, and by nothing else."""
    monkeypatch.setattr(asyncio, "new_event_loop", Loop)


@pytest.fixture
def engine(tokenizer):
    """Every answer is a word and the end of the turn."""
    return ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def ray_cluster():
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'torchrl-mt[ray]'")
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False
    )
    yield ray
    ray.shutdown()
