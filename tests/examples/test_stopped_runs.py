"""A run of an example that is stopped and goes on ends as one that ran through, bit for bit."""

from __future__ import annotations

import copy
import string

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.chat.templates import CHATML, byte_level
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.view.run_files import read_run

from .conftest import save_model

DIALOGUES = "--updates 3 --episodes 4 --held-out 2 --sft-steps 1"
RUNS = {
    "tool_agent": DIALOGUES,
    "offline_dialogues": DIALOGUES,
}
"""Arguments of runs with several checkpoints."""


def odd(text):
    """A reward that about half of all texts get."""
    return float(sum(map(ord, text)) % 2)


def loaded(load, name):
    """An example; where it needs a model, a tiny one ends its answers and has something to learn."""
    example = load(name)
    example.plot_run = lambda folder: "left out"
    if RUNS[name] == DIALOGUES:

        class Stopping(example.MultiTurnCollector):
            def __init__(self, *args, sampling, **kwargs):
                stop = list(string.ascii_letters)
                super().__init__(*args, sampling={**sampling, "stop": stop}, **kwargs)

        example.MultiTurnCollector = Stopping
    if name == "tool_agent":

        async def reward(messages, item):
            return odd(messages[-1]["content"])

        example.reward = reward
    if name == "offline_dialogues":
        example.Desk.step = lambda self, said: example.TextStep(reward=odd(said), done=True)
    return example


class Stopped(Exception):
    """Ends a run right after a checkpoint."""


def run(example, arguments, stop=None):
    """Run an example, up to a checkpoint; return the weights and the optimizer's state of the last."""
    last, save = [], RunCheckpoint.save

    def save_and_stop(self, step, **parts):
        save(self, step, **parts)
        weights = parts["trained"] if "trained" in parts else parts["model"]
        last[:] = copy.deepcopy([weights.state_dict(), parts["optimizer"].state_dict()])
        if step == stop:
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
