"""What is private to TorchRL is as this package takes it to be."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper

from torchrl_mt._hosts import torchrl as hosts

# ---- replay buffers, their storages and samplers ------------------------------------------------


@pytest.fixture
def buffer():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=1)
    rb.extend(TensorDict({"a": torch.arange(5)}, [5]))
    return rb


def test_a_storage_lists_its_buffers_and_they_their_parts(buffer):
    other = ReplayBuffer(storage=buffer.storage)
    assert hosts.buffers_on(buffer.storage) == [buffer, other]
    assert hosts.writer_of(buffer) is buffer.writer
    assert hosts.sampler_of(buffer) is buffer.sampler
    assert hosts.writer_of(object()) is hosts.sampler_of(object()) is None


def test_a_buffer_that_is_yet_to_be_made_is_not_made():
    late = ReplayBuffer(storage=lambda: LazyTensorStorage(10), delayed_init=True)
    hosts.writer_of(late)
    assert not late.initialized


# ---- wrappers of language models ----------------------------------------------------------------


def test_a_wrapper_says_how_many_requests_it_waits_for(model, tokenizer):
    def wrapper(**kwargs):
        return TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", **kwargs)

    assert hosts.min_batch_size(wrapper()) is None
    assert hosts.min_batch_size(wrapper(batching=True, min_batch_size=3)) == 3
