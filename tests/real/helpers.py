"""Adapters, weights and games for the tests of a real model."""

from __future__ import annotations

import copy

import torch

from torchrl_mt.envs import TextEnv, TextStep

QUESTIONS = [
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write a line of Python that prints 🦊 twice.",
]


def asked(*questions):
    """Items of :class:`Chat`."""
    return [{"question": question} for question in questions]


def nudged(model, seed=0):
    """A copy whose trained weights are a little different: fresh adapters add 0."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


class Chat(TextEnv):
    """Asks a question, and then asks on, three turns in all."""

    inline = True

    def reset(self, data):
        self.turn = 0
        return [{"role": "user", "content": data["question"]}]

    def step(self, response):
        self.turn += 1
        more = [{"role": "user", "content": "Why? Explain it in other words."}]
        return TextStep(more, reward=float(len(set(response))), done=self.turn == 3)
