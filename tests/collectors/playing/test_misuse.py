"""Code that does not do what is asked of it ends the run in its first episode, by name.

What it changes of its own is no misuse.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.collectors.chats import Once
from tests.collectors.runs import collecting, failed_run, first_batch
from torchrl_mt.collectors import Episode
from torchrl_mt.collectors.statistics import episode_counts
from torchrl_mt.envs import TextEnv, TextStep, ToolEnv

USER = {"role": "user", "content": "1"}


def env(step=None, opening=USER):
    methods = {"reset": lambda self, data=None: [opening], "step": lambda self, response: step}
    return type("Env", (Once,), methods)


class Agent:
    def __init__(self, result, asks=True):
        self.result, self.asks = result, asks

    async def run(self, data, *, base_url, api_key, http_client):
        if self.asks:
            await http_client.post("/chat/completions", json={"messages": [USER]})
        return self.result


class Judged(ToolEnv):
    def __init__(self):
        super().__init__([], reward=lambda messages, data: "1")

    async def reset(self, data=None):
        return await super().reset({"messages": [USER]})


MISUSES = [
    (env(TextStep()), "TextStep must have messages, or done=True, got neither from Env.step"),
    (env(opening={"role": "user"}), "got one without content"),
    (env(TextStep([{"role": "user"}])), "got one without content .* from Env.step"),
    (env(TextStep(reward="1", done=True)), r"TextStep.reward must be a number, got str \(1\)"),
    (Judged(), r"TextStep.reward must be a number, got str \(1\) from the reward function"),
    (env("3"), "TextEnv.step must return a TextStep, got str"),
    (Agent("4"), r"a number, a list of numbers or a TensorDict, got str \(4\)"),
    (Agent(1.0, asks=False), "agent must call the engine at least once"),
]


@pytest.mark.parametrize("max_staleness", [None, 1])
@pytest.mark.parametrize(("played", "told"), MISUSES)
def test_it_ends_the_run_at_once(engine, played, told, max_staleness):
    options = {"n": 4, "max_concurrency": 1, "max_staleness": max_staleness}
    _, stats = failed_run(f"An episode was rejected before .*{told}", played, engine, **options)
    assert stats["started"] <= 5


def test_it_rejects_one_episode_where_others_were_judged(engine):
    class Odd(Once):
        def step(self, response):
            return TextStep(reward="1" if self.data["seed"] == 2 else 1.0, done=True)

    batch, stats = first_batch(Odd, engine, n=4, max_concurrency=1)
    assert len(batch) == 4
    assert stats["rejected/TypeError"] == 1


def test_a_finished_collector_says_that_it_yields_nothing(engine, caplog):
    done = env(TextStep(reward=1.0, done=True))
    with collecting(done, engine, n=2, total_episodes=4) as made:
        assert len(list(made)) == 2
        assert "yields nothing" not in caplog.text
        assert list(made) == []
    assert "the collector yields nothing: its total_episodes=4 are all accepted" in caplog.text


def test_many_that_wait_are_one_line(caplog, monkeypatch):
    monkeypatch.setattr(episode_counts, "_LONG", -1.0)
    counts = episode_counts.EpisodeCounts()
    episodes = [Episode({"task_id": k}, traj_id=k) for k in range(128)]
    with ExitStack() as calls:
        for episode in episodes:
            counts.start(episode)
            calls.enter_context(episode.calls.call("environment", "Slow.step"))
        counts.watch()
        counts.watch()
    (line,) = caplog.messages
    assert "for Slow.step for" in line
    assert "the longest of 128 that wait" in line


def test_what_an_environment_changes_later_is_its_own(engine):
    class Changes(TextEnv):
        inline = True

        def reset(self, data):
            data["messages"].append(dict(USER))
            self.said, self.turn = {"role": "user", "content": "1"}, 0
            return data["messages"]

        def step(self, response):
            self.turn += 1
            self.said["content"] += " 2"
            return TextStep([self.said], done=self.turn == 3)

    item = {"messages": [USER]}
    batch, _ = first_batch(Changes, engine, [item], n=4, group_size=4)
    assert item == {"messages": [USER]}
    prompts = batch.get(("tokens", "prompt"), as_list=True)
    assert len({tuple(prompt.tolist()) for prompt in prompts[::3]}) == 1
    heard = [turn[0]["content"] for turn in batch["text"]]
    assert heard[:3] == ["1", "1 2", "1 2 2"]
