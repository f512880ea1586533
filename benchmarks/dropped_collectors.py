"""What collectors leave behind that are made, used and dropped without ``shutdown()``: nothing.

For each kind and ``max_staleness``: threads, open files, processes and memory of this process after a
tenth of the collectors and after all of them.

    OMP_NUM_THREADS=1 python benchmarks/dropped_collectors.py
    OMP_NUM_THREADS=1 python benchmarks/dropped_collectors.py --kinds process --number 50
"""

from __future__ import annotations

import argparse
import gc
import logging
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import psutil
from tables import Part, Row, show

from torchrl_mt.collectors import (
    CollectorOptions,
    MultiProcessCollector,
    MultiTurnCollector,
    RayMultiTurnCollector,
)
from torchrl_mt.engines import Completion, TransformersEngine
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer

WORDS = tuple(map(str, range(1, 17)))
TOKENIZER = tiny_chat_tokenizer(WORDS)


class Agent:
    """Asks once."""

    async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
        request = {"messages": [{"role": "user", "content": "1"}]}
        (await http_client.post("/chat/completions", json=request)).raise_for_status()
        return 1.0


class Workflow:
    """Asks once."""

    async def arun_episode(self, engine: Any, data: Any) -> float:
        await engine.generate([5, 6, 7])
        return 1.0


class Counts(TextEnv):
    """Two turns; says a number."""

    def reset(self, data: Any = None) -> list[Message]:
        self.turn = 0
        return [{"role": "user", "content": "1"}]

    def step(self, response: str) -> TextStep:
        self.turn += 1
        return TextStep([{"role": "user", "content": "2"}], 1.0, done=self.turn == 2)


class Scripted:
    """Answers with one word."""

    def __init__(self) -> None:
        self.tokenizer = TOKENIZER
        self.version = 0

    async def generate(self, prompt_ids: Any, **sampling: Any) -> Completion:
        ids = [5, self.tokenizer.eos_token_id]
        return Completion(ids, [-1.0, -1.0], [self.version] * 2, "stop")

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        pass


def transformers_engine() -> TransformersEngine:
    """An engine with a thread and a copy of its model."""
    model, tokenizer = tiny_chat_model(WORDS)
    return TransformersEngine(model, tokenizer, max_new_tokens=2, share_weights=False)


KINDS = {
    "workflow": partial(MultiTurnCollector, Workflow, Scripted),
    "transformers": partial(MultiTurnCollector, Workflow, transformers_engine),
    "environment": partial(MultiTurnCollector, Counts, Scripted),
    "agent": partial(MultiTurnCollector, Agent, Scripted),
    "env_workers": partial(
        MultiTurnCollector, Counts, Scripted, options=CollectorOptions(env_workers=1)
    ),
    "process": partial(MultiProcessCollector, Counts, Scripted, num_collectors=1),
    "ray": partial(RayMultiTurnCollector, Counts, Scripted, num_collectors=1),
}


def use(make: Any, max_staleness: int | None) -> None:
    """Make a collector, take a batch, update the weights, and drop it."""
    collector = make(episodes_per_batch=4, max_staleness=max_staleness)
    next(iter(collector))
    model = getattr(collector.engine, "model", None)
    collector.update_policy_weights_(None if model is None else model.state_dict())


def left() -> list[int]:
    """Threads, open files, processes and MiB of this process."""
    gc.collect()
    me = psutil.Process()
    children = len(me.children(recursive=True))
    return [threading.active_count(), me.num_fds(), children, me.memory_info().rss // 2**20]


def rows(args: argparse.Namespace) -> Iterable[Row]:
    """One row for each kind and ``max_staleness``."""
    for kind in args.kinds:
        for max_staleness in (None, 0, 1, 2):
            seen = []
            for count in (args.number // 10, args.number - args.number // 10):
                for _ in range(count):
                    use(KINDS[kind], max_staleness)
                seen.append(left())
            changes = (f"{then} → {now}" for then, now in zip(*seen, strict=True))
            yield (f"{kind}, max_staleness={max_staleness}", *changes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS)[:4])
    args = parser.parse_args()
    logging.getLogger("torchrl_mt").setLevel(logging.ERROR)
    header = (f"{args.number} collectors", "threads", "files", "processes", "MiB")
    show([Part(header, (40, 15, 15, 15, 15), rows)], args, None)


if __name__ == "__main__":
    main()
