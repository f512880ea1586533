"""What is unpickled equals what was pickled, shares no more memory, and took each used byte once."""

from __future__ import annotations

import pickle
from typing import ClassVar

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torch import nn

from tests.same_data import assert_same, bits
from torchrl_mt.compact_pickle import dumps, loads

DTYPES = [
    torch.int64,
    torch.float32,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float64,
    torch.complex128,
]
BYTES = 16 * 12


def sent(data):
    """The data as another process gets it."""
    structure, memory = pickle.loads(pickle.dumps(dumps(data), protocol=5))
    return loads(structure, memory)


@st.composite
def views(draw, storages):
    """A view of one of the storages, of any dtype: a part, with gaps, turned, expanded or empty."""
    storage = draw(st.sampled_from(storages))
    start = draw(st.integers(0, BYTES // 16 - 1)) * 16
    stop = draw(st.integers(start // 16 + 1, BYTES // 16)) * 16
    tensor = storage[start:stop].view(draw(st.sampled_from(DTYPES)))
    cut = draw(st.integers(0, len(tensor)))
    kind = draw(st.sampled_from(["whole", "cut", "rest", "gaps", "turned", "column", "expanded"]))
    return {
        "whole": lambda: tensor,
        "cut": lambda: tensor[:cut],
        "rest": lambda: tensor[cut:],
        "gaps": lambda: tensor[::3],
        "turned": lambda: tensor[: cut - cut % 2].view(2, -1).mT,
        "column": lambda: tensor[: cut - cut % 2].view(-1, 2)[:, 1:],
        "expanded": lambda: tensor[:1].expand(3, 5, 1),
    }[kind]()


def storages_of(seeds):
    """Storages of zeros and ones, which every dtype can have."""
    return [torch.randint(2, (BYTES,), generator=g(s), dtype=torch.uint8) for s in seeds]


def g(seed):
    return torch.Generator().manual_seed(seed)


@st.composite
def tensor_lists(draw):
    storages = storages_of(range(draw(st.integers(1, 3))))
    return draw(st.lists(views(storages), min_size=1, max_size=6))


OBJECTS = st.one_of(
    st.text(max_size=3), st.none(), st.dictionaries(st.text(max_size=2), st.floats())
)


@st.composite
def tensordicts(draw):
    storages = storages_of(range(2))

    def node(depth):
        entries = {}
        for name in "abcd"[: draw(st.integers(0, 4))]:
            kind = draw(st.sampled_from(["tensor", "tensor", "object", "node", "steps"]))
            if kind == "object":
                entries[name] = NonTensorStack(*draw(st.lists(OBJECTS, min_size=1, max_size=3)))
            elif kind == "node" and depth:
                entries[name] = node(depth - 1)
            elif kind == "steps":
                dtype = draw(st.sampled_from(DTYPES))
                line = storages[0].view(dtype)
                ends = draw(st.lists(st.integers(0, len(line)), min_size=1, max_size=4))
                entries[name] = lazy_stack([TensorDict(x=line[:end], y="z") for end in ends])
            else:
                entries[name] = draw(views(storages))
        return TensorDict(entries, device=draw(st.sampled_from([None, "cpu"])))

    made = node(2)
    return made.lock_() if draw(st.booleans()) else made


def used_bytes(tensors):
    """Every byte that the tensors show, one by one."""
    used = set()
    for tensor in tensors:
        places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
        shown = places.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        base, width = tensor.untyped_storage().data_ptr(), tensor.element_size()
        for place in shown.flatten().tolist():
            used.update(range(base + place * width, base + (place + 1) * width))
    return used


def changed_by_a_write(tensors, written):
    """Which tensors a write to one of them changes."""
    before = [bits(tensor).clone() for tensor in tensors]
    tensors[written] ^= True if tensors[written].dtype is torch.bool else 1
    return {i for i, old in enumerate(before) if not torch.equal(old, bits(tensors[i]))}


@settings(max_examples=40, deadline=None)
@given(tensordicts())
def test_what_arrives_equals_what_was_sent(data):
    before = pickle.dumps(data)
    assert_same(sent(data), data)
    assert_same(data, pickle.loads(before))


@settings(max_examples=100, deadline=None)
@given(tensor_lists())
def test_each_used_byte_is_sent_once_and_no_other(tensors):
    for got, expected in zip(sent(tensors), tensors, strict=True):
        assert_same(got, expected)
    _, memory = dumps(tensors)
    sent_bytes = sum(part.data.nbytes for part in memory)
    # Columns with gaps are copied, at their own size.
    with_gaps = [tensor for tensor in tensors if tensor.numel() and not is_dense(tensor)]
    copied = sum(tensor.nbytes for tensor in with_gaps)
    dense = [tensor for tensor in tensors if tensor.numel() and is_dense(tensor)]
    assert sent_bytes == len(used_bytes(dense)) + copied


def is_dense(tensor):
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return reach <= tensor.numel()


@settings(max_examples=60, deadline=None)
@given(tensor_lists(), st.data())
def test_a_write_reaches_no_more_than_before(tensors, data):
    whole = [t for t in tensors if 0 not in t.stride() and not t.is_floating_point()]
    whole = [tensor for tensor in whole if not tensor.is_complex()]
    if not whole:
        return
    written = data.draw(st.integers(0, len(whole) - 1))
    got = sent(whole)
    before = [bits(tensor).clone() for tensor in whole]
    there = changed_by_a_write(got, written)
    assert all(torch.equal(old, bits(t)) for old, t in zip(before, whole, strict=True))
    assert there <= changed_by_a_write(whole, written)


def test_growing_prompts_are_linear():
    """The longest prompt is sent, and a few bytes for each of the others; so is what arrives."""
    line = torch.arange(16_000)
    prompts = lazy_stack([TensorDict(prompt=line[: 200 * (n + 1)]) for n in range(80)])
    structure, memory = dumps(prompts)
    assert memory[0].data.nbytes == line.nbytes
    assert len(structure) < 80 * 150
    got = loads(structure, memory).get("prompt", as_list=True)
    assert len({prompt.untyped_storage().data_ptr() for prompt in got}) == 1
    assert len(pickle.dumps(prompts)) > 80 * line.nbytes


def test_what_does_not_overlap_arrives_apart():
    parts = sent(list(torch.arange(9).split([2, 3, 4])))
    assert [part.untyped_storage().nbytes() - part.nbytes for part in parts] == [0, 0, 8]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 3


def test_what_is_unpickled_outlives_and_spares_what_was_pickled():
    line = torch.arange(4)
    (got,) = loads(*dumps([line[1:]]))
    got += 1
    assert line.tolist() == [0, 1, 2, 3]
    assert got.tolist() == [2, 3, 4]


def test_arrays_that_may_not_be_written_give_tensors_that_may():
    structure, memory = dumps(torch.arange(3))
    memory[0].data.flags.writeable = False
    assert loads(structure, memory).add_(1).tolist() == [1, 2, 3]


OTHERS = {
    "grad": lambda: torch.ones(3, requires_grad=True)[1:],
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "inference": lambda: inference(),
}


def inference():
    with torch.inference_mode():
        return torch.arange(3)[1:]


@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_with_more_to_them_than_memory_arrive(kind):
    tensor = OTHERS[kind]()
    line = torch.arange(5)
    got, here = sent([tensor, line[:2]])
    assert (got.layout, got.device, got.dtype) == (tensor.layout, tensor.device, tensor.dtype)
    assert got.requires_grad == tensor.requires_grad
    assert here.tolist() == [0, 1]
    if tensor.layout is torch.jagged:
        assert torch.equal(got.values(), tensor.values())
    elif not tensor.is_meta:
        assert torch.equal(got.detach().to_dense(), tensor.detach().to_dense())


def test_objects_are_sent_as_cloudpickle_sends_them():
    data = TensorDict(f=NonTensorStack(lambda: 3, np.arange(3)))
    function, array = sent(data).get("f").tolist()
    assert function() == 3
    assert array.tolist() == [0, 1, 2]
    assert array.flags.writeable
    with pytest.raises(Exception, match="cannot pickle"):
        dumps(TensorDict(f=NonTensorStack(i for i in ())))


def test_reducers_of_a_pickler_are_used():
    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar = {complex: lambda value: (str, ("seen",))}

    assert loads(*dumps({"a": 1j, "b": torch.ones(1)}, Pickler))["a"] == "seen"
