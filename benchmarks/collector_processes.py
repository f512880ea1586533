"""What collectors with workers gain and cost, beside one process.

*An environment that computes* holds the interpreter's lock for 5 ms a step, in episodes of 4 steps, so
one process plays them one after the other. The engine answers at once. CPU is that of the collector's
own process.

*An episode's way* is that of a free environment: what an episode costs the collector's process and its
worker together, beside one process, and the bytes of its record for each token that was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tables import Part, Row, show

from torchrl_mt.collectors import (
    CollectorOptions,
    Episode,
    MultiProcessCollector,
    MultiTurnCollector,
    RayMultiTurnCollector,
    Turn,
)
from torchrl_mt.collectors.distributed.messages import Played
from torchrl_mt.collectors.prompt import Prompt
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.processes import answer
from torchrl_mt.testing import tiny_chat_tokenizer

STEPS, STEP_SECONDS = 4, 0.005
ANSWER_TOKENS = 16


class Computes(TextEnv):
    """Holds the interpreter's lock for some seconds of CPU a step."""

    inline = True
    seconds = STEP_SECONDS

    def reset(self, data: Any = None) -> list[dict[str, str]]:
        self.turn = 0
        return [{"role": "user", "content": "1"}]

    def step(self, response: str) -> TextStep:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        self.turn += 1
        return TextStep([{"role": "user", "content": "2"}], 1.0, self.turn == STEPS)


class Free(Computes):
    """Costs nothing."""

    seconds = 0.0


class Answers:
    """An engine that answers at once."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer(list(map(str, range(1, 9))))
        self.version = 0

    async def generate(self, prompt_ids: Sequence[int], **sampling: Any) -> Completion:
        await asyncio.sleep(0)
        ids = [*[5] * (ANSWER_TOKENS - 1), self.tokenizer.eos_token_id]
        return Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop")

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        pass


def contenders(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    yield "one process", lambda env, **options: MultiTurnCollector(env, Answers(), **options)
    makers: dict[str, Any] = {"process": MultiProcessCollector, "ray": RayMultiTurnCollector}
    for backend in args.backends:
        for number in args.num_collectors:
            yield (
                f"{number} × {backend}",
                lambda env, make=makers[backend], number=number, **options: make(
                    env, Answers, num_collectors=number, **options
                ),
            )


def measure(make: Any, env: type[TextEnv], seconds: float) -> tuple[float, float]:
    """Episodes per second after a first batch, and ms of CPU that each costs the collector's process."""
    options = {"episodes_per_batch": 64, "group_size": 4, "max_staleness": 4}
    with make(env, options=CollectorOptions(staleness="admission"), **options) as collector:
        batches = iter(collector)
        next(batches)
        begin, cpu, played = time.perf_counter(), time.process_time(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            next(batches)
            collector.increment_version()  # as after training, so that all are always busy
            played += 64
        return played / passed, (time.process_time() - cpu) / played * 1e3


def computing(args: argparse.Namespace) -> Iterator[Row]:
    first = None
    for name, make in contenders(args):
        rate, cpu = measure(make, Computes, args.seconds)
        first = first or rate
        yield name, f"{rate:,.1f}", f"{rate / first:.2f}×", f"{cpu:.2f}"


def free(args: argparse.Namespace) -> Iterator[Row]:
    for name, make in contenders(args):
        rate, cpu = measure(make, Free, args.seconds)
        yield name, f"{rate:,.0f}", f"{1e3 / rate:.2f}", f"{cpu:.2f}"


def records(args: argparse.Namespace) -> Iterator[Row]:
    for turns, tokens in ((4, 16), (16, 256), (64, 256)):
        line: list[int] = []
        played: list[Turn] = []
        for _ in range(turns):
            line += range(100_000, 100_000 + tokens)
            sampled = list(range(50_000, 50_000 + tokens))
            answered = Completion(sampled, [-0.1 * k for k in sampled], [3] * tokens, "stop")
            played.append(Turn(Prompt(line, len(line)), answered))
            line += sampled
        made = partial(answer, Played.of(Episode({}, turns=played), None))
        size = len(made()[1])
        begin = time.perf_counter()
        for _ in range(20):
            made()
        ms = (time.perf_counter() - begin) / 20 * 1e3
        name = f"{turns} turns of {tokens} + {tokens} tokens"
        yield name, f"{size:,}", f"{size / (turns * tokens):.1f}", f"{ms:.2f}"


PARTS = {
    "computing": Part(
        ("an environment that computes", "episodes/s", "faster", "ms CPU here"),
        (40, 20, 20, 20),
        computing,
    ),
    "free": Part(
        ("an environment that is free", "episodes/s", "ms/episode", "ms CPU here"),
        (40, 20, 20, 20),
        free,
    ),
    "records": Part(
        ("the record of an episode", "bytes", "bytes/sampled", "ms to pickle"),
        (40, 20, 20, 20),
        records,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--backends", nargs="+", choices=("process", "ray"), default=["process"])
    parser.add_argument("--num-collectors", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()
    show([PARTS[name] for name in args.only], args, args.rst)


if __name__ == "__main__":
    main()
