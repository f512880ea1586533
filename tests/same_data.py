"""Whether data is the same to a reader, also in what ``==`` of TensorDicts does not see."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict
from tensordict.utils import is_non_tensor
from torch import Tensor


def assert_same(got, expected):
    """Compare values and everything else that a reader can see."""
    assert host_class(got) is host_class(expected)
    if isinstance(expected, Tensor):
        assert (got.dtype, got.shape, got.device) == (
            expected.dtype,
            expected.shape,
            expected.device,
        )
        assert torch.equal(bits(got), bits(expected))
        return
    assert (got.batch_size, got.device) == (expected.batch_size, expected.device)
    assert got.is_locked == expected.is_locked
    if isinstance(expected, LazyStackedTensorDict):
        assert got.stack_dim == expected.stack_dim
        for one, other in zip(got.tensordicts, expected.tensordicts, strict=True):
            assert_same(one, other)
    elif is_non_tensor(expected):
        assert repr(got.data) == repr(expected.data)
    else:
        keys = list(expected.keys())
        assert list(got.keys()) == keys
        for key in keys:
            assert_same(got.get(key), expected.get(key))


def host_class(value):
    """The class of torch or tensordict: a batch that nobody has read yet is of a subclass of ours."""
    return next(c for c in type(value).__mro__ if not c.__module__.startswith("torchrl_mt."))


def bits(tensor):
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
