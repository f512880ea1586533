"""Equal runs have equal bits, however fast their threads run."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref

import pytest
import torch

from tests.tiers import some_fast
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns

WORDS = "guess to higher lower correct invalid 1 2 3 4"


class Uneven(GuessNumber):
    """Takes another time at every step, and so does the thread of its loop."""

    clock = random.SystemRandom()

    def step(self, response):
        time.sleep(self.clock.choice((0.0, 0.0, 0.001, 0.005)))
        return super().step(response)


def play(limits, group_size, max_concurrency):
    """Rows of two batches, answers of many lengths."""
    torch.manual_seed(0)
    model, tokenizer = tiny_chat_model(WORDS)
    engine = TransformersEngine(model, tokenizer, max_batch_tokens=64)
    with MultiTurnCollector(
        Uneven(4, turns=3),
        engine,
        [{"seed": k} for k in range(32)],
        episodes_per_batch=16,
        total_episodes=32,
        group_size=group_size,
        max_concurrency=max_concurrency,
        limits=limits,
        sampling={"seed": 0},
        postproc=MergeTurns(),
        options=CollectorOptions(seed=0),
    ) as collector:
        rows = list(collector)
        engine.close()
    return rows


@pytest.mark.parametrize(
    ("length", "group_size", "max_concurrency"),
    some_fast([(12, 4, 8)], [(1, 1, None), (5, 4, None), (12, 1, 6), (12, 4, 8), (12, 8, 16)]),
)
def test_equal_runs_have_equal_bits(length, group_size, max_concurrency):
    limits = Limits(max_response_tokens=length, on_cut="continue")
    first = play(limits, group_size, max_concurrency)
    lengths = {n for rows in first for n in rows["masks", "all_assistant_mask"].sum(-1).tolist()}
    assert length == 1 or len(lengths) > 3
    for _ in range(2):
        for rows, again in zip(first, play(limits, group_size, max_concurrency), strict=True):
            for key in (("tokens", "full"), ("log_probs", "full"), ("rewards", "full")):
                assert torch.equal(rows[key], again[key])


def test_loops_that_ended_are_forgotten():
    model, tokenizer = tiny_chat_model(WORDS)
    engine, loops = TransformersEngine(model, tokenizer), weakref.WeakSet()

    for _ in range(5):
        loop = asyncio.new_event_loop()
        loops.add(loop)
        loop.run_until_complete(engine.generate([1, 2], max_new_tokens=1))
        time.sleep(0.05)  # the engine has asked for rounds of a loop that runs no more
        loop.close()
    del loop
    gc.collect()
    assert len(loops) <= 1
    engine.close()
