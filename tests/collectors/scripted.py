"""An engine that answers by a rule and remembers everything: the reference that ledgers are held to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torchrl_mt.engines import Completion


class ScriptedEngine:
    """Answer with ``rule(prompt_ids)``; record every call as ``(prompt_ids, completion)``."""

    def __init__(
        self, tokenizer: Any, rule: Callable[[list[int]], list[int]], stop_ids: Collection[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = {tokenizer.eos_token_id, *stop_ids}
        self.rule = rule
        self.calls: list[tuple[list[int], Completion]] = []
        self.running = self.most_running = 0
        self.version = 0
        self.closed = False

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, **sampling: Any
    ) -> Completion:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            token_ids = self.rule(list(prompt_ids))[:max_new_tokens]
        finally:
            self.running -= 1
        stopped = bool(token_ids) and token_ids[-1] in self.stop_ids
        answer = Completion(
            token_ids,
            [-0.001 * len(self.calls) - 0.1 * i for i in range(len(token_ids))],
            [self.version] * len(token_ids),
            "stop" if stopped else "length",
        )
        self.calls.append((list(prompt_ids), answer))
        return answer

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        self.closed = True


class TellingEngine:
    """Each sampled token has a log-probability of its own, by which it is known wherever it turns up."""

    tokenizer: Any = None

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.version = self.count = 0
        self.calls: dict[float, tuple[list[int], Completion]] = {}
        """Prompts and answers, by the log-probability of an answer's first token."""

    def answer(
        self, prompt: list[int], token_ids: list[int], versions: list[int] | None = None
    ) -> Completion:
        """An answer, by default of the version of now."""
        log_probs = [-float(self.count + i + 1) for i in range(len(token_ids))]
        self.count += len(token_ids)
        versions = [self.version] * len(token_ids) if versions is None else versions
        answer = Completion(token_ids, log_probs, versions, "stop")
        if token_ids:
            self.calls[log_probs[0]] = prompt, answer
        return answer

    def update_weights(self, source: Any) -> int:
        self.version += 1
        return self.version

    def close(self) -> None:
        pass
