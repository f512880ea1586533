"""What is private to TorchRL is as this package takes it to be."""

from __future__ import annotations

import threading
from inspect import signature

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.modules.llm import TransformersWrapper

from tests.waiting import PATIENCE
from torchrl_mt._hosts import torchrl as hosts
from torchrl_mt.objectives import MultiTurnLoss

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


def test_a_sampler_begins_anew():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3
    )
    rb.extend(torch.arange(5))
    rb.sample()
    hosts.forget(rb.sampler)
    assert {*rb.sample(3).tolist(), *rb.sample(2).tolist()} == {0, 1, 2, 3, 4}


def test_nobody_writes_or_samples_while_a_buffer_is_held(buffer):
    buffer.sample()
    others = [
        threading.Thread(target=buffer.sample),
        threading.Thread(target=buffer.extend, args=(TensorDict({"a": torch.arange(2)}, [2]),)),
    ]
    with hosts.buffer_held(buffer):
        assert all(batch.done() for batch in hosts.prefetched_batches(buffer))
        for other in others:
            other.start()
        for other in others:
            other.join(0.05)
            assert other.is_alive()
    for other in others:
        other.join(PATIENCE)
    assert len(buffer) == 7


def test_prefetched_batches_can_be_taken_away(buffer):
    buffer.sample()
    assert len(hosts.prefetched_batches(buffer)) == 1
    hosts.prefetched_batches(buffer).clear()
    assert len(buffer.sample()) == 2


def test_prefetched_batches_are_saved_by_others(buffer, tmp_path):
    buffer.sample()
    held = []
    with hosts.prefetched_batches_saved_by(buffer, lambda *a: held.append(a), lambda _: held[0][1]):
        buffer.dumps(tmp_path)
        hosts.prefetched_batches(buffer).clear()
        buffer.loads(tmp_path)
    assert not (tmp_path / "prefetch.pkl").exists()
    assert held[0][0] == tmp_path
    assert len(hosts.prefetched_batches(buffer)) == 1
    buffer.dumps(tmp_path)
    assert (tmp_path / "prefetch.pkl").exists()


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


# ---- losses ---------------------------------------------------------------------------------------


def test_a_loss_names_the_masks_that_it_reads():
    loss = MultiTurnLoss(nn.Embedding(2, 2))
    assert ("collector", "mask") in hosts.loss_mask_keys(loss)
    loss.loss_mask_key = "mine"
    assert hosts.loss_mask_keys(loss) == ("mine",)


# ---- wrappers of language models ----------------------------------------------------------------


def test_a_wrapper_says_how_many_requests_it_waits_for(model, tokenizer):
    def wrapper(**kwargs):
        return TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", **kwargs)

    assert hosts.min_batch_size(wrapper()) is None
    assert hosts.min_batch_size(wrapper(batching=True, min_batch_size=3)) == 3
