"""A run of an example that is stopped and goes on ends as one that ran through, bit for bit."""

from __future__ import annotations

import copy
import itertools
import string
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.chat.templates import CHATML, byte_level
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.envs import ToolEnv
from torchrl_mt.view.run_files import read_run

from .conftest import save_model

DIALOGUES = "--updates 3 --episodes 4 --held-out 2 --sft-steps 1"
RUNS = {
    "tool_agent": DIALOGUES,
    "offline_dialogues": DIALOGUES,
    "pixel_agent": "--updates 3 --side 2 --turns 2",
    "distributed_learner": "--updates 3",
    "masked_cartpole": "--updates 20 --every 5 --clips 4 --width 8 --episodes 2",
    "pendulum_clips": "--steps 4 --episodes 4 --slice-len 8 --clips 4",
}
"""Arguments of runs with several checkpoints."""


def odd(text):
    """A reward that about half of all texts get."""
    return float(sum(map(ord, text)) % 2)


class Tools(ToolEnv):
    """Without threads. Tiny models call none."""

    inline = True

    def __init__(self, tools, **kwargs):
        async def reward(messages, item):
            return odd(messages[-1]["content"])

        super().__init__([], reward=reward, parser=kwargs["parser"])


def collector_of(name, env, engine, data=None, **kwargs):
    """The collector of an example: images come one at a time, and answers of tiny models end."""
    if name == "pixel_agent":
        kwargs["max_concurrency"] = 1
    else:
        kwargs["sampling"]["stop"] = list(string.ascii_letters)
        data = list(itertools.islice(data, 100))
    return MultiTurnCollector(env, engine, data, **kwargs)


def loaded(load, name):
    """An example. What threads would do to rounding, and the curves, are left out."""
    example = load(name)
    example.plot_run = lambda folder: "left out"
    if hasattr(example, "MultiTurnCollector"):
        example.MultiTurnCollector = partial(collector_of, name)
    if name == "tool_agent":
        example.ToolEnv = Tools
    if name == "offline_dialogues":
        example.Desk.step = lambda self, said: example.TextStep(reward=odd(said), done=True)
    return example


class Stopped(Exception):
    """Ends a run right after a checkpoint."""


def run(example, arguments, stop=None):
    """Run an example, or its begin; return the weights and the optimizer's state when it ended."""
    last, save, saves = [], RunCheckpoint.save, itertools.count(1)

    def save_and_stop(self, step, **parts):
        save(self, step, **parts)
        found = [parts.get(name) for name in ("trained", "model", "optimizer")]
        last[:] = [copy.deepcopy(getattr(x, "state_dict", lambda x=x: x)()) for x in found]
        if next(saves) == stop:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoint, "save", save_and_stop)
        if stop is None:
            example.main(arguments)
        else:
            with pytest.raises(Stopped):
                example.main(arguments)
    return tree_leaves(last)


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_bit_for_bit(load, name, tmp_path):
    arguments = RUNS[name].split()
    if "--held-out" in arguments:
        pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
        arguments += ["--model", save_model(tmp_path, CHATML.on(byte_level()))]
    whole, stopped = ([*arguments, "--out", str(tmp_path / out)] for out in ("whole", "stopped"))
    expected = run(loaded(load, name), whole)
    run(loaded(load, name), stopped, stop=2)
    torch.manual_seed(9)
    found = run(loaded(load, name), [*stopped, "--resume"])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert [*read_run(tmp_path / "stopped").rows] == [*read_run(tmp_path / "whole").rows]
