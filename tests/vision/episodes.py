"""Random episodes with images, and models to go with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.rows import NEW

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "llava")


@lru_cache(4)
def family(name: str) -> tuple[Any, Any]:
    """A tiny model of a family, and its processor."""
    return tiny_vl_model(name)


def random_image(rng: random.Random) -> StoredImage:
    """Noise of a random size."""
    size = (rng.randrange(8, 33), rng.randrange(8, 33), 3)
    return StoredImage.of(
        np.random.default_rng(rng.randrange(2**32)).integers(0, 256, size, np.uint8)
    )


@dataclass
class Turn:
    """What a turn saw and said."""

    prompt: list[int]
    response: list[int]
    images: list[StoredImage]
    """All images of the prompt."""
    parent: int


def random_dialogue(
    processor: Any, rng: random.Random, pool: list[StoredImage], turns: int
) -> list[Turn]:
    """An episode whose turns go on from any earlier turn, or begin anew."""
    vision = VisionProcessor.of(processor)
    mark = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])

    def text() -> list[int]:
        return [rng.randrange(10, 20) for _ in range(rng.randint(1, 4))]

    dialogue: list[Turn] = []
    for number in range(turns):
        parent = rng.choice([-1, number - 1, rng.randrange(-1, number) if number else -1])
        before = dialogue[parent] if parent >= 0 else Turn([], [], [], -1)
        prompt, images = [*before.prompt, *before.response], list(before.images)
        # Otherwise another turn's beginning may be the same by chance.
        prompt += [4 + number, *text()]
        for _ in range(rng.choice([0, 1, 1, 2])):
            image = rng.choice(pool)
            prompt += [mark[0], *vision.inputs(image).token_ids, mark[1], *text()]
            images.append(image)
        dialogue.append(Turn(prompt, text(), images, parent))
    return dialogue


def as_steps(dialogues: list[list[Turn]]) -> TensorDictBase:
    """The turns of several episodes as a collector's batch."""
    steps = []
    for episode, dialogue in enumerate(dialogues):
        for number, turn in enumerate(dialogue):
            before = len(dialogue[turn.parent].images) if turn.parent >= 0 else 0
            step = TensorDict(
                {
                    ("tokens", "prompt"): torch.tensor(turn.prompt),
                    ("tokens", "response"): torch.tensor(turn.response),
                    ("turn", "parent"): torch.tensor(turn.parent),
                    ("collector", "traj_ids"): torch.tensor(episode),
                    ("next", "reward"): torch.rand(1),
                    ("next", "done"): torch.tensor([number == len(dialogue) - 1]),
                }
            )
            step.set(NEW, NonTensorData(tuple(turn.images[before:])))
            steps.append(step)
    return lazy_stack(steps)


def random_steps(
    processor: Any, seed: int, *, episodes: int = 3, turns: int = 4
) -> tuple[TensorDictBase, list[list[Turn]]]:
    """Random episodes, as steps and as turns."""
    rng = random.Random(seed)
    pool = [random_image(rng) for _ in range(4)]
    dialogues = [
        random_dialogue(processor, rng, pool, rng.randint(1, turns)) for _ in range(episodes)
    ]
    return as_steps(dialogues), dialogues
