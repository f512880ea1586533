"""Cost of collecting: keeping conversations busy, a turn, an episode in flight, a long ledger.

Each part is a table; ``--only`` selects some. Docstrings of the parts say what is measured. Comparisons
with TorchRL's collector are in other files: scheduling, and a real model. On a busy machine, measure
with one thread.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py
    OMP_NUM_THREADS=1 python benchmarks/rollout.py --only flight ledger --rst docs/rollout_costs.inc
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import rollout_model
import rollout_scheduling as scheduling
import torch
from tables import Part, Row, show
from tensordict import TensorDictBase
from torchrl import torchrl_logger

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import Completion, Engine, TransformersEngine
from torchrl_mt.envs import GuessNumber, Message, TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns

WORDS = tuple(f"w{k}" for k in range(1000))


# A turn


class ScriptedEngine:
    """Answers with random words, at once or after a while.

    Args:
        tokenizer: of the words.
        words: what it may say.
        length: how many words an answer has; the end of the turn follows.
        seconds: how long an answer takes, half as much more or less.
    """

    version = 0

    def __init__(
        self, tokenizer: Any, words: Sequence[str], length: int = 1, seconds: float = 0.0
    ) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokenizer.convert_tokens_to_ids(list(words))
        self.length = length
        self.seconds = seconds
        self.rng = random.Random(0)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        if self.seconds:
            await asyncio.sleep(self.seconds * self.rng.uniform(0.5, 1.5))
        answer = [*self.rng.choices(self.tokens, k=self.length), self.tokenizer.eos_token_id]
        return Completion(answer, [-1.0] * len(answer), [0] * len(answer), "stop")

    def update_weights(self, source: Any) -> int:
        return 0

    def close(self) -> None:
        pass


def turn(engine: Engine, episodes: int, concurrency: int, repeats: int) -> tuple[float, float]:
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


def turns(args: argparse.Namespace) -> Iterator[Row]:
    """The collector alone, with an engine that answers at once; and with a tiny model behind it."""
    numbers = [str(n) for n in range(1, 17)]
    words = "guess to higher lower correct invalid"
    model, tokenizer = tiny_chat_model(" ".join([words, *numbers]))
    model.to(args.device)
    contenders: tuple[tuple[str, Callable[[], Engine], tuple[int, ...]], ...] = (
        ("none (collector alone)", lambda: ScriptedEngine(tokenizer, numbers), (64,)),
        ("2 layers of width 64", lambda: TransformersEngine(model, tokenizer), (16, 32, 64, 128)),
    )
    for name, make, widths in contenders:
        for width in widths:
            engine = make()
            rate, length = turn(engine, args.episodes, width, args.repeats)
            engine.close()
            yield name, f"{width}", f"{rate:,.0f}", f"{1e6 / rate:,.0f}", f"{length:.2f}"


# Episodes in flight


class WaitingEnv(TextEnv):
    """Waits, then answers with random words.

    Args:
        turns: turns of an episode.
        length: words of an answer.
        seconds: how long an answer takes, half as much more or less.
    """

    inline = True

    def __init__(self, turns: int, length: int = 1, seconds: float = 0.0) -> None:
        self.turns = self.left = turns
        self.length = length
        self.seconds = seconds
        self.rng = random.Random(0)

    def reset(self, data: Any = None) -> list[Message]:
        self.rng.seed(data["seed"])
        self.left = self.turns
        return [self._said()]

    async def step(self, response: str) -> TextStep:
        if self.seconds:
            await asyncio.sleep(self.seconds * self.rng.uniform(0.5, 1.5))
        self.left -= 1
        return TextStep([self._said()], done=self.left == 0)

    def _said(self) -> Message:
        return {"role": "user", "content": " ".join(self.rng.choices(WORDS, k=self.length))}


def flight(args: argparse.Namespace) -> Iterator[Row]:
    """CPU of the whole process over a run in which model and environment only wait.

    Episodes of 8 turns, all begun at once, with messages and answers of a word. A turn waits for the
    model and then for the environment, so long that 1,500 turns would end every second.
    """
    turns = 8
    tokenizer = tiny_chat_tokenizer(WORDS)
    for episodes in (64, 1_000, 4_000):
        seconds = episodes / 1_500 / 2
        costs = []
        for _ in range(3 if episodes < 1_000 else 1):
            with MultiTurnCollector(
                functools.partial(WaitingEnv, turns, seconds=seconds),
                ScriptedEngine(tokenizer, WORDS, seconds=seconds),
                episodes_per_batch=episodes,
                max_concurrency=episodes,
                total_episodes=episodes,
            ) as collector:
                begin, cpu = time.perf_counter(), time.process_time()
                played = sum(len(batch) for batch in collector)
                cpu = time.process_time() - cpu
                rate = played / (time.perf_counter() - begin)
            costs.append(1e3 * cpu / played)
        yield f"{episodes:,}", f"{rate:,.0f}", f"{statistics.median(costs):.2f}"


# A long ledger


class Workflow:
    """Plays a given number of turns, without an environment or messages."""

    def __init__(self, turns: int, length: int) -> None:
        self.turns = turns
        self.length = length

    async def arun_episode(self, engine: Any, data: Any) -> float:
        prompt: list[int] = []
        for _ in range(self.turns):
            prompt += random.choices(range(4, 1000), k=self.length)
            answer = await engine.generate(prompt)
            prompt += answer.token_ids
        return 0.0


def held_bytes(data: TensorDictBase) -> int:
    """Bytes of a TensorDict's storages, each counted once."""
    blocks: dict[int, int] = {}

    def note(value: torch.Tensor) -> None:
        memory = value.untyped_storage()
        blocks[memory.data_ptr()] = memory.nbytes()

    for name in data.keys(True, True):
        column = data.get(name, as_list=True)
        for value in column if isinstance(column, list) else [column]:
            if isinstance(value, torch.Tensor):
                note(value)
    return sum(blocks.values())


def python_peak(run: Callable[[], object]) -> int:
    """Peak of additional bytes of Python objects during a call."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def ledger(args: argparse.Namespace) -> Iterator[Row]:
    """One episode of 128 turns beside one of 256, each turn of 100 new tokens and 100 sampled.

    Milliseconds are the process's CPU time, the two taking turns, medians. What is held is the memory
    behind the tensors of the batch; the peak is of Python objects meanwhile, without tensors.
    """
    lengths, new = (128, 256), 100
    repeats = 4 * args.repeats
    tokenizer = tiny_chat_tokenizer(WORDS)
    engine = ScriptedEngine(tokenizer, WORDS, length=new - 1)
    merge = MergeTurns(pad_token_id=tokenizer.pad_token_id)
    with ExitStack() as stack:

        def players(make: Callable[[int], Any]) -> list[Callable[[], TensorDictBase]]:
            """What plays an episode of each length."""
            collectors = [
                stack.enter_context(MultiTurnCollector(make(turns), engine, episodes_per_batch=1))
                for turns in lengths
            ]
            return [functools.partial(next, iter(collector)) for collector in collectors]

        play = players(lambda turns: functools.partial(WaitingEnv, turns, length=new))
        yield growth("played in an environment: ms", cpu_ms(repeats, *play), "{:,.1f}")
        yield growth("  peak of Python's bytes", map(python_peak, play))
        episodes = [each() for each in play]
        yield growth("  bytes held", map(held_bytes, episodes))
        play = players(lambda turns: Workflow(turns, new))
        yield growth("played by a workflow: ms", cpu_ms(repeats, *play), "{:,.1f}")
        yield growth("  peak of Python's bytes", map(python_peak, play))
    merged = [functools.partial(merge.forward, episode) for episode in episodes]
    yield growth("MergeTurns: ms", cpu_ms(repeats, *merged), "{:,.1f}")
    yield growth("  peak of Python's bytes", map(python_peak, merged))
    yield growth("  bytes held", (held_bytes(each()) for each in merged))


def growth(name: str, figures: Iterable[float], shown: str = "{:,.0f}") -> Row:
    """One row: the figures of the shorter and of the longer episode, and their ratio."""
    short, long = figures
    return name, shown.format(short), shown.format(long), f"{long / short:.2f}×"


def cpu_ms(repeats: int, *contenders: Callable[[], object]) -> list[float]:
    """Median CPU milliseconds of each; they alternate, so disturbances affect all."""
    times: list[list[float]] = [[] for _ in contenders]
    for k in range(repeats + 1):
        for contender, spent in zip(contenders, times, strict=True):
            begin = time.process_time()
            contender()
            if k:  # the first turn allocates and fills caches
                spent.append(1e3 * (time.process_time() - begin))
    return [statistics.median(spent) for spent in times]


PARTS = {
    "scheduling": Part(
        ("scheduling, 64 at once", "turns/s", "of the ideal", "bound", "ms CPU/turn"),
        (52, 12, 12, 12, 12),
        lambda args: scheduling.rows(args.seconds),
    ),
    "flight": Part(("episodes in flight", "turns/s", "ms CPU/turn"), (40, 30, 30), flight),
    "ledger": Part(("one episode", "128 turns", "256 turns", "ratio"), (52, 18, 18, 12), ledger),
    "engine": Part(
        ("a model", "s", "tokens/s", "faster", "less CPU", "prefill/new"),
        (50, 9, 12, 10, 10, 11),
        lambda args: rollout_model.rows(args.repeats, args.device),
    ),
    "turns": Part(
        ("model", "at once", "turns/s", "us/turn", "turns/episode"), (36, 16, 16, 16, 16), turns
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window of scheduling")
    parser.add_argument("--episodes", type=int, default=256, help="of a batch, with the model")
    parser.add_argument("--repeats", type=int, default=5, help="the median counts")
    parser.add_argument("--device", default="cpu", help="of the model")
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()

    torchrl_logger.setLevel("WARNING")
    torch.manual_seed(0)
    # The libraries' half a million objects: to look through them takes a third of a second, in which
    # nobody runs, and would fall into some windows only.
    gc.collect()
    gc.freeze()
    show([PARTS[name] for name in args.only], args, args.rst)


if __name__ == "__main__":
    main()
