"""A thousand episodes at once: exits, errors, limits of time, updates, groups that are played again."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

import pytest

from tests.collectors.runs import balanced, collecting
from tests.collectors.scripted import TellingEngine
from tests.idle_clock import LIMIT, hang
from tests.tiers import slow
from torchrl_mt.collectors import Limits
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.transforms import MergeTurns

GROUP, TURNS = 2, 3


class Engine(TellingEngine):
    """Answers a few words; fails by chance."""

    def __init__(self, tokenizer, rng):
        super().__init__(rng)
        self.tokenizer = tokenizer
        self.words = [tokenizer(word)["input_ids"][0] for word in "12345678"]
        self.running = self.most_running = 0

    async def generate(self, prompt_ids, *, max_new_tokens=None, **sampling):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(self.rng.randrange(1, 6)):
            await asyncio.sleep(0)
        self.running -= 1
        if self.rng.random() < 0.02:
            raise ConnectionError("the server is gone")
        words = self.rng.choices(self.words, k=self.rng.randrange(4))
        return self.answer(list(prompt_ids), [*words, self.tokenizer.eos_token_id])


class Hard(TextEnv):
    """Raises, exits and hangs by chance."""

    inline = True
    rng = random.Random(1)

    def reset(self, data=None):
        self.left = TURNS
        return [{"role": "user", "content": str(1 + data["id"] % 8)}]

    async def step(self, response):
        chance = self.rng.random()
        if chance < 0.02:
            raise KeyError("broken")
        if chance < 0.04:
            sys.exit(1)
        if chance < 0.05:
            await hang()
        self.left -= 1
        return TextStep([{"role": "user", "content": "1"}], 1.0, done=not self.left)


@pytest.mark.parametrize(
    ("num_items", "on_timeout"), [(160, "reject"), (160, "mask"), slow(800, "mask")]
)
def test_nothing_is_lost_torn_or_doubled(tokenizer, idle_clock, num_items, on_timeout):
    engine, data = Engine(tokenizer, random.Random(0)), [{"id": k} for k in range(num_items)]
    options = {"n": num_items // 2, "group_size": GROUP, "incomplete_groups": "requeue"}
    options |= {"cycle": False, "max_concurrency": 1000, "max_staleness": 3}
    options |= {"limits": Limits(tool_timeout=LIMIT / 2, on_timeout=on_timeout)}
    delivered, groups, masked = Counter(), {}, 0
    with collecting(Hard, engine, data, max_consecutive_failures=10**6, **options) as collector:
        for batch in collector:
            for step in batch.unbind(0):
                log_probs = step["log_probs", "response"].tolist()
                prompt, answer = engine.calls[log_probs[0]]
                assert step["tokens", "prompt"].tolist() == prompt
                assert step["tokens", "response"].tolist() == list(answer.token_ids)
                assert log_probs == answer.log_probs
                assert step["versions", "response"].tolist() == answer.versions
                assert engine.version - min(answer.versions) <= 3
                group = groups.setdefault(int(step["group"]), (step["data"]["id"], set()))
                assert group[0] == step["data"]["id"]
                group[1].add(int(step["collector", "traj_ids"]))
            rows = MergeTurns(pad_token_id=tokenizer.pad_token_id)(batch)
            sampled = rows["log_probs", "full"][rows["masks", "all_assistant_mask"]].tolist()
            assert len(set(sampled)) == len(sampled)
            delivered.update(sampled)
            if on_timeout == "mask":
                masked += int((~rows["valid"]).sum())
            stats = collector.stats()
            assert balanced(stats)
            engine.version += 1
        stats = collector.stats()
    assert max(delivered.values()) == 1
    # Every item was delivered once, with its whole group.
    assert sorted(item for item, _ in groups.values()) == [*range(num_items)]
    assert all(len(members) == GROUP for _, members in groups.values())
    assert stats["accepted"] == num_items * GROUP
    assert stats["running"] == 0
    assert engine.most_running > num_items // 3
    for cause in ("SystemExit", "KeyError", "ConnectionError", "tool_timeout"):
        assert stats[f"rejected/{cause}"] > 0  # one without a turn is rejected either way
    assert (masked > 0) == (on_timeout == "mask")
