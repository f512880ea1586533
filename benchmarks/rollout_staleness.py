"""Cost of a staleness limit (``max_staleness``) when a few episodes take long.

Nothing is computed: model and environments sleep. An episode has 4 turns, of 10 ms of the model each.
The time of its environment is drawn for the whole episode from a log-normal distribution with a median
of 40 ms and sigma 1.5 (mean 123 ms, one in a hundred above 1.3 s). A batch has 32 episodes; as many run
at once as ``max_staleness`` admits. Each batch is trained on for 50 ms, then the weights have a new
version.

*Delivered* is episodes per second. *Of admission's* is its ratio to the same run with
``staleness="admission"``, which rejects nothing. *Rejected* is the share of started episodes that were
rejected as stale, as soon as they were certain to be late. *Oldest* is the age of the oldest delivered
token, in versions. *Slow ones* is the share of delivered episodes whose environment takes more than 0.5
s; of all episodes it is 4.6 %. Rejecting late episodes must not lose the slow ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import Part, Row, show

from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector
from torchrl_mt.engines import Completion
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer

TURNS, TOKENS = 4, 16
MODEL_SECONDS, TRAIN_SECONDS = 0.010, 0.050
ENV_MEDIAN, SLOW_SECONDS = 0.040, 0.5
BATCH = 32


def env_seconds(episode: int, sigma: float) -> float:
    """Total seconds of the environment in an episode."""
    return random.Random(episode).lognormvariate(math.log(ENV_MEDIAN), sigma)


class SleepingEngine:
    """Answers every prompt with the same tokens."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer("8 guess higher")
        token = self.tokenizer.convert_tokens_to_ids("8")
        self.answer = [token] * (TOKENS - 1) + [self.tokenizer.eos_token_id]
        self.version = 0

    async def generate(
        self, prompt_ids: Any, *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        version = self.version
        await asyncio.sleep(MODEL_SECONDS)
        return Completion(self.answer, [-1.0] * TOKENS, [version] * TOKENS, "stop")

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        pass


class HeavyTailed(TextEnv):
    """Sleeps for a time that varies widely between episodes."""

    async def reset(self, data: Any = None) -> list[Message]:
        self.seconds, self.left = data / TURNS, TURNS
        return [{"role": "user", "content": "guess"}]

    async def step(self, response: str) -> TextStep:
        await asyncio.sleep(self.seconds)
        self.left -= 1
        return TextStep([{"role": "user", "content": "higher"}], done=self.left == 0)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """One row per staleness limit and rule."""
    for max_staleness in args.max_staleness:
        reference = math.nan
        for rule in ("admission", "delivery"):
            engine = SleepingEngine()
            ages: list[float] = []
            slow = 0
            with MultiTurnCollector(
                HeavyTailed,
                engine,
                (env_seconds(k, args.sigma) for k in itertools.count()),
                episodes_per_batch=BATCH,
                max_concurrency=(max_staleness + 1) * BATCH,
                max_staleness=max_staleness,
                options=CollectorOptions(staleness=rule),
            ) as collector:
                begin = time.perf_counter()
                for batch in collector:
                    ages.append(collector.stats()["staleness/max"])
                    ends = batch["next", "done"].flatten().tolist()
                    seconds = [x for x, end in zip(batch["data"], ends, strict=True) if end]
                    slow += sum(x > SLOW_SECONDS for x in seconds)
                    time.sleep(TRAIN_SECONDS)
                    collector.update_policy_weights_()
                    if time.perf_counter() - begin > args.seconds:
                        break
                rate = collector.stats()["accepted"] / (time.perf_counter() - begin)
                stats = collector.stats()
            reference = rate if rule == "admission" else reference
            yield (
                f"{rule}, max_staleness={max_staleness}",
                f"{rate:,.0f}",
                f"{rate / reference:.0%}",
                f"{stats.get('rejected/stale', 0) / stats['started']:.1%}",
                f"{max(ages):.0f}",
                f"{slow / stats['accepted']:.1%}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sigma", type=float, default=1.5, help="of the environments' seconds")
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 3, 7])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    parser.add_argument("--rst", type=Path, help="write the table here too, for the documentation")
    args = parser.parse_args()
    header = ("rule", "delivered/s", "of admission's", "rejected", "oldest", "slow ones")
    show([Part(header, (40, 13, 15, 12, 10, 10), rows)], args, args.rst)


if __name__ == "__main__":
    main()
