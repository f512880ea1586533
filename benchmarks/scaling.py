"""A plan of scaling on paper: where each part runs, what crosses the network, and what saturates first.

Sizes and costs of this library's parts are measured here, on episodes that the collector plays: 5 to 15
turns (10 on average) of 200 sampled and 300 environment tokens, after a prompt of 500. Speeds of GPUs
and networks are stated inputs, not measurements. A small discrete simulation puts them together: slots
play episodes, which then wait in line for the collector's thread, the network and the writer, while the
learner draws rows within a range of rows per episode and sends its weights back.

*Check* compares the simulation with real runs: processes that play and a process that writes. The
engine and the environments only sleep there, or take no time, so that the costs of this library decide.
*Load* is how many processes want a core, these included. *Core* is the part of a core that each player
used. Where it is busy all the time, its costs are divided by that part, as others may use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from scaling_model import (
    ANSWERED,
    GPU_BYTES,
    MEAN_TURNS,
    PROMPT,
    ROW_TOKENS,
    SAMPLED,
    SAMPLED_TOKENS,
    TURNS,
    Costs,
    Plan,
    simulate,
)
from tables import Part, Row, show
from torchrl.data import ReplayBuffer

from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector
from torchrl_mt.compact_pickle import dumps
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer
from torchrl_mt.transforms import MergeTurns

VOCABULARY = 152_000
"""Of the Qwen2.5 family: ids have up to six digits in JSON."""

# ---- episodes that cost nothing but this library's work -------------------------------------------


class SleepingEngine:
    """Answers with the same tokens after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.tokenizer = tiny_chat_tokenizer("yes no")
        token = self.tokenizer.convert_tokens_to_ids("yes")
        self.answer = [token] * (SAMPLED - 1) + [self.tokenizer.eos_token_id]
        self.seconds, self.version = seconds, 0

    async def generate(self, prompt_ids: Any, **sampling: Any) -> Completion:
        await asyncio.sleep(self.seconds)
        return Completion(self.answer, [-1.0] * SAMPLED, [self.version] * SAMPLED, "stop")

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        pass


class Dialogue(TextEnv):
    """As many turns as its item says."""

    inline = True

    def reset(self, data: Any = None) -> list[dict[str, str]]:
        self.left = data
        return [{"role": "user", "content": "no " * PROMPT}]

    def step(self, response: str) -> TextStep:
        self.left -= 1
        return TextStep(
            [{"role": "user", "content": "no " * ANSWERED}], reward=1.0, done=self.left == 0
        )


def collector(turn_seconds: float, slots: int, seed: int) -> MultiTurnCollector:
    """A collector that always plays in ``slots`` slots and gives out batches of half as many."""
    rng = random.Random(seed)
    return MultiTurnCollector(
        Dialogue,
        SleepingEngine(turn_seconds),
        (rng.randint(*TURNS) for _ in itertools.count()),
        episodes_per_batch=slots // 2,
        max_concurrency=slots,
        max_staleness=3,
        options=CollectorOptions(staleness="admission"),
    )


def new_buffer() -> ReplayBuffer:
    return ReplayBuffer(
        storage=EpisodeStorage(20_000, max_episodes=256),
        writer=EpisodeWriter(),
        sampler=EpisodeSampler(),
        transform=MergeTurns(pad_token_id=0),
        batch_size=32,
    )


# ---- what is measured -----------------------------------------------------------------------------


def per_call(function: Callable[[], object], repeats: int = 5) -> float:
    """Median CPU seconds of a call."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def measure() -> tuple[Costs, Any]:
    """Measure costs; return them with a batch of episodes."""
    buffer = new_buffer()
    turns, played, packing, writing = 0, 0.0, 0.0, 0.0
    with collector(0.0, 32, seed=0) as batches:
        end = 0.0
        for number, batch in enumerate(itertools.islice(batches, 32)):
            times = [end, time.process_time()]
            data = packed(batch)
            times.append(time.process_time())
            buffer.extend(unpacked(data))
            times.append(time.process_time())
            if number > 3:  # The first fill caches.
                turns += len(batch)
                played += times[1] - times[0]
                packing += times[2] - times[1]
                writing += times[3] - times[2]
            batches.increment_version()
            end = time.process_time()
    costs = Costs(
        turn=played / turns,
        pack=packing / turns * MEAN_TURNS,
        write=writing / turns * MEAN_TURNS,
        draw=per_call(buffer.sample) / buffer.batch_size,
        episode_bytes=len(data) / len(batch) * MEAN_TURNS,
    )
    return costs, batch


def packed(batch: Any) -> bytes:
    """A batch as bytes. Tensors that share memory, as those of an episode do, are written once."""
    file = io.BytesIO()
    torch.save(batch, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """The batch of :func:`packed`."""
    return torch.load(io.BytesIO(data), weights_only=False)


def sent_over_ray(batch: Any) -> int:
    """Bytes that a collector sends of a batch to a buffer in a Ray actor."""
    structure, memory = dumps(batch)
    return len(structure) + sum(part.data.nbytes for part in memory)


def sizes(args: argparse.Namespace) -> Iterator[Row]:
    """Bytes of an episode in each form."""
    batch, per_episode = args.batch, MEAN_TURNS / len(args.batch)
    storage = EpisodeStorage(2 * len(batch), max_episodes=32)
    buffer = ReplayBuffer(storage=storage, writer=EpisodeWriter())
    for _ in range(4):  # It is full then.
        buffer.extend(batch)
    rows = MergeTurns(pad_token_id=0)(batch)
    row_tokens = int(rows["masks", "all_attention_mask"].sum())
    used = rows["masks", "all_attention_mask"].numel()
    row_bytes = sum(value.nbytes for value in rows.values(True, True) if torch.is_tensor(value))
    rng = random.Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT + 20 * (SAMPLED + ANSWERED))]
    requests = replies = 0
    for turn in range(int(MEAN_TURNS)):
        prompt = ids[: PROMPT + turn * (SAMPLED + ANSWERED)]
        requests += len(json.dumps({"prompt": prompt, "max_tokens": SAMPLED, "logprobs": 1}))
        replies += len(json.dumps(_reply(ids[:SAMPLED])))
    for name, size in (
        ("requests to a completions server (JSON)", requests),
        ("its replies, with log-probabilities (JSON)", replies),
        ("TED from collector to buffer (torch.save)", args.costs.episode_bytes),
        ("the same over Ray", sent_over_ray(batch) * per_episode),
        ("the same with pickle alone", len(pickle.dumps(batch, protocol=5)) * per_episode),
        ("in a full buffer", storage.nbytes * MEAN_TURNS / len(storage)),
        ("rows without padding", row_bytes * row_tokens / used * per_episode),
    ):
        yield name, f"{size / 1e3:,.0f} kB", f"{size / ROW_TOKENS:,.1f}"


def _reply(ids: list[int]) -> dict[str, Any]:
    """A reply in the form of vLLM's completions, for its size."""
    named, log_probs = [f"token_id:{i}" for i in ids], [-0.123456789 for _ in ids]
    top = [{name: value} for name, value in zip(named, log_probs, strict=True)]
    logprobs = {"tokens": named, "token_logprobs": log_probs, "top_logprobs": top}
    return {"choices": [{"text": "word " * len(ids), "token_ids": ids, "logprobs": logprobs}]}


def costs_table(args: argparse.Namespace) -> Iterator[Row]:
    """What one process can do, and how many sampling GPUs that feeds."""
    costs = args.costs
    per_gpu = NODE.tokens_per_gpu
    for name, seconds in (
        ("collector: turns, tokens, records", MEAN_TURNS * costs.turn + costs.pack),
        ("buffer: unpickle and write", costs.write),
        ("buffer: draw a row", costs.draw),
    ):
        tokens = SAMPLED_TOKENS / seconds
        yield name, f"{seconds * 1e3:.1f} ms", f"{1 / seconds:,.0f}", f"{tokens / per_gpu:,.0f}"


# ---- the plans -------------------------------------------------------------------------------------

NODE = Plan("8 GPUs", sampling_gpus=3, learning_gpus=5)
LARGE: dict[str, Any] = {
    "parameters": 32.8e9,
    "cache_bytes": 262_144,
    "gpus_per_engine": 4,
    "slots_per_gpu": 32,
}
PLANS = (
    Plan(
        "1 GPU",
        parameters=1.54e9,
        cache_bytes=28_672,
        shared=True,
        weight_link=GPU_BYTES,
        rows_per_episode=(1.0, 1.0),
    ),
    NODE,
    Plan("8 nodes", sampling_gpus=24, learning_gpus=40, collectors=4, weight_link=25e9, **LARGE),
    Plan(
        "internet",
        sampling_gpus=48,
        learning_gpus=64,
        collectors=12,
        env_seconds=0.7,
        link=0.125e9,
        weight_link=0.125e9,
        overlap=True,
        batch=4096,
        **LARGE,
    ),
)


def plans(args: argparse.Namespace) -> Iterator[Row]:
    """The four plans."""
    for plan in PLANS:
        slots = plan.sampling_gpus * plan.slots_per_gpu
        got = simulate(plan, args.costs, args.simulated, slots=slots)
        first, share = max(got.shares.items(), key=lambda each: each[1])
        yield (
            plan.name,
            f"{plan.parameters / 1e9:.1f} B",
            f"{got.episodes:.1f}",
            f"{got.episodes * SAMPLED_TOKENS:,.0f}",
            f"{got.updates * 3600:,.0f}",
            f"{got.lag:.1f}",
            f"{first} {share:.0%}",
        )


def splits(args: argparse.Namespace) -> Iterator[Row]:
    """How many of 8 GPUs sample."""
    for gpus in range(2, 6):
        plan = replace(NODE, sampling_gpus=gpus, learning_gpus=8 - gpus)
        got = simulate(plan, args.costs, args.simulated, slots=gpus * plan.slots_per_gpu)
        yield (
            f"{gpus} sample, {8 - gpus} learn",
            f"{got.episodes:.1f}",
            f"{got.updates * plan.batch:.1f}",
            f"{got.updates * plan.batch / got.episodes:.1f}",
            f"{got.shares['engine']:.0%}",
            f"{got.shares['learner']:.0%}",
        )


def traffic(args: argparse.Namespace) -> Iterator[Row]:
    """What crosses the network."""
    for plan in PLANS:
        slots = plan.sampling_gpus * plan.slots_per_gpu
        got = simulate(plan, args.costs, args.simulated, slots=slots)
        sent = 2 * plan.parameters
        yield (
            plan.name,
            f"{got.episodes * args.costs.episode_bytes / 1e6:.1f} MB/s",
            f"{sent / 1e9:.1f} GB",
            f"{sent / plan.weight_link:,.2g} s"
            if sent / plan.weight_link < 100
            else f"{sent / plan.weight_link:,.0f} s",
            f"{got.shares['weights']:.0%}",
            f"{got.shares['collector']:.1%}",
            f"{got.shares['writer']:.1%}",
        )


# ---- the check against processes ------------------------------------------------------------------


def play(pipe: Connection, turn_seconds: float, slots: int, seed: int) -> None:
    """Send batches of episodes, each after the CPU seconds so far, until the pipe is closed."""
    torch.set_num_threads(1)
    with collector(turn_seconds, slots, seed) as played:
        for batch in played:
            try:
                pipe.send(time.process_time())
                pipe.send_bytes(packed(batch))
            except OSError:
                return
            played.increment_version()


def run(players: int, turn_seconds: float, slots: int, seconds: float) -> tuple[float, float]:
    """Let processes play, and write here.

    Returns:
        Episodes per second, and the part of a core that each player used.
    """
    context = multiprocessing.get_context("spawn")
    buffer, processes = new_buffer(), {}
    for seed in range(players):
        here, there = context.Pipe(duplex=False)
        arguments = (there, turn_seconds, slots, seed)
        processes[here] = context.Process(target=play, args=arguments, daemon=True)
        processes[here].start()
        there.close()
    batches, used = dict.fromkeys(processes, 0), dict.fromkeys(processes, 0.0)
    begin: float | None = None
    while begin is None or time.perf_counter() - begin < seconds:
        for pipe in wait(list(processes)):
            assert isinstance(pipe, Connection)
            used[pipe] = pipe.recv()
            buffer.extend(unpacked(pipe.recv_bytes()))
            batches[pipe] += 1
        if begin is None and min(batches.values()) > 4:
            begin, first, used_first = time.perf_counter(), sum(batches.values()), {**used}
        last = time.perf_counter()
    span = last - begin
    rate = (sum(batches.values()) - first) * (slots // 2) / span
    for pipe, process in processes.items():
        pipe.close()
        process.join()
    return rate, (sum(used.values()) - sum(used_first.values())) / span / players


def check(args: argparse.Namespace) -> Iterator[Row]:
    """Predicted and measured episodes per second."""
    for players, turn_seconds in ((1, 0.5), (2, 0.5), (1, 0.0), (2, 0.0)):
        slots, costs = 32, args.costs
        plan = replace(IDLE, collectors=players, env_seconds=turn_seconds)
        measured, share = run(players, turn_seconds, slots, args.seconds)
        part = 1.0 if turn_seconds else share  # A machine that others use gives less than a core.
        slowed = replace(costs, turn=costs.turn / part, pack=costs.pack / part)
        expected = simulate(plan, slowed, 200.0, slots=slots * players, learns=False).episodes
        yield (
            f"{players} players, {turn_seconds * 1e3:.0f} ms a turn",
            f"{os.getloadavg()[0]:.0f}",
            f"{share:.0%}",
            f"{expected:.1f}",
            f"{measured:.1f}",
            f"{expected / measured - 1:+.0%}",
        )


IDLE = Plan("check", parameters=1.0, cache_bytes=0.0, sampling_gpus=10**6, slots_per_gpu=1)
"""GPUs that take no time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a real run")
    parser.add_argument("--simulated", type=float, default=20_000.0, help="seconds of a plan")
    parser.add_argument("--rst", type=Path, help="write the tables here too, for the documentation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.costs, args.batch = measure()
    show(
        [
            Part(("form", "an episode", "bytes/token"), (60, 20, 20), sizes),
            Part(("one process", "CPU", "episodes/s", "H100s fed"), (46, 18, 18, 18), costs_table),
            Part(
                ("plan", "model", "episodes/s", "tokens/s", "updates/h", "lag", "busiest"),
                (14, 12, 14, 14, 14, 10, 22),
                plans,
            ),
            Part(
                ("plan", "episodes", "weights", "to send", "link busy", "collectors", "writer"),
                (16, 14, 14, 14, 14, 14, 14),
                traffic,
            ),
            Part(
                ("8 GPUs", "episodes/s", "rows/s", "rows/episode", "engine", "learner"),
                (25, 15, 15, 15, 15, 15),
                splits,
            ),
            Part(
                ("check", "load", "core", "predicted/s", "measured/s", "error"),
                (30, 12, 12, 16, 16, 14),
                check,
            ),
        ],
        args,
        args.rst,
    )


if __name__ == "__main__":
    main()
