"""How busy 64 conversations are kept: this project's collector beside TorchRL's ``LLMCollector``.

Nothing is computed: model and environments sleep, for times from the same distribution in all
contenders. In a turn, the model takes 80 ms (16 tokens of 5 ms), and the environment a time from a
log-normal distribution with a median of 10 ms and sigma 1.5 (mean 31 ms, one in a hundred above 330 ms).
An episode has 8 turns.

The ideal is work / concurrency: the seconds of model and environments, summed over turns, divided by 64.
Late timers, bookkeeping and waiting all count against a contender.

- A *long run* is measured in a window after a warm-up: the seconds of work inside the window, divided by
  64 times its length.
- A *raw* figure is of a run from its first call to its last delivery, including its end, when fewer than
  64 episodes are left. ``bound`` is the figure if each episode began, in the same order, as soon as one
  of 64 places is free, at no cost. The rest is lost to the tail.

``LLMCollector`` has a policy that answers any number of conversations in the time of one call, and a
batched environment whose 64 conversations sleep at once. *Tensors* is a small ``EnvBase`` of one integer
per turn, *chat* is TorchRL's ``ChatEnv`` with ``History``. Ours has chat messages, their template and
the ledger. CPU is that of the whole process.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Binary, Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import AsyncEnvPool, EnvBase, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.collectors.event_loop.background_tasks import cancel_all
from torchrl_mt.engines import Completion
from torchrl_mt.envs import Message, TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer

CONCURRENCY, TURNS = 64, 8
TOKENS, TOKEN_SECONDS = 16, 0.005
MODEL_SECONDS = TOKENS * TOKEN_SECONDS
ENV_MEDIAN, ENV_SIGMA = 0.010, 1.5
GUESS, HINT = "8", "higher"
WARM_UP = 2.0
"""Seconds before a window."""
RAW_EPISODES, RAW_BATCH = 768, 256
ENDLESS = 10**6
"""Batches that episodes may be ahead: no bound."""


def delays(episode: int) -> list[float]:
    """Seconds that the environment takes for each turn of an episode."""
    draw = random.Random(episode)
    return [draw.lognormvariate(math.log(ENV_MEDIAN), ENV_SIGMA) for _ in range(TURNS)]


class Work:
    """When which work was asked for, in seconds."""

    def __init__(self) -> None:
        self.episodes = itertools.count()
        self.model: list[tuple[float, float]] = []
        self.env: list[tuple[float, float]] = []

    def ask_model(self, turns: int = 1) -> float:
        """Record turns for the model; returns their duration."""
        self.model += [(time.perf_counter(), MODEL_SECONDS)] * turns
        return MODEL_SECONDS

    def ask_env(self, *seconds: float) -> float:
        """Record environment turns that begin together; returns the longest duration."""
        now = time.perf_counter()
        self.env += [(now, each) for each in seconds]
        return max(seconds)

    def within(self, begin: float, end: float) -> tuple[float, int]:
        """Seconds of work in a window, and the number of turns that reached the environment in it."""
        parts = (
            min(at + seconds, end) - max(at, begin)
            for at, seconds in itertools.chain(self.model, self.env)
        )
        return sum(part for part in parts if part > 0), sum(begin <= at < end for at, _ in self.env)


class Figures(NamedTuple):
    """Result of a contender."""

    turns_per_second: float
    of_ideal: float
    cpu_seconds_per_turn: float


def long_run(batches: Iterable[Any], work: Work, warm_up: float, seconds: float) -> Figures:
    """Measure in a window of a run that goes on."""
    begin, cpu = 0.0, 0.0
    first = time.perf_counter()
    for _ in batches:
        now = time.perf_counter()
        if not begin and now - first >= warm_up:
            begin, cpu = now, time.process_time()
        elif begin and now - begin >= seconds:
            break
    cpu = time.process_time() - cpu
    busy, turns = work.within(begin, now)
    return Figures(turns / (now - begin), busy / CONCURRENCY / (now - begin), cpu / turns)


def whole_run(batches: Iterable[Any], work: Work) -> Figures:
    """Measure a run from its first call to its last delivery."""
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    busy, turns = work.within(begin, math.inf)
    return Figures(turns / (end - begin), busy / CONCURRENCY / (end - begin), cpu / turns)


def bound(episodes: int, batch: int) -> float:
    """The part of the ideal that no scheduler without foresight exceeds, in batches that end."""
    total = makespan = 0.0
    seconds = [sum(delays(k)) + TURNS * MODEL_SECONDS for k in range(episodes)]
    for start in range(0, episodes, batch):
        places = [0.0] * CONCURRENCY
        for each in seconds[start : start + batch]:
            heapq.heapreplace(places, places[0] + each)
        total += sum(seconds[start : start + batch])
        makespan += max(places)
    return total / CONCURRENCY / makespan


def timers(work: Work) -> Iterator[None]:
    """64 loops that only sleep as long as conversations would."""

    async def converse() -> None:
        while True:
            for seconds in delays(next(work.episodes)):
                await asyncio.sleep(work.ask_model())
                await asyncio.sleep(work.ask_env(seconds))

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(converse()) for _ in range(CONCURRENCY)]
    try:
        while tasks:
            loop.run_until_complete(asyncio.sleep(0.1))
            yield None
    finally:
        loop.run_until_complete(cancel_all(tasks))
        loop.close()


# torchrl_mt


class ScriptedEngine:
    """Answers every prompt with the same tokens, after the time that they take."""

    version = 0

    def __init__(self, work: Work) -> None:
        self.tokenizer = tiny_chat_tokenizer(f"{GUESS} {HINT} guess")
        self.work = work
        token = self.tokenizer.convert_tokens_to_ids(GUESS)
        self.answer = [token] * (TOKENS - 1) + [self.tokenizer.eos_token_id]

    async def generate(
        self, prompt_ids: Any, *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        await asyncio.sleep(self.work.ask_model())
        return Completion(self.answer, [-1.0] * TOKENS, [0] * TOKENS, "stop")

    def update_weights(self, source: Any) -> int:
        return 0

    def close(self) -> None:
        pass


class SlowEnv(TextEnv):
    """Sleeps for every answer."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.delays: Iterator[float] = iter(())
        self.left = 0

    async def reset(self, data: Any = None) -> list[Message]:
        self.delays = iter(delays(data))
        self.left = TURNS
        return [{"role": "user", "content": "guess"}]

    async def step(self, response: str) -> TextStep:
        await asyncio.sleep(self.work.ask_env(next(self.delays)))
        self.left -= 1
        return TextStep([{"role": "user", "content": HINT}], done=self.left == 0)


def collector(work: Work, batch: int, **kwargs: Any) -> MultiTurnCollector:
    """This project's collector, which plays 64 episodes at once."""
    return MultiTurnCollector(
        lambda: SlowEnv(work),
        ScriptedEngine(work),
        work.episodes,
        episodes_per_batch=batch,
        max_concurrency=CONCURRENCY,
        **kwargs,
    )


# TorchRL


class Clock:
    """Sleeps in place of so many environments."""

    def __init__(self, work: Work, size: int) -> None:
        self.work, self.size, self.turn = work, size, 0
        self.delays: list[list[float]] = []

    def reset(self) -> None:
        self.turn = 0
        self.delays = [delays(next(self.work.episodes)) for _ in range(self.size)]

    def step(self) -> bool:
        """Sleep through a turn; returns whether the episodes are over."""
        time.sleep(self.work.ask_env(*(each[self.turn] for each in self.delays)))
        self.turn += 1
        return self.turn == TURNS


class HostEnv(EnvBase):
    """A TorchRL environment of integers that sleeps as long as the slowest of its batch."""

    def __init__(self, work: Work, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(batch_size=batch_size)
        shape = (*self.batch_size, 1)
        self.observation_spec = Composite(
            observation=Unbounded(shape, dtype=torch.int64), shape=self.batch_size
        )
        self.action_spec = Unbounded(shape, dtype=torch.int64)
        self.reward_spec = Unbounded(shape)
        self.done_spec = Binary(1, shape=shape, dtype=torch.bool)
        self.clock = Clock(work, self.batch_size.numel())

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self.clock.reset()
        return self._made(torch.zeros(*self.batch_size, 1, dtype=torch.int64), False)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        done = self.clock.step()
        made = self._made(tensordict["action"] + 1, done)
        return made.set("reward", torch.zeros(*self.batch_size, 1))

    def _made(self, observation: torch.Tensor, done: bool) -> TensorDict:
        flag = torch.full((*self.batch_size, 1), done)
        return TensorDict(
            {"observation": observation, "done": flag, "terminated": flag.clone()}, self.batch_size
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Hints(Transform):
    """The chat environment's part: sleeps, then answers."""

    def __init__(self, work: Work, size: int) -> None:
        super().__init__()
        self.clock = Clock(work, size)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            tensordict = TensorDict(batch_size=[self.clock.size])
        self.clock.reset()
        return tensordict.set("query", NonTensorStack(*["guess"] * self.clock.size))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.full((self.clock.size, 1), self.clock.step())
        history = next_tensordict["history"]
        history.prompt = said(history.prompt, "user", HINT)
        return next_tensordict.update(
            {"reward": torch.zeros_like(done).float(), "done": done, "terminated": done.clone()}
        )

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1))
        return reward_spec


def said(history: History, role: str, content: str) -> History:
    """Conversations, ``[B, T]``, with a message more."""
    return history.extend(messages(len(history), role, content), inplace=False, dim=-1)


def messages(size: int, role: str, content: str) -> History:
    """The same message for each of ``size`` conversations, ``[B, 1]``."""
    return lazy_stack([History(role=role, content=content) for _ in range(size)]).unsqueeze(-1)


def answer_tensors(work: Work, tensordict: TensorDictBase) -> TensorDictBase:
    """A policy for :class:`HostEnv`."""
    time.sleep(work.ask_model(tensordict.numel()))
    return tensordict.set("action", tensordict["observation"].clone())


def answer_chat(work: Work, tensordict: TensorDictBase) -> TensorDictBase:
    """A policy for ``ChatEnv``, whose responses are a word."""
    time.sleep(work.ask_model(tensordict.numel()))
    for each in tensordict.unbind(0) if tensordict.ndim == 2 else [tensordict]:
        history = each["history"]
        history.response = messages(len(each), "assistant", GUESS)
        history.full = said(history.prompt, "assistant", GUESS)
    return tensordict


def batched(work: Work, chat: bool, **kwargs: Any) -> LLMCollector:
    """TorchRL's collector over one environment of 64 conversations; a batch is a turn of each."""
    return LLMCollector(
        chat_env(work, CONCURRENCY) if chat else HostEnv(work, (CONCURRENCY,)),
        policy=functools.partial(answer_chat if chat else answer_tensors, work),
        dialog_turns_per_batch=CONCURRENCY,
        **kwargs,
    )


def pooled(work: Work, chat: bool) -> LLMCollector:
    """TorchRL's collector over a pool of 64 environments in threads; a batch is an episode."""
    make: Callable[[], EnvBase] = (
        functools.partial(chat_env, work, 1) if chat else functools.partial(HostEnv, work)
    )
    return LLMCollector(
        AsyncEnvPool([make] * CONCURRENCY, backend="threading", stack="lazy"),
        policy=functools.partial(answer_chat if chat else answer_tensors, work),
        yield_completed_trajectories=True,
        # Without a budget: towards the end of total_dialog_turns, TorchRL 0.14.1 lets the last
        # environments run dry and then waits for one ("Cannot await 1 step_and_maybe_reset").
    )


def chat_env(work: Work, size: int) -> EnvBase:
    """TorchRL's chat environment."""
    return TransformedEnv(ChatEnv(batch_size=(size,)), Hints(work, size))


def rows(seconds: float) -> Iterator[tuple[str, ...]]:
    """The rows of the table: name, turns a second, part of the ideal, its bound, CPU of a turn in ms.

    Args:
        seconds: how long a window is.
    """
    work = Work()
    yield row("no collector: timers alone", long_run(timers(work), work, WARM_UP, seconds))
    work = Work()
    with collector(work, CONCURRENCY, max_staleness=ENDLESS) as ours:
        yield row("torchrl_mt, a long run", long_run(iter(ours), work, WARM_UP, seconds))
    episodes, batch = RAW_EPISODES, RAW_BATCH
    for name, size, kwargs in (
        (f"torchrl_mt, {episodes:,} episodes, raw", episodes, {"max_staleness": ENDLESS}),
        (f"torchrl_mt, {batch} episodes a batch, each to its end, raw", batch, {}),
    ):
        work = Work()
        with collector(work, batch, total_episodes=episodes, **kwargs) as ours:
            yield row(name, whole_run(iter(ours), work), f"{bound(episodes, size):.1%}")
    for chat in (False, True):
        what = "chat" if chat else "tensors"
        work = Work()
        batches = batched(work, chat)
        name = f"LLMCollector, one environment of {CONCURRENCY}, {what}"
        yield row(name, long_run(iter(batches), work, WARM_UP, seconds))
        batches.shutdown()
        work = Work()
        batches = pooled(work, chat)
        name = f"LLMCollector, AsyncEnvPool of {CONCURRENCY}, {what}"
        yield row(name, long_run(iter(batches), work, WARM_UP, seconds))
        batches.env.shutdown()
        batches.shutdown()


def row(name: str, figures: Figures, bound: str = "") -> tuple[str, ...]:
    """One row of the table."""
    return (
        name,
        f"{figures.turns_per_second:,.0f}",
        f"{figures.of_ideal:.1%}",
        bound,
        f"{1e3 * figures.cpu_seconds_per_turn:.2f}",
    )
