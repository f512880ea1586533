"""Games that a scripted player plays, as the collector yields them."""

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.envs import GuessNumber


def played(tokenizer, guesses, numbers):
    """The episodes of games about these numbers, one after the other; the player guesses in turn."""
    left = iter(guesses)
    engine = ScriptedEngine(tokenizer, lambda prompt: tokenizer(next(left) + "<end>")["input_ids"])
    with MultiTurnCollector(
        *(GuessNumber(16, 5), engine, [{"number": n} for n in numbers]),
        episodes_per_batch=len(numbers),
        total_episodes=len(numbers),
        max_concurrency=1,
    ) as collector:
        (batch,) = collector
    return batch
