import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import TensorDictReplayBuffer

from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.data._store.columns import buffer_pool, memory
from torchrl_mt.data._store.columns.buffer_pool import BufferPool


@examples()
@given(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4000)), max_size=60))
def test_no_two_live_tensors_share_memory(steps):
    given_out, live = BufferPool(), {}
    for slot, size in steps:
        tensor = given_out.empty(size, torch.int64)
        tensor.fill_(slot)
        # What lives on may be a view only.
        live[slot] = tensor[size // 2 :].view(-1)
        del tensor
        for other, view in live.items():
            assert bool((view == other).all())


def test_memory_is_used_again_and_little_is_kept():
    pool = BufferPool()
    places = {pool.empty(1000, torch.uint8).data_ptr() for _ in range(10)}
    assert len(places) == 1
    several = [pool.empty(1000, torch.uint8) for _ in range(10)]
    del several
    assert len(pool._spare) == buffer_pool._SPARE


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.int8])
def test_dtypes(dtype):
    tensor = BufferPool().empty(5, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == (5,)


def test_threads_never_share_memory():
    pool, wrong = BufferPool(), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(300):
            mark = rng.randrange(256)
            tensors = [pool.empty(rng.randrange(1, 5000), torch.uint8) for _ in range(3)]
            for tensor in tensors:
                tensor.fill_(mark)
            wrong.extend(t for t in tensors if not bool((t == mark).all()))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong


@pytest.fixture
def sampled(make, monkeypatch):
    """Makes buffers of three episodes whose samples take leased memory, however small they are."""
    monkeypatch.setattr(memory, "LEAST", 1)

    def make_buffer(prefetch=None):
        rb = TensorDictReplayBuffer(
            storage=EpisodeStorage(100),
            writer=EpisodeWriter(),
            sampler=ClipSampler(slice_len=4),
            batch_size=16,
            prefetch=prefetch,
        )
        rb.extend(make.vectors([10, 20, 30]))
        return rb

    return make_buffer


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_samples_that_are_kept_stay_as_they_are(make, sampled, keep):
    rb = sampled()
    steps = make.steps(rb[:])
    kept = []
    for _ in range(30):
        kept = [*kept, rb.sample()][-keep - 1 :]
        for sample in kept:
            for i, index in enumerate(rb.storage.places(sample["index"]).tolist()):
                wanted = steps[index]
                got = make.steps(sample[i : i + 1].exclude("index"))[0]
                for key in (("observation",), ("action",), ("next", "reward")):
                    assert got[key] == wanted[key]


def test_prefetched_samples(sampled):
    rb = sampled(prefetch=3)
    seen = rb[:]["observation"]
    for _ in range(50):
        sample = rb.sample()
        assert torch.equal(sample["observation"], seen[rb.storage.places(sample["index"])])
    assert threading.active_count() < 20


@examples()
@given(sizes=st.lists(st.integers(1, 100_000), min_size=2, max_size=20))
def test_little_more_than_what_was_asked_for_travels_with_a_tensor(sizes):
    pool = BufferPool()
    for size in sizes:
        assert pool.empty(size, torch.uint8).untyped_storage().nbytes() <= 1.125 * size
