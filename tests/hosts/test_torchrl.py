"""What is private to TorchRL is as this package takes it to be."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
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


# ---- classes with TorchRL's metaclasses ---------------------------------------------------------


def test_the_hosts_metaclass_hides_what_a_class_is_made_with():
    class Hidden(RandomSampler):
        def __init__(self, span): ...

    class Shown(Hidden):
        __signature__ = hosts.ConstructorSignature()

    assert [*signature(Hidden).parameters] != ["span"]
    assert [*signature(Shown).parameters] == ["span"]


def test_the_metaclass_of_samplers_takes_replacement_for_a_choice_of_class():
    class Mine(Sampler):
        def __init__(self, *, replacement): ...

        def sample(self, storage, batch_size): ...

    with pytest.raises(TypeError, match="replacement"):
        Mine(replacement=False)


# ---- wrappers of language models ----------------------------------------------------------------


def test_a_wrapper_says_how_many_requests_it_waits_for(model, tokenizer):
    def wrapper(**kwargs):
        return TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", **kwargs)

    assert hosts.min_batch_size(wrapper()) is None
    assert hosts.min_batch_size(wrapper(batching=True, min_batch_size=3)) == 3
