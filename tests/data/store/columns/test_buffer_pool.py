"""Samples take memory that is used again: of those that are gone, and of no others."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler


@pytest.fixture
def sampled(make, monkeypatch):
    """Makes buffers of three episodes whose samples take leased memory, however small they are."""
    monkeypatch.setattr("torchrl_mt.data._store.columns.memory.LEAST", 1)

    def make_buffer(prefetch=None):
        rb = buffer_of(
            100,
            ClipSampler(slice_len=4),
            cls=TensorDictReplayBuffer,
            batch_size=16,
            prefetch=prefetch,
        )
        rb.extend(make.vectors([10, 20, 30]))
        return rb

    return make_buffer


def check(rb, sample, stored):
    places = rb.storage.places(sample["index"])
    for key in ("observation", "action", ("next", "reward"), ("next", "observation")):
        assert torch.equal(sample[key], stored[key][places])


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_samples_that_are_kept_stay_as_they_are(sampled, keep):
    rb = sampled()
    stored, kept = rb[:], []
    for k in range(60):
        # Of some, a view is all that is kept.
        sample = rb.sample(16 * (1 + k % 3))
        kept = [*kept, sample if k % 2 else sample[4:]][-keep - 1 :]
        for each in kept:
            check(rb, each, stored)


def test_prefetched_samples(sampled):
    rb = sampled(prefetch=3)
    stored = rb[:]
    for _ in range(50):
        check(rb, rb.sample(), stored)
    assert threading.active_count() < 20


def test_threads_share_no_memory(sampled):
    rb = sampled()
    stored = rb[:]

    def work(seed):
        draw = random.Random(seed)
        for _ in range(40):
            for sample in [rb.sample(4 * draw.randint(1, 9)) for _ in range(3)]:
                check(rb, sample, stored)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_memory_is_used_again_and_little_more_than_asked_for(sampled):
    rb, places = sampled(), set()
    for size in [16] * 10 + [4, 12, 40, 100]:
        sample = rb.sample(size)
        values = sample["observation"]
        asked = sum(
            value.nbytes for value in sample.values(True, True) if value.dtype == values.dtype
        )
        assert values.untyped_storage().nbytes() <= 1.125 * asked
        places.update([values.data_ptr()] if size == 16 else [])
        del sample, values
    assert len(places) == 1
