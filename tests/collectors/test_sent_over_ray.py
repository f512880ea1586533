"""What is sent over Ray is linear in the length of conversations, and arrives as it was.

These tests need ``ray`` (``pip install 'torchrl-mt[ray]'``), and are skipped without it.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RayReplayBuffer, ReplayBuffer
from torchrl.data.replay_buffers import ray_buffer

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from tests.collectors.scripted import ScriptedEngine
from tests.same_data import assert_same
from torchrl_mt._hosts.ray import Sent, for_buffer
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
from torchrl_mt.testing import tiny_chat_tokenizer

ray = pytest.importorskip("ray", reason="needs ray: pip install 'torchrl-mt[ray]'")

LIGHT = {"num_cpus": 0}
EPISODES = 4
ANSWER = 200
"""Tokens of an answer."""
MOST = 36
"""Bytes sent per token: 8 in a prompt, 20 more of a sampled one, and some for each turn."""
PARTS = {
    "storage": partial(EpisodeStorage, 1000),
    "writer": EpisodeWriter,
    "sampler": partial(EpisodeSampler, replacement=False),
    "batch_size": EPISODES,
}


def make_engine():
    tokenizer = tiny_chat_tokenizer("1 2")
    word = tokenizer.convert_tokens_to_ids("1")
    answer = [word] * (ANSWER - 1) + [tokenizer.eos_token_id]
    return ScriptedEngine(tokenizer, lambda prompt: answer)


def play(turns, buffer):
    """Write a batch of conversations to a buffer; return it."""
    batches = []
    with collecting(
        Chat,
        make_engine,
        [{"turns": turns}],
        n=EPISODES,
        total_episodes=EPISODES,
        replay_buffer=buffer,
        postproc=lambda batch: batches.append(batch) or batch,
    ) as collector:
        assert list(collector) == [None]
    return batches[0]


def sent_bytes(data):
    """Bytes that Ray sends of the data."""
    buffers = []
    inline = ray.cloudpickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return len(inline) + sum(buffer.raw().nbytes for buffer in buffers)


def prompts_of(steps):
    return steps.get(("tokens", "prompt"), as_list=True)


class FarBuffer(ray_buffer._RayReplayBufferClient):
    """Stands for the client of a buffer in an actor: keeps what Ray sends."""

    def __init__(self):
        self.has_gpu, self.bytes, self.arrived = False, [], []

    def extend(self, data):
        data = ray_buffer._to_cpu(data)
        self.bytes.append(sent_bytes(data))
        self.arrived.append(pickle.loads(ray.cloudpickle.dumps(data)))


@pytest.mark.parametrize("turns", [1, 5, 20, 80])
def test_a_batch_arrives_as_it_was_in_bytes_linear_in_its_tokens(turns):
    far = FarBuffer()
    batch = play(turns, far)
    assert far.bytes[0] < MOST * turns * ANSWER * EPISODES
    assert_same(far.arrived[0], batch.to("cpu"))


def test_buffers_that_do_not_pickle_are_given_the_data():
    data = TensorDict(a=torch.ones(2))
    distributed = ray_buffer._LazyDistributedReplayClient.__new__(
        ray_buffer._LazyDistributedReplayClient
    )
    for buffer in (ReplayBuffer(), distributed):
        assert for_buffer(data, buffer) is data


def test_memory_maps_and_shared_memory_arrive_as_plain_memory(tmp_path):
    data = TensorDict(a=torch.ones(2), b=TensorDict(c=torch.zeros(1)), device="cpu")
    for kept in (data.memmap(tmp_path), data.clone().share_memory_()):
        got = pickle.loads(ray.cloudpickle.dumps(Sent(kept)))
        assert_same(got, data)
        assert not any((got.is_memmap(), got.is_shared(), got["a"].is_shared()))


# ---- with actors ----------------------------------------------------------------------------------


class Measured(ReplayBuffer):
    """A buffer that tells what its samples take."""

    def bytes_of_sample(self):
        return sent_bytes(self.sample())


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    # The actors need not find these modules: what is in them travels by value.
    for name in (__name__, Chat.__module__, ScriptedEngine.__module__):
        ray_cluster.cloudpickle.register_pickle_by_value(sys.modules[name])


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_buffers_and_samples_of_actors_are_linear_and_as_here():
    for turns in (1, 5, 20, 80):
        there = RayReplayBuffer(replay_buffer_cls=Measured, remote_config=LIGHT, **PARTS)
        here = ReplayBuffer(**PARTS)
        here.extend(play(turns, there))
        assert_same(there[:], here[:])
        assert_same(there[-1], here[-1])
        assert there.client().bytes_of_sample() < MOST * turns * ANSWER * EPISODES
        for rb in (there, here):
            rb.set_rng(torch.Generator().manual_seed(0))
        assert_same(there.sample(), here.sample())
        there.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_batches_of_an_actor_are_linear():
    collector = MultiTurnCollector.as_remote(LIGHT).remote(
        Chat, make_engine, [{"turns": 20}], episodes_per_batch=2, total_episodes=2
    )
    batch = ray.get(collector.next.remote())
    ray.get(collector.shutdown.remote())
    prompts = prompts_of(batch)
    assert len(prompts) == 40
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in prompts}
    assert sum(memory.values()) == sum(prompts[i].nbytes for i in (19, 39))
    batch["next", "reward"] += 1  # It may be written to, which Ray's own memory may not.
    prompts[0][0] += 1
    assert prompts[1][0] == prompts[0][0] != prompts[20][0]
