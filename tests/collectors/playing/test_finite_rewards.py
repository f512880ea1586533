"""No reward that is not finite reaches a batch: its episode fails like any other."""

from __future__ import annotations

import asyncio
import math
import re
from fractions import Fraction

import pytest
import torch
from torchrl.envs import Transform
from torchrl.envs.llm import ChatEnv

from tests.collectors.runs import collecting, failed_run, first_batch, played
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import first_fast
from torchrl_mt.envs import TextEnv, TextStep

NOT_FINITE = [
    *map(float, ("nan", "inf", "-inf")),
    1e39,  # float32, in which rewards are kept, has no such number
    torch.tensor([float("nan")]),
]
TOO_LARGE = [10**40, 10**400, -(10**5000), Fraction(-(10**400), 3)]  # for float, too, most of them
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def engine(tokenizer):
    ids = tokenizer("8<end>")["input_ids"]
    return ScriptedEngine(tokenizer, lambda prompt: ids)


class Pays(TextEnv):
    """Two turns, with the rewards of its data."""

    inline = True

    def reset(self, data=None):
        self.rewards = list(data["rewards"])
        return [{"role": "user", "content": "guess"}]

    def step(self, response):
        reward = self.rewards.pop(0)
        return TextStep([{"role": "user", "content": "higher"}], reward, not self.rewards)


class PaysInThread(Pays):
    inline = False


class PaysAsync(Pays):
    async def step(self, response):
        await asyncio.sleep(0)
        return super().step(response)


def check_refused(message, env, engine, data):
    """Its episodes are rejected by this error, and by nothing else."""
    cause, stats = failed_run(message, env, engine, data)
    assert isinstance(cause, ValueError)
    assert stats["rejected/ValueError"] == stats["rejected"] > 0


@pytest.mark.parametrize("env", first_fast([PaysInThread, Pays, PaysAsync]))
@pytest.mark.parametrize("bad", NOT_FINITE, ids=str)
def test_an_environments_reward_is_refused_and_both_are_named(engine, env, bad):
    message = re.escape(f"finite, as float32, got {float(bad)} from {env.__name__}.step")
    check_refused(message, env, engine, [{"rewards": [0.0, bad]}])


class Returns:
    """A workflow of one turn."""

    def __init__(self, result):
        self.result = result

    async def arun_episode(self, engine, data):
        await engine.generate([1])
        return self.result


@pytest.mark.parametrize("bad", TOO_LARGE, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("kind", ["step", "number", "list"])
def test_a_number_too_large_for_any_float_is_one_that_is_not_finite(engine, bad, kind):
    env = {"step": Pays, "number": Returns(bad), "list": Returns([bad])}[kind]
    message = r"finite.*, as float32, got (-?inf|1e\+40) "
    check_refused(message, env, engine, [{"rewards": [bad]}])


def test_all_that_float32_holds_is_a_reward(engine):
    # The second is above the first, and the same as float32.
    rewards = [LARGEST, 3.4028235e38, -LARGEST, -3.4028235e38, 0.0, -0.0, 1e-45]
    batch, _ = first_batch(Pays, engine, [{"rewards": rewards}])
    assert batch["next", "reward"].flatten().tolist() == torch.tensor(rewards).tolist()


def test_the_episode_is_played_again_then_replaced_as_after_any_failure(engine):
    plays: dict[int, int] = {}

    class SometimesPays(Pays):
        """Item 1 fails once, item 2 always."""

        def reset(self, data=None):
            k = data["k"]
            plays[k] = plays.get(k, 0) + 1
            fails = k == 2 or (k == 1 and plays[k] == 1)
            return super().reset({"rewards": [1.0, math.nan if fails else k]})

    data = [{"k": k} for k in range(6)]
    options = {"total_episodes": 4, "max_retries": 1, "max_concurrency": 1}
    with collecting(SometimesPays, engine, data, n=4, **options) as made:
        (batch,) = made
        evaluated = made.evaluate(data)
    assert played(batch)[::2] == [0, 1, 3, 4]
    assert batch["next", "reward"].isfinite().all()
    stats = made.stats()
    assert (stats["accepted"], stats["rejected"], stats["rejected/ValueError"]) == (4, 3, 3)
    assert stats["started"] == 7
    assert played(evaluated)[::2] == [0, 1, 3, 4, 5]
    assert stats["eval/rejected/ValueError"] == 2


class Rewards(Transform):
    """A reward transform of TorchRL's kind."""

    def _step(self, tensordict, next_tensordict):
        next_tensordict["reward"] = torch.tensor([[float("nan")]])
        next_tensordict["done"] = next_tensordict["terminated"] = torch.ones(1, 1, dtype=torch.bool)
        return next_tensordict


def test_a_torchrl_environments_reward_is_refused(engine):
    message = r"reward must be finite.* got nan from ChatEnvAdapter"
    make = lambda: ChatEnv().append_transform(Rewards())  # noqa: E731
    check_refused(message, make, engine, [{"query": "guess"}])
