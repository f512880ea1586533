"""What a turn costs: the collector alone, and with a tiny model behind it.

The collector's own cost is measured with an engine that answers at once; the rest is the model's.

    python benchmarks/rollout.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import Completion, Engine, TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.testing import tiny_chat_model


class InstantEngine:
    """Guesses at random without a model."""

    version = 0

    def __init__(self, tokenizer: Any, numbers: int) -> None:
        self.tokenizer = tokenizer
        self.numbers = tokenizer.convert_tokens_to_ids([str(n) for n in range(1, numbers + 1)])
        self.rng = random.Random(0)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        answer = [self.rng.choice(self.numbers), self.tokenizer.eos_token_id]
        return Completion(answer, [-1.0, 0.0], [0, 0], "stop")

    def update_weights(self, source: Any) -> int:
        return 0

    def close(self) -> None:
        pass


def measure(engine: Engine, episodes: int, concurrency: int, repeats: int) -> tuple[float, float]:
    """Median turns a second, and turns an episode, over batches of ``episodes``."""
    rates = []
    with MultiTurnCollector(
        GuessNumber(16, turns=5),
        engine,
        episodes_per_batch=episodes,
        max_concurrency=concurrency,
        limits=Limits(max_turns=5, max_response_tokens=2),
    ) as collector:
        batches = iter(collector)
        next(batches)  # the first batch allocates
        for _ in range(repeats):
            begin = time.perf_counter()
            turns = len(next(batches))
            rates.append(turns / (time.perf_counter() - begin))
    return statistics.median(rates), turns / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a batch")
    parser.add_argument("--repeats", type=int, default=5, help="batches; the median counts")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    words = "guess to higher lower correct invalid"
    model, tokenizer = tiny_chat_model([*words.split(), *map(str, range(1, 17))])
    model.to(args.device)
    print(f"{'engine':<24}{'concurrency':>12}{'turns/s':>10}{'us/turn':>10}{'turns/episode':>15}")
    for name, make, widths in (
        ("none (collector alone)", lambda: InstantEngine(tokenizer, 16), (64,)),
        ("2 layers of width 64", lambda: TransformersEngine(model, tokenizer), (16, 32, 64, 128)),
    ):
        for width in widths:
            engine = make()
            rate, length = measure(engine, args.episodes, width, args.repeats)
            engine.close()
            print(f"{name:<24}{width:>12}{rate:>10.0f}{1e6 / rate:>10.0f}{length:>15.2f}")


if __name__ == "__main__":
    main()
