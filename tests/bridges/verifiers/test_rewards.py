"""Whose turns get the rewards of ``verifiers.v1``, with stand-ins for the library's records."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_mt.bridges.verifiers.v1 import V1Env


def trace(agent, reward, trainable=True):
    return SimpleNamespace(
        id=agent,
        agent=SimpleNamespace(name=agent, trainable=trainable),
        reward=reward,
        rewards={},
        metrics={},
        stop_condition=None,
        info={},
    )


def entered(traces, completions):
    """The rewards, and the infos of the turns."""
    ids = [id for of_trace in completions.values() for id in of_trace]
    turns = [SimpleNamespace(info=None) for _ in ids]
    session = SimpleNamespace(completion_ids=ids, turns=lambda: turns)
    calls = SimpleNamespace(completions=completions)
    env = object.__new__(V1Env)
    rewards = env._enter(SimpleNamespace(traces=traces), calls, session)
    return rewards, [turn.info for turn in turns]


def test_each_agents_last_turn_has_its_reward():
    rewards, infos = entered(
        [trace("solver", 0.25), trace("judge", 1.0), trace("user", 9.0, trainable=False)],
        {"solver": ["c1", "c2"], "judge": ["c3"]},
    )
    assert rewards == {"c2": 0.25, "c3": 1.0}
    assert [info and info["agent"] for info in infos] == [None, "solver", "judge"]
    assert "rewards_without_turns" not in infos[2]


def test_an_agent_without_a_turn_gives_its_reward_to_no_other():
    traces = [trace("solver", 0.25), trace("judge", 1.0), trace("judge", 2.0)]
    rewards, infos = entered(traces, {"solver": ["c1", "c2"]})
    assert rewards == {"c2": 0.25}
    assert infos[0] is None
    assert infos[1]["agent"] == "solver"
    assert infos[1]["rewards_without_turns"] == {"judge": 3.0}


@pytest.mark.parametrize("traces", [[], [trace("solver", 0.25)]])
def test_an_episode_without_a_turn_is_named(traces):
    with pytest.raises(RuntimeError, match=r"ended without a reply of the model\.$"):
        entered(traces, {})
