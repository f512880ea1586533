"""Questions about numbers in words, models that answer them by a rule, and collectors of both."""

from __future__ import annotations

import pytest

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.testing import tiny_chat_tokenizer

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOKENIZER = tiny_chat_tokenizer(
    [*NUMBERS, "plus", "higher", "lower", "brief"], extra_roles=["system"]
)


def engine_that(answers):
    """An engine that says ``answers(words)`` of the words it sees."""

    def rule(prompt):
        words = TOKENIZER.decode(prompt).replace("<end>", " ").replace(">", "> ").split()
        return [*TOKENIZER(answers(words))["input_ids"], TOKENIZER.eos_token_id]

    return ScriptedEngine(TOKENIZER, rule)


def adds_one(words):
    """The answer to ``k plus one``, the first question of the dialogue."""
    return NUMBERS[NUMBERS.index(words[words.index("plus") - 1]) + 1]


def searches(words):
    """A guess that goes up from zero as it hears to."""
    return NUMBERS[words.count("higher")]


def engine_that_fails():
    engine = engine_that(adds_one)

    async def fail(*args, **kwargs):
        raise OSError("the cable is out")

    engine.generate = fail
    return engine


def play(env, engine=None, data="items", episodes=4, **options):
    """The batch of a number of episodes of all items or of others, and the collector's counts."""
    engine = engine or engine_that(adds_one)
    data = env.items() if data == "items" else data
    options = {"max_consecutive_failures": 1, "total_episodes": episodes, **options}
    with MultiTurnCollector(env, engine, data, episodes_per_batch=episodes, **options) as collector:
        (batch,) = collector
        return batch, collector.stats()


def rewards(batch):
    return batch["next", "reward"].flatten().tolist()


def rejected(env, cause, match, **options):
    """Check that an episode is rejected for a cause, with such a message."""
    with pytest.raises(RuntimeError, match=rf"the last for {cause}: .*{match}"):
        play(env, **options)
