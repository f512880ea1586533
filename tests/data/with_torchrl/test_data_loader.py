"""A buffer in the processes of a DataLoader: copies, or an error that says how to get one."""

import multiprocessing
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler, PrioritizedClipSampler

SPAN = 3
needs_fork = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"
)


class Clips(IterableDataset):
    """Samples of a buffer, each with the number of the worker that drew it."""

    def __init__(self, rb, batches=4):
        self.rb = rb
        self.batches = batches

    def __iter__(self):
        for _ in range(self.batches):
            yield get_worker_info().id, self.rb.sample()


class ClipsOfACopy(Clips):
    """The same of a buffer that comes as bytes, which every worker unpacks for itself."""

    def __init__(self, rb, batches=4):
        super().__init__(None, batches)
        self.saved = pickle.dumps(rb)

    def __iter__(self):
        self.rb = pickle.loads(self.saved)
        return super().__iter__()


def buffer(cls=TensorDictReplayBuffer, sampler=ClipSampler, **kwargs):
    return buffer_of(40, sampler(slice_len=SPAN), cls=cls, batch_size=4 * SPAN, **kwargs)


def own(worker):
    """Give each worker's copy of the buffer a generator of its own."""
    info = get_worker_info()
    info.dataset.rb.set_rng(torch.Generator().manual_seed(info.seed))


def as_it_is(item):
    return item


def loader(dataset, context, workers=2, **kwargs):
    return DataLoader(
        dataset,
        batch_size=None,  # what the buffer samples is a batch
        collate_fn=as_it_is,
        num_workers=workers,
        multiprocessing_context=context,
        **kwargs,
    )


@pytest.fixture
def filled(make):
    rb = buffer()
    rb.extend(make.vectors([6, 5, 7]))
    return rb


def check(rb, sample):
    stored = rb[:]
    step_of = {tuple(row.tolist()): i for i, row in enumerate(stored["observation"])}
    where = torch.tensor([step_of[tuple(row.tolist())] for row in sample["observation"]])
    assert (where.view(-1, SPAN).diff() == 1).all()
    assert torch.equal(stored["episode"][where], sample["episode"])
    assert (sample["episode"].view(-1, SPAN).diff() == 0).all()


@needs_fork
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("sampler", [ClipSampler, PrioritizedClipSampler])
def test_forked_workers_have_a_copy_each(make, cls, sampler):
    rb = buffer(cls, sampler)
    rb.extend(make.vectors([6, 5, 7]))
    batches = list(loader(Clips(rb), "fork"))
    assert sorted(worker for worker, _ in batches) == [0] * 4 + [1] * 4
    for _, sample in batches:
        check(rb, sample)
    assert rb.sampler._step == 0


@needs_fork
def test_forked_workers_draw_apart_unless_the_buffer_has_a_generator(make):
    def drawn(rb, **kwargs):
        seen = {0: [], 1: []}
        for worker, sample in loader(Clips(rb), "fork", **kwargs):
            seen[worker].append(sample["observation"])
        return torch.stack(seen[0]), torch.stack(seen[1])

    data = make.vectors([9, 8, 7])
    cases = (None, False, {}), (0, True, {}), (0, False, {"worker_init_fn": own})
    for seed, same, kwargs in cases:
        rb = buffer(seed=seed)
        rb.extend(data)
        first, second = drawn(rb, **kwargs)
        assert torch.equal(first, second) == same


@needs_fork
def test_large_samples_arrive_whole(make):
    """Their memory is used again in the worker as soon as it has sent them."""
    size = 100 * 1000  # 1.2 MB of observations
    sampler = ClipSampler(slice_len=100)
    rb = buffer_of(20_000, sampler, cls=TensorDictReplayBuffer, batch_size=size, seed=0)
    rb.extend(make.vectors([150] * 20))
    batches = [sample for _, sample in loader(Clips(rb, 5), "fork", workers=1)]
    for batch in batches:
        expected = rb.sample()
        assert torch.equal(batch["observation"], expected["observation"])
        assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_spawned_workers_are_refused_with_the_ways_out(filled):
    with pytest.raises(RuntimeError, match=r"service_backend=.ray.*pickle\.dumps\(buffer\).*dumps"):
        next(iter(loader(Clips(filled), "spawn")))
    check(filled, filled.sample())


@pytest.mark.slow
def test_spawned_workers_unpack_a_copy(filled):
    batches = list(loader(ClipsOfACopy(filled), "spawn", workers=1))
    assert len(batches) == 4
    for _, sample in batches:
        check(filled, sample)
