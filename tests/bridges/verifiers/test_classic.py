"""Environments of the classic API of verifiers, played by the real library in a collector."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

WHY = "needs verifiers>=0.1.14,<0.4, which has the classic API"
vf = pytest.importorskip("verifiers", reason=WHY)
if not hasattr(vf, "load_environment"):
    pytest.skip(WHY, allow_module_level=True)

import datasets  # noqa: E402

from tests.bridges.verifiers.playing import (  # noqa: E402
    NUMBERS,
    adds_one,
    engine_that,
    engine_that_fails,
    play,
    rejected,
    rewards,
    searches,
)
from tests.collectors.conftest import idle_clock, time_to_close  # noqa: E402, F401
from tests.envs.speaking import adds, speaker  # noqa: E402
from tests.idle_clock import hang  # noqa: E402
from torchrl_mt.bridges.verifiers import VerifiersEnv  # noqa: E402
from torchrl_mt.collectors import Limits  # noqa: E402

ROWS = [
    {"question": f"{NUMBERS[k]} plus one", "answer": NUMBERS[k + 1], "info": {"k": k}}
    for k in range(4)
]


async def is_right(completion, answer):
    return float(completion[-1]["content"] == answer)


class Guess(vf.MultiTurnEnv):
    """The model hears ``higher`` until its guess is the answer; each guess costs a tenth."""

    @vf.stop
    async def found(self, state):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        return [vf.types.UserMessage(content="higher")]

    async def add_trajectory_step(self, state, step):
        step["reward"] = -0.1
        await super().add_trajectory_step(state, step)


def env_of(cls=vf.SingleTurnEnv, *rewards, rows=ROWS, **settings):
    rubric = settings.pop("rubric", None) or vf.Rubric(funcs=list(rewards) or [is_right])
    dataset = datasets.Dataset.from_list(rows)
    return cls(dataset=dataset, rubric=rubric, system_prompt="brief", **settings)


def test_an_episode_has_the_librarys_reward_metrics_and_data():
    batch, stats = play(VerifiersEnv(env_of()), group_size=2)
    assert rewards(batch) == [1.0] * 4
    assert stats["forks"] == stats["rejected"] == 0
    for step in batch:
        assert step["info"]["metrics"] == {"is_right": 1.0, "num_turns": 1.0}
        assert step["data"]["answer"] == NUMBERS[step["data"]["info"]["k"] + 1]
        assert [message["role"] for message in step["text"]] == ["system", "user", "assistant"]


def test_rewards_of_turns_and_of_the_rollout():
    env = VerifiersEnv(env_of(Guess))
    batch, stats = play(env, engine_that(searches), env.items()[1:2], episodes=2)
    assert stats["forks"] == 0
    assert rewards(batch) == pytest.approx([-0.1, -0.1, 0.9] * 2)
    env = VerifiersEnv(env_of(Guess), reward=lambda output: output["reward"] * 3)
    batch, _ = play(env, engine_that(searches), env.items()[1:2], episodes=1)
    assert rewards(batch) == [0.0, 0.0, 3.0]


def test_many_at_once_do_not_mix():
    engine = engine_that(adds_one)
    batch, _ = play(VerifiersEnv(env_of()), engine, episodes=32, max_concurrency=16)
    assert rewards(batch) == [1.0] * 32
    assert engine.most_running > 1


def test_an_installed_environment_and_seeds(monkeypatch):
    module = ModuleType("sums_for_tests")
    module.load_environment = lambda factor: env_of(
        vf.SingleTurnEnv, lambda completion, answer: factor
    )
    monkeypatch.setitem(sys.modules, "sums_for_tests", module)
    env = VerifiersEnv("sums-for-tests", config={"factor": 7.0}, num_tasks=3)
    assert [item["answer"] for item in env.items()] == NUMBERS[1:4]
    batch, _ = play(env, data=None)
    assert rewards(batch) == [7.0] * 4
    assert [turn[1]["content"][:4] for turn in batch["text"]] == ["zero", "one ", "two ", "zero"]


def test_tools_are_called():
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: a number
            b: a number
        """
        return a + b

    env = env_of(vf.ToolEnv, tools=[add], rows=[{"question": "3 + 4?", "answer": "7"}])
    batch, stats = play(VerifiersEnv(env), speaker(adds), episodes=2)
    assert rewards(batch) == [0.0, 1.0] * 2
    assert stats["forks"] == 0


def fails(completion):
    raise KeyError("answer")


RIGHT_AND_FAILING = [vf.Rubric([is_right]), vf.Rubric([fails])]


class Crashes(Guess):
    async def env_response(self, messages, state, **kwargs):
        raise vf.ToolError("the board is gone")


@pytest.mark.parametrize(
    ("env", "cause", "match"),
    [
        (lambda: env_of(vf.SingleTurnEnv, fails), "KeyError", "answer"),
        (lambda: env_of(rubric=vf.RubricGroup(RIGHT_AND_FAILING)), "KeyError", "answer"),
        (lambda: vf.EnvGroup([env_of(vf.SingleTurnEnv, fails)] * 2), "KeyError", "answer"),
        (lambda: env_of(Crashes), "ToolError", "the board is gone"),
    ],
)
def test_an_error_is_the_cause_and_no_reward(env, cause, match):
    rejected(VerifiersEnv(env()), cause, match, engine=engine_that(lambda words: "zero"))


def test_an_error_of_the_engine_is_the_cause():
    env = VerifiersEnv(env_of())
    rejected(env, "OSError", "the cable is out", engine=engine_that_fails())


def test_a_time_limit_of_the_environment_is_no_reward(idle_clock):  # noqa: F811
    class Hangs(Guess):
        async def env_response(self, messages, state, **kwargs):
            await hang()

    env, engine = env_of(Hangs, timeout_seconds=36_000.0), engine_that(lambda words: "zero")
    rejected(VerifiersEnv(env), "TimeoutError", "timeout_seconds", engine=engine)


def test_a_limit_ends_the_game_and_what_was_played_counts():
    env = VerifiersEnv(env_of(Guess, lambda completion: 5.0))
    limits = Limits(max_turns=2)
    batch, stats = play(env, engine_that(searches), env.items()[3:4], episodes=1, limits=limits)
    assert rewards(batch) == pytest.approx([-0.1, 4.9])
    assert batch["next", "truncated"].flatten().tolist() == [False, True]
    assert stats["stop/max_turns"] == 1


def of_a_group(states):
    return [1.0 for _ in states]


@pytest.mark.parametrize(
    ("env", "error", "match"),
    [
        (lambda: 7, TypeError, "objects of verifiers.v1 need release 0.4"),
        (lambda: env_of(vf.SingleTurnEnv, of_a_group), ValueError, "rewards of single rollouts"),
    ],
)
def test_what_cannot_be_played_is_named(env, error, match):
    with pytest.raises(error, match=match):
        VerifiersEnv(env())
