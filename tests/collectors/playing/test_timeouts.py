"""Time that ran out is never a reward: such an episode is rejected, or as if it were not there."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from tests.buffers import buffer_of
from tests.collectors.items.test_curriculum import Recording
from tests.collectors.runs import first_batch, run_of
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import LIMIT, hang
from tests.tiers import first_fast
from torchrl_mt.collectors import Limits
from torchrl_mt.data import EpisodeSampler
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.objectives import Advantage, ExperienceMaker, MultiTurnLoss, ValueModel
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS
from torchrl_mt.transforms import MergeTurns

NAMES = ["tool", "turn", "episode"]
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"]
GROUP, TURNS = 4, 3


@pytest.fixture
def engine(tokenizer):
    words = itertools.cycle(range(5, 11))
    return ScriptedEngine(tokenizer, lambda prompt: [next(words), tokenizer.eos_token_id])


@pytest.fixture(autouse=True)
def members_from_the_first():
    Slow.number = SlowWorkflow.number = itertools.count()


class Slow(TextEnv):
    """Two of the four members of a group hang: one in its first turn, one in its last."""

    inline = True

    def reset(self, data=None):
        self.me, self.turn = next(self.number) % GROUP, 0
        return [{"role": "user", "content": "1"}]

    async def step(self, response):
        self.turn += 1
        if self.turn == {1: 1, 2: TURNS}.get(self.me):
            await hang()
        return TextStep(
            [{"role": "user", "content": "2"}],
            reward=1.0 + self.me * self.turn,
            done=self.turn == TURNS,
        )


class SlowWorkflow:
    """The same by calls of the engine; ``result`` is what it returns of those that do not hang."""

    def __init__(self, result="number"):
        self.result = result

    async def arun_episode(self, engine, data):
        me, prompt = next(self.number) % GROUP, [1, 2]
        for turn in range(TURNS):
            if turn == {1: 0, 2: TURNS - 1}.get(me):
                await hang()
            prompt += (await engine.generate(prompt)).token_ids
        if self.result == "number":
            return 1.0 + me
        reward = torch.arange(TURNS).float()[:, None] + me
        return TensorDict({("next", "reward"): reward, "score": reward + 1}, [TURNS])


# Only the episode's limit bounds what a workflow does by itself.
@pytest.mark.parametrize(
    ("player", "cause"),
    [*((Slow, f"{name}_timeout") for name in NAMES), (SlowWorkflow, "episode_timeout")],
)
def test_it_is_rejected_whoever_plays(engine, player, cause, idle_clock):
    limits = Limits(**{cause: LIMIT})
    options = {"n": GROUP, "group_size": GROUP, "total_episodes": GROUP, "limits": limits}
    keep = {"incomplete_groups": "keep", "cycle": False}
    (batch,), stats = run_of(player, engine, [{}], **options, **keep)
    assert stats[f"rejected/{cause}"] == stats["rejected"] == 2
    assert batch["next", "done"].sum() == 2
    assert "valid" not in batch


MASK = Limits(episode_timeout=LIMIT, on_timeout="mask")
OF_GROUPS = {"group_size": GROUP, "max_concurrency": GROUP, "incomplete_groups": "keep"}


def masked_batch(engine, player):
    return first_batch(player, engine, [{}], n=2 * GROUP, limits=MASK, **OF_GROUPS)


@pytest.mark.parametrize("stored", first_fast([True, False]))
@pytest.mark.parametrize(
    "player",
    [
        pytest.param(SlowWorkflow("entries"), id="entries"),
        pytest.param(SlowWorkflow(), id="workflow", marks=pytest.mark.slow),
        pytest.param(Slow, id="environment", marks=pytest.mark.slow),
    ],
)
def test_masked_it_is_as_if_it_were_not_there(engine, model, player, stored, idle_clock):
    """The advantages, the metrics, the loss and its gradients, of every kind."""
    batch, stats = masked_batch(engine, player)
    # Each group has a member without a turn, which is rejected, one that is masked, and two others.
    assert stats["stop/episode_timeout"] == stats["rejected/episode_timeout"] == 3
    assert (~batch["valid"]).sum() == 3 * (TURNS - 1)
    if stored:
        buffer = buffer_of(1000, EpisodeSampler, replacement=False, batch_size=9)
        buffer.extend(batch)
        batch = buffer.sample()
    whole, others = MergeTurns()(batch), MergeTurns()(batch[batch["valid"]])
    assert (len(whole), len(others)) == (9, 6)
    kept = whole["valid"]
    critic = ValueModel(copy.deepcopy(model.model), 32)
    for kind, aggregation in zip(ADVANTAGE_KINDS, itertools.cycle(AGGREGATIONS), strict=False):
        maker = ExperienceMaker(model, critic=critic, advantage=Advantage(kind, whiten=True))
        with_it, metrics = maker(whole.clone()), maker.metrics
        without = maker(others.clone())
        assert metrics == pytest.approx(maker.metrics, nan_ok=True)
        for key in ("advantage", "returns"):
            torch.testing.assert_close(with_it[key][kept], without[key])
        assert not with_it["advantage"][~kept].any()
        loss, outputs = MultiTurnLoss(model, aggregation=aggregation), []
        for rows in (with_it, without):
            model.zero_grad()
            loss(rows)["loss_objective"].backward()
            outputs.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(outputs[0], outputs[1])


def test_entries_that_a_workflow_did_not_come_to_return_are_blank(engine, idle_clock):
    batch, _ = masked_batch(engine, SlowWorkflow("entries"))
    assert not batch["score"][~batch["valid"]].any()
    assert batch["score"][batch["valid"]].all()
    assert not batch["next", "reward"][~batch["valid"]].any()


def test_all_of_a_batch_may_be_masked(engine, idle_clock):
    class Hangs:
        async def arun_episode(self, engine, data):
            await engine.generate([1, 2])
            await hang()

    batch, _ = first_batch(Hangs(), engine, [{}], n=2, limits=MASK)
    assert batch["stop_reason"] == ["episode_timeout"] * 2
    assert batch["valid"].tolist() == [False] * 2


def test_a_curriculum_is_not_told_of_time_that_ran_out(engine, idle_clock):
    curriculum = Recording()
    first_batch(Slow, engine, curriculum, n=GROUP, limits=MASK, **OF_GROUPS)
    assert {episodes for _, episodes in curriculum.reports} == {2}


def test_rows_say_what_turns_say():
    def turn(prompt, response, done, valid):
        tokens = {"prompt": torch.tensor(prompt), "response": torch.tensor(response)}
        done, valid = torch.tensor([done]), torch.tensor(valid)
        return TensorDict({"tokens": tokens, "next": {"done": done}, "valid": valid})

    turns = [([1, 2], [3], False, True), ([1, 2, 3, 4], [5], True, True), ([6], [7], True, False)]
    batch = lazy_stack([turn(*each) for each in turns])
    assert MergeTurns()(batch)["valid"].tolist() == [True, False]
    assert "valid" not in MergeTurns()(batch.exclude("valid"))
