"""Environments of one turn, and of episodes that go as their items say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.idle_clock import hang
from torchrl_mt.envs import TextEnv, TextStep


class Once(TextEnv):
    """One turn."""

    inline = True

    def reset(self, data=None):
        self.data = data
        return [{"role": "user", "content": "1"}]

    def step(self, response):
        return TextStep(reward=1.0, done=True)


class Chat(TextEnv):
    """Ends after ``turns`` turns; fails, hangs or sleeps as its item says."""

    inline = True

    def reset(self, data=None):
        self.data, self.turn = data or {}, 0
        return [{"role": "user", "content": "1"}]

    async def step(self, response):
        self.turn += 1
        if self.turn == self.data.get("fail_at") and self.data.get("error"):
            raise self.data["error"]
        if self.turn == self.data.get("hang_at"):
            await hang()
        await asyncio.sleep(self.data.get("sleep", 0))
        done = self.turn >= self.data.get("turns", 1)
        return TextStep([{"role": "user", "content": "2"}], reward=1.0, done=done)


def failing(fails: Callable[[int, dict], object], error: str = "gone") -> type[Chat]:
    """Chats that raise ``OSError(error)`` in a step if ``fails(its number among all, its item)``."""

    class Fails(Chat):
        steps = 0

        async def step(self, response):
            Fails.steps += 1
            if fails(Fails.steps, self.data):
                raise OSError(error)
            return await super().step(response)

    return Fails
