"""The code of the pages on collecting and on pitfalls runs as it stands, and does what they say."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch
from torchrl.data import ReplayBuffer

from tests.collectors.runs import first_batch
from tests.pages import code_of
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, TextEnv, TextStep
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns


class Seen(MultiTurnLoss):
    """Remembers the age of what it is given."""

    ages: ClassVar[list[list[int]]] = []

    def forward(self, rows, **kwargs):
        version = len(self.ages)
        self.ages.append((version - rows["versions", "oldest"]).tolist())
        return super().forward(rows, **kwargs)


def names(env, num_updates):
    """What the pages' code takes for granted."""
    torch.manual_seed(0)
    model, tokenizer = tiny_chat_model("guess to higher lower correct invalid 1 2 3 4")
    libraries = [EpisodeSampler, EpisodeStorage, EpisodeWriter, ExperienceMaker, MergeTurns]
    libraries += [MultiTurnCollector, ReplayBuffer, TransformersEngine, torch, time]
    data = GuessNumber.data(numbers=4)
    return {**{each.__name__: each for each in libraries}, **locals(), "MultiTurnLoss": Seen}


@pytest.mark.slow
def test_the_loop_over_a_collector_in_the_background_trains_on_rows_that_are_young_enough():
    Seen.ages.clear()
    run = names(GuessNumber(4, turns=2), num_updates=12)
    before = [p.detach().clone() for p in run["model"].parameters()]
    try:
        exec(code_of("collecting.rst", "Collecting in the background"), run)
    finally:
        run["engine"].close()
    assert run["updates"] == run["collector"].policy_version == len(Seen.ages) == 12
    # Between the sample and the loss nothing else updates: these are the ages that were filtered by.
    assert max(map(max, Seen.ages)) <= 4
    assert max(map(max, Seen.ages)) > 0
    assert any((p != q).any() for p, q in zip(run["model"].parameters(), before, strict=True))
    assert run["collector"].stats()["accepted"] >= 2 * 64
    assert not run["collector"].is_running


class Broken(TextEnv):
    def reset(self, data=None):
        raise OSError("no tool")

    def step(self, response):
        return TextStep(done=True)


def test_the_loop_ends_with_what_went_wrong_in_the_names():
    run = names(Broken, num_updates=2)
    try:
        with pytest.raises(RuntimeError, match=r"in a row were rejected.*no tool"):
            exec(code_of("collecting.rst", "Collecting in the background"), run)
    finally:
        run["engine"].close()
    assert run["updates"] == 0


class Costs(TextEnv):
    """Every turn that is answered costs something."""

    def reset(self, data=None):
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        return TextStep([{"role": "user", "content": "higher"}], reward=-0.2)


def test_a_cut_answer_has_the_worth_that_is_said():
    run = names(None, num_updates=0)
    exec(code_of("pitfalls.rst", "Cut answers have a hidden reward"), run)
    engine = TransformersEngine(run["model"], run["tokenizer"])
    try:
        limits = Limits(max_turns=3, max_response_tokens=8)
        batch, _ = first_batch(Costs, engine, n=32, limits=limits, sampling={"seed": 0})
    finally:
        engine.close()
    rows = run["merge"](batch)
    reasons, turns = list(rows["stop_reason"]), rows["turns", "full"].amax(-1) + 1
    assert set(reasons) == {"max_response_tokens", "max_turns"}
    was_cut = torch.tensor([reason == "max_response_tokens" for reason in reasons])
    own = rows["rewards", "full"].sum(-1)
    # As the page says: what is cut pays for the turns before, and nothing else.
    torch.testing.assert_close(own, -0.2 * (turns - was_cut.long()).float())
    run["maker"](rows)
    assert run["maker"].metrics["reward/default/cut/mean"] == pytest.approx(
        -0.5 * float(was_cut.float().mean())
    )
