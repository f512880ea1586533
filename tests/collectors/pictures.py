"""An environment of pictures, and an engine that remembers which pictures it was shown."""

from __future__ import annotations

import random

import numpy as np

from tests.collectors.runs import run_of
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.envs import TextEnv, TextStep


def picture(seed, height=16, width=16):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image_part(image):
    return {"type": "image", "image": image}


def text_part(text):
    return {"type": "text", "text": text}


def user(*parts):
    return {"role": "user", "content": list(parts)}


class SeeingEngine(ScriptedEngine):
    """Also records the images of every call."""

    def __init__(self, processor, rule=None):
        tokenizer = processor.tokenizer
        super().__init__(tokenizer, rule or (lambda prompt: tokenizer("go<end>")["input_ids"]))
        self.images = []

    async def generate(self, prompt_ids, *, images=(), **arguments):
        answer = await super().generate(prompt_ids, **arguments)
        self.images.append(tuple(images))
        return answer


class Screens(TextEnv):
    """Shows screen ``data["first"]``, then one of its own after every response."""

    def __init__(self, turns=3, size=(16, 16), form=lambda pixels: pixels):
        self.turns, self.size, self.form = turns, size, form

    def reset(self, data=None):
        self.data, self.step_number = data, 0
        return [user(text_part("what"), image_part(self.screen(data["first"])))]

    def screen(self, seed):
        return self.form(picture(seed, *self.size))

    def step(self, response):
        self.step_number += 1
        done = self.step_number >= self.turns
        seed = random.randrange(2**31)
        new = [] if done else [user(image_part(self.screen(seed)), text_part("go ?"))]
        return TextStep(new, reward=1.0, done=done)


def collect(env, engine, processor, data=({"first": 1},), *, n=1, **options):
    """All batches of a run of one batch, which ends at its first failure."""
    options = {"total_episodes": n, "max_consecutive_failures": 1, **options}
    return run_of(env, engine, list(data), n=n, processor=processor, **options)[0]


def new_images(batch):
    return batch.get(("images", "new")).tolist()
