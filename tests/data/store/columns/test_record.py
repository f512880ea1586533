"""What is read are views of one tensor for each dtype: whoever uses one need not know."""

import copy
import io
import multiprocessing
import pickle
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.buffers import buffer_of
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeSampler, EpisodeStorage

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)

entries = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from(["root", "next", "deep", "large"]),
    ),
    min_size=1,
    max_size=8,
)


def episode(drawn, length, seed):
    """Random bits in entries of these dtypes, shapes and places."""
    generator = torch.Generator().manual_seed(seed)
    data = TensorDict({"next": {"done": torch.arange(length)[:, None] == length - 1}}, [length])
    for i, (dtype, shape, where) in enumerate(drawn):
        if where == "large":  # no part of a record
            shape = [600, *shape]
        values = torch.randint(2, (length, *shape), generator=generator)
        values = values * torch.randint(100, values.shape, generator=generator)
        key = {"next": ("next", f"x{i}"), "deep": ("a", "b", f"x{i}")}.get(where, f"x{i}")
        data[key] = values.to(dtype)
    return data


@examples(30)
@given(
    drawn=entries,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_what_is_read_is_what_was_written(make, drawn, lengths, seed):
    storage, written = EpisodeStorage(20), []
    for i, length in enumerate(lengths):
        data = episode(drawn, length, seed + i)
        storage.append(data)
        written.append(make.steps(data))
        kept = written[-storage.num_episodes :]
        assert [make.steps(got) for got in storage.episodes()] == kept
    everything = [step for steps in kept for step in steps]
    backwards = torch.arange(len(storage)).flip(0)
    assert make.steps(storage[:]) == everything
    assert make.steps(storage[backwards]) == everything[::-1]


def side_by_side(places, stride, length):
    """Entries as in a record, or otherwise."""
    x, y, z = places
    values = torch.arange(4.0 * 2 * length).view(2 * length, 4)[: stride * length : stride]
    return {"x": values[:, x : x + 2], "y": values[:, y], "next": {"reward": values[:, z, None]}}


def overlapping(*shape):
    values = torch.arange(100.0 * torch.Size(shape).numel()).view(100, *shape)
    return {"o": values[:5], "p": values[1:6]}


def of_one_array():
    """NumPy's memory, which is two tensors' that know nothing of each other."""
    values = np.arange(20.0).reshape(5, 4)
    return {"x": torch.from_numpy(values[:, :3]), "y": torch.from_numpy(values[:, 3:])}


PLACES = [(0, 2, 3), (1, 3, 0), (0, 1, 3), (2, 0, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    "entries",
    [
        *(side_by_side(*each) for each in product(PLACES, [1, 2], [1, 5])),
        *(overlapping(*shape) for shape in [(), (1,), (3,), (2, 3)]),
        of_one_array(),
    ],
)
@pytest.mark.parametrize("share_next", [True, False])
def test_entries_that_share_memory_are_stored_as_they_are(make, entries, share_next):
    length = len(next(iter(entries.values())))
    data = TensorDict(entries, [length])
    data["next", "done"] = torch.arange(length) == length - 1
    storage = EpisodeStorage(40, share_next=share_next)
    for _ in range(3):
        storage.append(data)
    assert [make.steps(got) for got in storage.episodes()] == 3 * [make.steps(data)]


def sampled(make, sampler):
    rb = buffer_of(40, sampler, seed=0)
    rb.extend(with_matrix(make.vectors([9, 6])))
    return rb, rb.sample(4)


def with_matrix(data):
    """The data with an entry of two dimensions per step."""
    return data.set("matrix", torch.arange(6.0 * len(data)).view(len(data), 2, 3))


SAMPLERS = {
    "clips": lambda: ClipSampler(slice_len=2),
    "rows of clips": lambda: ClipSampler(slice_len=2, layout="clips"),
    "strided clips": lambda: ClipSampler(slice_len=2, stride=2),
    "episodes": lambda: EpisodeSampler(),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_change_of_one_entry_changes_no_other(make, sampler):
    rb, sample = sampled(make, SAMPLERS[sampler]())
    stored = make.steps(rb[:])
    for key in list(sample.keys(True, True)):
        before = {k: v.clone() for k, v in sample.items(True, True) if k != key}
        value = sample[key]
        if value.dtype == torch.bool:
            value.logical_not_()
        else:
            value.add_(7)
            value[..., 0] = 3
        for other, expected in before.items():
            assert torch.equal(sample[other], expected), (key, other)
    assert make.steps(rb[:]) == stored
    again = rb.sample(4)
    assert make.steps(again.reshape(-1)) != make.steps(sample.reshape(-1))
    assert make.steps(rb[:]) == stored


def saved(sample):
    file = io.BytesIO()
    torch.save(sample, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_a_queue(sample):
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(pickle.dumps(sample))
    return pickle.loads(queue.get())


COPIES = {
    "save": saved,
    "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),
    "queue": through_a_queue,
    "deepcopy": copy.deepcopy,
    "copy.copy of a clone": lambda sample: copy.copy(sample.clone()),
    "clone": lambda sample: sample.clone(),
    "clone of each": lambda sample: sample.apply(torch.clone),
    "contiguous": lambda sample: sample.contiguous().clone(),
    "to": lambda sample: sample.to(torch.float64).to("cpu").clone(),
    "consolidate": lambda sample: sample.consolidate(),
    "stack": lambda sample: torch.stack([sample, sample])[1],
    "cat": lambda sample: torch.cat([sample, sample])[: len(sample)],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_copies_equal_it_and_are_their_own(make, sampler, how):
    rb, sample = sampled(make, SAMPLERS[sampler]())
    steps, stored = make.steps(sample.reshape(-1)), make.steps(rb[:])
    other = COPIES[how](sample)
    assert other.batch_size == sample.batch_size
    assert set(other.keys(True, True)) == set(sample.keys(True, True))
    for key in sample.keys(True, True):
        if how != "to":
            assert other[key].dtype == sample[key].dtype
        assert torch.equal(other[key], sample[key].to(other[key].dtype)), key
    other.apply_(lambda value: value.zero_())
    assert make.steps(sample.reshape(-1)) == steps
    kept = other.clone()
    sample.apply_(lambda value: value.fill_(1))
    assert make.steps(other.reshape(-1)) == make.steps(kept.reshape(-1))
    assert make.steps(rb[:]) == stored


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sample_serves_as_any_other(make, sampler):
    """What a training step does with a sample: views, gradients, numpy, masks, shared memory."""
    _, sample = sampled(make, SAMPLERS[sampler]())
    plain = sample.clone()
    flat, expected = sample.reshape(-1), plain.reshape(-1)
    assert make.steps(flat) == make.steps(expected)
    mask = torch.arange(len(flat)) % 3 == 0
    assert make.steps(flat[mask]) == make.steps(expected[mask])
    assert make.steps(flat.flip(0)) == make.steps(expected.flip(0))
    for key in plain.keys(True, True):
        value, wanted = sample[key], plain[key]
        assert (value.numpy() == wanted.numpy()).all()
        assert torch.equal(value.flatten(), wanted.flatten())
        assert torch.equal(value.view(*value.shape, 1), wanted.unsqueeze(-1))
        assert torch.equal(value.sum(0), wanted.sum(0))
        if value.is_floating_point():
            weight = torch.ones(value.shape[-1], requires_grad=True)
            (value * weight).sum().backward()
            torch.testing.assert_close(
                weight.grad, wanted.reshape(-1, value.shape[-1]).sum(0), atol=1e-5, rtol=1e-5
            )
    sample["observation"].requires_grad_(True)
    sample["observation"].square().sum().backward()
    torch.testing.assert_close(sample["observation"].grad, 2 * plain["observation"])
