"""A discrete simulation of players, a buffer and a learner on GPUs, for ``scaling.py``.

Slots play episodes at the speed of their engine and environment. Episodes then wait in line for the
thread of their collector, the network and the writer of the buffer. The learner draws batches of rows
within a range of rows per episode, and sends weights back after each.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["Costs", "Outcome", "Plan", "simulate"]

TURNS, SAMPLED, ANSWERED, PROMPT = (5, 15), 200, 300, 500
"""Of an episode: the range of turns; tokens of a response, of an answer to it, and of the prompt."""
MEAN_TURNS = sum(TURNS) / 2
SAMPLED_TOKENS = MEAN_TURNS * SAMPLED
ROW_TOKENS = PROMPT + SAMPLED_TOKENS + (MEAN_TURNS - 1) * ANSWERED

FLOPS, GPU_BYTES = 989e12 * 0.4, 3.35e12 * 0.6
"""Of an H100 SXM (NVIDIA's data sheet: 989 TFLOP/s in bf16, 3.35 TB/s), used to 40 % and 60 %."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds and bytes, measured on this machine."""

    turn: float
    """Of the collector's thread, per turn."""
    pack: float
    """Pickling, per episode."""
    write: float
    """Unpickling and writing to the buffer, per episode."""
    draw: float
    """Drawing a row, per row."""
    episode_bytes: float
    """Pickled."""


@dataclass(frozen=True)
class Plan:
    """Who does what. Times in seconds, rates per second."""

    name: str
    parameters: float = 7.6e9
    cache_bytes: float = 57_344
    """Key-value cache, per token."""
    sampling_gpus: int = 1
    learning_gpus: int = 1
    shared: bool = False
    """Sampling and learning take turns on the same GPUs."""
    gpus_per_engine: int = 1
    slots_per_gpu: int = 64
    """Episodes that play at once."""
    collectors: int = 1
    env_seconds: float = 0.5
    """Per turn, with the latency of the network."""
    link: float = 25e9
    """Bytes per second from a collector to the buffer."""
    weight_link: float = 450e9
    """Bytes per second from the learner to an engine."""
    overlap: bool = False
    """Engines sample while new weights come."""
    batch: int = 256
    """Rows per update."""
    rows_per_episode: tuple[float, float] = (1.0, 2.0)
    """``SampleRatio``."""

    @property
    def tokens_per_gpu(self) -> float:
        """Sampled tokens per second: reading weights and caches, then computing what is read new."""
        context = PROMPT + MEAN_TURNS / 2 * (SAMPLED + ANSWERED)
        read = (
            2 * self.parameters / self.gpus_per_engine
            + self.slots_per_gpu * context * self.cache_bytes
        )
        compute = 2 * self.parameters * (1 + ANSWERED / SAMPLED) / FLOPS
        return 1 / (read / GPU_BYTES / self.slots_per_gpu + compute)

    @property
    def learned_tokens(self) -> float:
        """Row tokens per second: 6 operations per parameter (Kaplan et al., 2020), 2 recomputed."""
        return self.learning_gpus * FLOPS / (8 * self.parameters)


@dataclass
class Server:
    """Works off jobs in the order in which they come."""

    busy: float = 0.0
    """Seconds of all jobs."""
    free: float = 0.0
    """When it is done with all jobs that came."""

    def serve(self, now: float, seconds: float) -> float:
        """Time at which a job that comes now is done."""
        end = max(now, self.free) + seconds
        self.busy += seconds
        self.free = end
        return end


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did."""

    episodes: float
    """Written per second."""
    updates: float
    """Per second."""
    lag: float
    """Mean versions between the start of an episode and the update that draws it."""
    shares: dict[str, float]
    """How busy each part is."""


@cache
def simulate(
    plan: Plan, costs: Costs, seconds: float, *, slots: int, learns: bool = True
) -> Outcome:
    """Simulate a run; its first fifth does not count."""
    rng = random.Random(0)
    engine, link, writer, weights = Server(), Server(), Server(), Server()
    learner = engine if plan.shared else Server()
    players = [Server() for _ in range(plan.collectors)]
    stations = {"engine": [engine], "learner": [learner], "collector": players, "network": [link]}
    stations |= {"writer": [writer], "weights": [weights]}
    rate = plan.sampling_gpus * plan.tokens_per_gpu
    stream = rate / max(1, plan.sampling_gpus * plan.slots_per_gpu)
    low, high = plan.rows_per_episode
    learn = plan.batch * (costs.draw + ROW_TOKENS / plan.learned_tokens)
    send = 2 * plan.parameters / plan.weight_link
    drawn = written = begun = version = seen = counted = updates = 0
    learning, lags, held = False, [], []
    stored: deque[int] = deque(maxlen=2 * plan.batch)
    events: list[tuple[float, int, str, Any]] = []
    order = itertools.count()

    def at(when: float, what: str, *job: Any) -> None:
        heapq.heappush(events, (when, next(order), what, job))

    for slot in range(slots):
        at(slot * 1e-3, "begin", slot)
    warm, now = seconds / 5, 0.0
    before: dict[str, float] = {}
    while now < seconds:
        now, _, what, job = heapq.heappop(events)
        if not before and now >= warm:
            before = {name: sum(s.busy for s in each) for name, each in stations.items()}
        if what == "begin":
            if learns and drawn < low * (begun - slots - plan.batch):
                held.append(job)
                continue
            begun += 1
            turns = rng.randint(*TURNS)
            slowest = now + turns * (plan.env_seconds + SAMPLED / stream)
            at(max(slowest, engine.serve(now, turns * SAMPLED / rate)), "played", *job, turns, seen)
        elif what == "played":
            slot, turns, of = job
            player = players[slot % len(players)]
            done = player.serve(now, turns * costs.turn + costs.pack)
            at(done, "begin", slot)
            size = costs.episode_bytes * turns / MEAN_TURNS
            at(link.serve(done, size / plan.link), "sent", turns, of)
        elif what == "sent":
            at(writer.serve(now, costs.write * job[0] / MEAN_TURNS), "written", job[1])
        elif what == "written":
            written += 1
            counted += now >= warm
            stored.append(job[0])
        elif what == "learned":
            learning, drawn, version = False, drawn + plan.batch, version + 1
            updates += now >= warm
            lags += [version - 1 - of for of in rng.choices(stored, k=8)]
            if weights.free <= now:  # A network that is busy skips versions.
                at(weights.serve(now, send), "arrived", version)
                if not plan.overlap:
                    engine.free = max(engine.free, now) + send
            for each in held:
                at(now, "begin", *each)
            held = []
        elif what == "arrived":
            seen = job[0]
        if learns and not learning and drawn + plan.batch <= high * written:
            learning = True
            at(learner.serve(now, learn), "learned")
    span = seconds - warm
    shares = {
        name: (sum(s.busy for s in each) - before[name]) / span / len(each)
        for name, each in stations.items()
    }
    lag = statistics.mean(lags) if lags else 0.0
    return Outcome(counted / span, updates / span, lag, shares)
