"""What every environment promises, whatever is played in it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.reward import GSM8KRewardParser

from torchrl_mt.envs import Arithmetic, ChatEnvAdapter, GuessNumber, TextEnv


@dataclass(frozen=True)
class Case:
    """An environment, an episode's data, and how to play in it."""

    make: Callable[..., TextEnv]
    data: Any
    goes_on: str
    """A response that the environment answers."""
    ends: str
    """The response that solves the episode."""
    refused: Any
    """Data that is refused."""


def rewarded_chat():
    return ChatEnvAdapter(lambda: ChatEnv().append_transform(GSM8KRewardParser()))


SUM, CHAT = {"expression": "(3 + 4) * 12"}, {"query": "3 + 4?", "answer": "#### 7"}
TOO_LARGE = {"expression": "1 / 0"}
CASES = {
    "GuessNumber": Case(GuessNumber, {"number": 7}, "8", "7", {"number": 0}),
    "Arithmetic": Case(Arithmetic, SUM, "<calc>3 + 4</calc>", "<answer>84</answer>", TOO_LARGE),
    "ChatEnvAdapter": Case(rewarded_chat, CHAT, "hm", "<answer>7</answer>", 3),
}


GAMES = {"GuessNumber": GuessNumber, "Arithmetic": Arithmetic}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)


@pytest.fixture
def env(case):
    made = case.make()
    yield made
    made.close()


@each_case
def test_the_solution_ends_the_episode_with_a_reward_of_one(case, env):
    opening = env.reset(case.data)
    assert [message["role"] for message in opening] == ["user"]
    step = env.step(case.goes_on)
    assert (step.reward, step.done, step.truncated) == (0.0, False, False)
    step = env.step(case.ends)
    assert (step.reward, step.terminated) == (1.0, True)


@each_case
def test_a_step_without_an_episode_is_refused(case, env):
    with pytest.raises(RuntimeError, match=r"\.step was called with no episode .* reset first\.$"):
        env.step(case.ends)
    env.reset(case.data)
    env.step(case.ends)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(case.ends)
    env.reset(case.data)
    assert env.step(case.ends).done


@each_case
def test_a_refused_reset_changes_nothing(case, env):
    env.reset(case.data)
    with pytest.raises((TypeError, ValueError)):
        env.reset(case.refused)
    assert env.step(case.ends).reward == 1.0


@each_case
def test_a_copy_plays_an_episode_of_its_own(case, env):
    other = copy.deepcopy(env)
    env.reset(case.data)
    other.reset(case.data)
    assert env.step(case.ends).done
    assert not other.step(case.goes_on).done
    other.close()


def solution(env, data):
    """What the model is to find."""
    env.reset(data)
    return env._solution


@each_game
def test_data_decides_the_task(game):
    assert len({solution(game(), {"seed": 5}) for _ in range(5)}) == 1
    assert len({solution(game(), {"seed": seed}) for seed in range(50)}) > 8
    for data in (None, {}, {"prompt": "x"}, "x"):
        env, again = game(seed=1), game(seed=1)
        drawn = [solution(env, data) for _ in range(50)]
        assert len(set(drawn)) > 8
        assert drawn == [solution(again, data) for _ in range(50)]


@each_game
def test_data_is_drawn_by_seed(game):
    items = list(game().data(40, seed=3))
    assert len(items) == 40
    endless = game().data(seed=3)
    assert items == [next(endless) for _ in range(40)]
    assert items != list(game().data(40, seed=4))


@each_game
def test_the_global_generator_is_left_alone(game):
    state = random.getstate()
    env = game(seed=None)
    env.reset()
    list(env.data(5))
    assert random.getstate() == state


@each_game
def test_a_collector_may_call_a_game_on_its_event_loop(game):
    assert game.inline
    assert not TextEnv.inline
