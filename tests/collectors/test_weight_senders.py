"""What TorchRL sends to what samples is counted as an update, once."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.weight_update.llm.sglang_nccl import SGLangWeightSender, SGLangWeightSyncScheme
from torchrl.weight_update.llm.vllm_nccl import VLLMWeightSender, VLLMWeightSyncScheme

from tests.collectors.chats import Chat
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.engines import CompletionsEngine, PolicyEngine


class Transport:
    """In the place of the NCCL group between trainer and server."""

    def __init__(self):
        self.sent = []

    def send_weights(self, model_id, weights):
        self.sent.append(weights)


def vllm(model):
    sender = VLLMWeightSender(VLLMWeightSyncScheme(master_port=1))
    sender._transport = Transport()
    sender.register_model(model)
    return sender


def sglang(model):
    sender = SGLangWeightSender(SGLangWeightSyncScheme(server_url="http://127.0.0.1:1"))
    sender._transport = Transport()
    sender.register_model(model)
    return sender


class Updater(WeightUpdaterBase):
    """Hooked up like TorchRL's own updaters of vLLM."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def register_collector(self, collector):
        super().register_collector(collector)
        self.register_post_hook(collector.increment_version)

    def _get_server_weights(self):
        return self.model.state_dict()

    def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        pass

    def update_weights(self):
        self.push_weights()


@pytest.fixture
def model():
    return nn.Linear(1, 1)


def versions(batch):
    return torch.cat(batch.get(("versions", "response"), as_list=True)).tolist()


@pytest.mark.parametrize("make_sender", [vllm, sglang, Updater])
def test_weights_that_torchrl_sends_are_counted(engine, model, make_sender):
    sender = make_sender(model)
    with MultiTurnCollector(Chat, engine, episodes_per_batch=1) as collector:
        sender.register_collector(collector)
        stream = iter(collector)
        for version in range(3):
            assert collector.policy_version == engine.version == version
            assert versions(next(stream)) == [version] * 2
            sender.update_weights()
        state = collector.state_dict()
    engine.version = 1  # as in a process that goes on
    with MultiTurnCollector(Chat, engine, episodes_per_batch=1) as collector:
        collector.load_state_dict(state)
        sender = make_sender(model)
        sender.register_collector(collector)
        sender.update_weights()
        assert collector.policy_version == 4
        assert versions(next(iter(collector))) == [4] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_update_that_uses_a_sender_counts_once(tokenizer, model, asynchronous):
    sender = vllm(model)

    async def later(source):
        await asyncio.sleep(0)
        sender.update_weights(source)

    engine = CompletionsEngine(
        *("http://127.0.0.1:1", "m", tokenizer),
        on_update=later if asynchronous else sender.update_weights,
    )
    with MultiTurnCollector(Chat, engine, episodes_per_batch=1) as collector:
        sender.register_collector(collector)
        collector.update_policy_weights_(model)
        assert len(sender._transport.sent) == collector.policy_version == 1
        sender.update_weights()
        assert len(sender._transport.sent) == collector.policy_version == 2
    engine.close()


def test_a_server_that_only_a_sender_updates_is_counted(tokenizer, model):
    """It has no way to take weights of its own."""
    engine = CompletionsEngine("http://127.0.0.1:1", "m", tokenizer)
    sender = vllm(model)
    with MultiTurnCollector(Chat, engine, episodes_per_batch=1) as collector:
        sender.register_collector(collector)
        sender.update_weights()
        assert collector.policy_version == engine.version == 1
    engine.close()


def test_a_policy_is_not_given_what_it_has(tokenizer, model):
    given = []
    engine = PolicyEngine(lambda td: td, tokenizer=tokenizer, on_update=given.append, check=False)
    with MultiTurnCollector(Chat, engine, episodes_per_batch=1) as collector:
        collector.increment_version()
        assert collector.policy_version == engine.version == 1
        assert not given
    engine.close()
