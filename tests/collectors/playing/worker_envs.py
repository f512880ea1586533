"""Environments that are run in processes of their own."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from torchrl_mt.collectors import context
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.vision import StoredImage


class Tells(TextEnv):
    """Tells in ``info`` where it runs; goes wrong as its item says."""

    def __init__(self, word: str = "1") -> None:
        self.word = word

    def reset(self, data=None):
        self.data, self.turn = data, 0
        self._go_wrong("reset")
        return [{"role": "user", "content": self.word}]

    def step(self, response):
        self.turn += 1
        self._go_wrong("step")
        of = context.get()
        info = {"pid": os.getpid(), "rank": of.sample_idx, "response": response}
        return TextStep([{"role": "user", "content": "1"}], 1.0, self.turn == 2, info=info)

    def close(self):
        self._go_wrong("close")

    def _go_wrong(self, where):
        what = self.data.get(where)
        if what == "exit":
            os._exit(7)
        elif what == "sys.exit":
            sys.exit(3)
        elif what == "raise":
            raise Strange("a", "b")
        elif what == "hang":
            time.sleep(1000)


class Async(Tells):
    """Its methods are coroutines, which share a loop."""

    async def reset(self, data=None):
        import asyncio

        self.loop = asyncio.get_running_loop()
        return super().reset(data)

    async def step(self, response, message):
        import asyncio

        assert asyncio.get_running_loop() is self.loop
        assert message["role"] == "assistant"
        return super().step(response)


class Strange(Exception):
    """Pickled well, and cannot be made again."""

    def __init__(self, a, b):
        super().__init__(a)


class Unimportable:
    """Makes environments here, and cannot be unpickled."""

    def __call__(self):
        return Tells()

    def __reduce__(self):
        return (_explode, ())


def _explode():
    raise ImportError("no such thing here")


def no_environment():
    return 5


class Shows(TextEnv):
    """Shows the same picture in every form, then one after each response."""

    def reset(self, data=None):
        self.turn = 0
        image = self.picture(0)
        forms = [image, image.array(), image.pil(), image.data_uri()]
        return [{"role": "user", "content": [{"type": "image", "image": form} for form in forms]}]

    @staticmethod
    def picture(number):
        return StoredImage.of(np.full((16, 16, 3), number, np.uint8))

    def step(self, response):
        self.turn += 1
        part = {"type": "image", "image": self.picture(self.turn)}
        return TextStep([{"role": "user", "content": [part]}], 1.0, self.turn == 2)
