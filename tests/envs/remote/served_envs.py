"""Environments that the tests serve."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.vision import StoredImage

END = "end"
"""The response that ends an episode."""


class Echo(TextEnv):
    """Repeats what it is told, and remembers what was done to it."""

    inline = True

    def reset(self, data=None):
        self.item, self.heard = data, []
        return [{"role": "user", "content": f"item: {data!r}"}]

    def step(self, response):
        self.heard.append(response)
        said = [{"role": "user", "content": response}]
        return TextStep(said, reward=0.5, done=response == END, info={"heard": len(self.heard)})


class Threaded(Echo):
    """The same, in threads."""

    inline = False


class Asynchronous(Echo):
    """The same, with async methods."""

    inline = False

    async def reset(self, data=None):
        return Echo.reset(self, data)

    async def step(self, response):
        await asyncio.sleep(0)
        return Echo.step(self, response)


class Shop(TextEnv):
    """Wants whole texts and messages, and has tools."""

    inline = True
    whole_text = True

    def reset(self, data=None):
        schema = {"type": "function", "function": {"name": "buy", "parameters": {}}}
        self.tool_schemas = [schema]
        return [{"role": "user", "content": "buy something"}]

    def step(self, response, message):
        calls = message.get("tool_calls", [])
        said = [{"role": "tool", "content": f"{response}/{message['content']}/{len(calls)}"}]
        return TextStep(said, reward=1.0, done=True, truncated=True)


class Marked(Echo):
    """Leaves a file behind when it is closed."""

    def close(self):
        Path(os.environ["MARK"]).touch()


class Screen(Echo):
    """Shows a picture in every message; the item says in which form."""

    picture = StoredImage.of(
        np.random.default_rng(1).integers(0, 256, (500, 550, 3), dtype=np.uint8)
    )

    def reset(self, data=None):
        forms = {"array": self.picture.array(), "PIL": self.picture.pil(), "path": "no such.png"}
        self.form = forms.get(data["form"], self.picture)
        return [self.message()]

    def message(self):
        text = {"type": "text", "text": "what"}
        return {"role": "user", "content": [text, {"type": "image", "image": self.form}]}

    def step(self, response):
        return TextStep([self.message()], history=[self.message()])
