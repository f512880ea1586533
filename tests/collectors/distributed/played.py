"""What workers play in these tests, importable there: everything follows from items and seeds."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from tests.waiting import PATIENCE
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer

has_hung, may_go_on = threading.Event(), threading.Event()
"""Whether a worker in a thread hangs or has hung, and whether it may go on."""


class Talk(TextEnv):
    """Ends after the item's ``turns``. The item says what goes wrong, and the info where it ran."""

    inline = True

    def reset(self, data=None):
        self.data, self.turn = data, 0
        if (error := self.data.get("error")) is not None:
            raise error
        return [{"role": "user", "content": str(1 + data["k"] % 16)}]

    async def step(self, response):
        self.turn += 1
        if self.data.get("dies"):
            os._exit(7)
        if self.data.get("hangs") and not has_hung.is_set():
            has_hung.set()
            may_go_on.wait(PATIENCE)
        if (flag := self.data.get("wait_for")) is not None:
            while not os.path.exists(flag):
                await asyncio.sleep(0.01)
        await asyncio.sleep(self.data.get("sleep", 0))
        return TextStep(
            [{"role": "user", "content": str(1 + len(response) % 16)}],
            reward=(self.data["k"] * 7 + self.turn + len(response)) % 5 / 4,
            done=self.turn >= self.data.get("turns", 1 + self.data["k"] % 3),
            info={"pid": os.getpid()},
        )


class Refuses(Talk):
    def reset(self, data=None):
        raise ValueError("no such world")


class SeededEngine:
    """Tokens and log-probs follow from the prompt and the call's seed."""

    def __init__(self) -> None:
        self.tokenizer = tiny_chat_tokenizer(list(map(str, range(1, 17))))
        self.version = 0
        self.weight = 0.0
        """The weights: a number, which log-probs show."""
        self.delay = 0.0

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens=None, seed: int = 0, **sampling: Any
    ) -> Completion:
        draw = random.Random(hash((seed, *prompt_ids)))
        version, weight = self.version, self.weight
        await asyncio.sleep(self.delay)
        token_ids = [draw.randrange(5, 20) for _ in range(draw.randrange(1, 6))]
        token_ids = [*token_ids, self.tokenizer.eos_token_id][:max_new_tokens]
        log_probs = [weight - draw.random() for _ in token_ids]
        ended = token_ids[-1] == self.tokenizer.eos_token_id
        reason = "stop" if ended else "length"
        return Completion(token_ids, log_probs, [version] * len(token_ids), reason)

    def update_weights(self, source: Any) -> int:
        if source is not None:
            self.weight = float(source["w"])
        self.version += 1
        return self.version

    def close(self) -> None:
        pass


def slow_engine() -> SeededEngine:
    engine = SeededEngine()
    engine.delay = 0.01
    return engine


def broken_engine() -> SeededEngine:
    raise FileNotFoundError("no weights here")


class Picky(SeededEngine):
    """Takes positive weights only."""

    def update_weights(self, source: Any) -> int:
        if float(source["w"]) < 0:
            raise ValueError("w must be positive")
        return super().update_weights(source)


def items(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"k": k, **more} for k in range(n)]


def ledger(batches) -> dict[tuple[int, int], list[Any]]:
    """By item and place in the group: tokens, log-probs and rewards of each turn."""
    found: dict[tuple[int, int], list[Any]] = {}
    for batch in batches:
        members: dict[int, list[int]] = {}
        for step in batch.unbind(0):
            ids = members.setdefault(int(step["group"]), [])
            traj = int(step["collector", "traj_ids"])
            if traj not in ids:
                ids.append(traj)
            key = (step["data"]["k"], ids.index(traj))
            found.setdefault(key, []).append(
                (
                    step["tokens", "prompt"].tolist(),
                    step["tokens", "response"].tolist(),
                    step["log_probs", "response"].tolist(),
                    float(step["next", "reward"]),
                )
            )
    return found


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(value)}


def burn(seconds: float) -> None:
    """Hold the interpreter's lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
