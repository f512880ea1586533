"""What TorchRL sends to what samples is counted as an update, once."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from torchrl.weight_update.llm.sglang_nccl import SGLangWeightSender, SGLangWeightSyncScheme
from torchrl.weight_update.llm.vllm_nccl import VLLMWeightSender, VLLMWeightSyncScheme

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting, versions_in
from torchrl_mt.engines import CompletionsEngine, PolicyEngine, TransformersEngine


class Transport:
    """In the place of the NCCL group between trainer and server."""

    def __init__(self):
        self.sent = []

    def send_weights(self, model_id, weights):
        self.sent.append(weights)


def registered(sender, model):
    sender._transport = Transport()
    sender.register_model(model)
    return sender


def vllm(model):
    return registered(VLLMWeightSender(VLLMWeightSyncScheme(master_port=1)), model)


def sglang(model):
    scheme = SGLangWeightSyncScheme(server_url="http://127.0.0.1:1")
    return registered(SGLangWeightSender(scheme), model)


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
def linear():
    return nn.Linear(1, 1)


@pytest.mark.parametrize("make_sender", [vllm, sglang, Updater])
def test_weights_that_torchrl_sends_are_counted(engine, linear, make_sender):
    sender = make_sender(linear)
    with collecting(Chat, engine) as collector:
        sender.register_collector(collector)
        stream = iter(collector)
        for version in range(3):
            assert collector.policy_version == engine.version == version
            assert versions_in(next(stream)) == {version}
            sender.update_weights()
        state = collector.state_dict()
    engine.version = 1  # as in a process that goes on
    with collecting(Chat, engine) as collector:
        collector.load_state_dict(state)
        sender = make_sender(linear)
        sender.register_collector(collector)
        sender.update_weights()
        assert collector.policy_version == 4
        assert versions_in(next(iter(collector))) == {4}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_update_that_uses_a_sender_counts_once(tokenizer, linear, asynchronous):
    sender = vllm(linear)

    async def later(source):
        await asyncio.sleep(0)
        sender.update_weights(source)

    on_update = later if asynchronous else sender.update_weights
    engine = CompletionsEngine("http://127.0.0.1:1", "m", tokenizer, on_update=on_update)
    with collecting(Chat, engine) as collector:
        sender.register_collector(collector)
        collector.update_policy_weights_(linear)
        assert len(sender._transport.sent) == collector.policy_version == 1
        sender.update_weights()
        assert len(sender._transport.sent) == collector.policy_version == 2
    engine.close()


def test_a_server_that_only_a_sender_updates_is_counted(tokenizer, linear):
    """It has no way to take weights of its own."""
    engine, sender = CompletionsEngine("http://127.0.0.1:1", "m", tokenizer), vllm(linear)
    with collecting(Chat, engine) as collector:
        sender.register_collector(collector)
        sender.update_weights()
        assert collector.policy_version == engine.version == 1
    engine.close()


def test_a_policy_is_not_given_what_it_has(tokenizer):
    given = []
    engine = PolicyEngine(lambda td: td, tokenizer=tokenizer, on_update=given.append, check=False)
    with collecting(Chat, engine) as collector:
        collector.increment_version()
        assert collector.policy_version == engine.version == 1
        assert not given
    engine.close()


def test_a_weight_updater_sends_what_update_policy_weights_is_given(engine, linear):
    class Counting(Updater):
        """Registers no hook: the collector counts by itself."""

        def register_collector(self, collector):
            WeightUpdaterBase.register_collector(self, collector)

        def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
            sent.append(server_weights)

    for made in (Updater(linear), Counting(linear)):
        sent = []
        with collecting(Chat, engine) as collector:
            before = collector.policy_version
            collector.weight_updater = made
            collector.update_policy_weights_(dict(linear.state_dict()))
            assert collector.policy_version == before + 1
            collector.update_policy_weights_()
            assert collector.policy_version == before + 2
        assert [*map(set, sent)] == [{"weight", "bias"}] * (2 if isinstance(made, Counting) else 0)


# Schemes that bring weights to a collector


def other_end(scheme):
    """The scheme as another process would get it; its queues do not leave a process by pickling."""
    received = object.__new__(type(scheme))
    received.__setstate__(scheme.__getstate__())
    return received


def noisy(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return changed


def has_weights(engine, model):
    return all(
        torch.equal(own, given)
        for own, given in zip(engine.model.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("make_scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_weights_arrive_between_two_steps_and_are_counted(make_scheme, tokenizer, model):
    trained = noisy(model)
    engine = TransformersEngine(model, tokenizer, max_new_tokens=2)
    sender = make_scheme()
    sender.init_on_sender(model_id="policy", model=trained, devices=[torch.device("cpu")])
    receiver = other_end(sender)
    with collecting(Chat, engine) as collector:
        stream = iter(collector)
        assert versions_in(next(stream)) == {0}
        sender.connect()
        collector.register_scheme_receiver({"policy": receiver})
        assert has_weights(engine, trained)
        assert versions_in(next(stream)) == {1}
        # What the scheme writes to is not what is sampled from.
        own = {weight.data_ptr() for weight in engine.model.parameters()}
        assert own.isdisjoint(w.data_ptr() for w in collector.get_model("policy").parameters())
        trained = noisy(trained)
        sender.send(TensorDict.from_module(trained).data)  # returns when it has arrived
        assert has_weights(engine, trained)
        assert versions_in(next(stream)) == {2}
    engine.close()


def test_no_weights_are_waited_for_by_the_scheme_that_sends_none(engine):
    with collecting(Chat, engine) as collector:
        collector.register_scheme_receiver({"policy": NoWeightSyncScheme()})
        collector.receive_weights()
        assert collector.policy_version == 0


def test_weights_that_are_given_are_received(tokenizer, model):
    trained = noisy(model)
    with collecting(Chat, TransformersEngine(model, tokenizer)) as collector:
        collector.receive_weights(trained)
        assert has_weights(collector.engine, trained)
        assert collector.policy_version == 1
        collector.engine.close()


@pytest.mark.parametrize(
    ("model", "scheme", "words"),
    [
        ("policy", VLLMWeightSyncScheme(master_port=1), "VLLMWeightSyncScheme.*register_collector"),
        ("policy", DistributedWeightSyncScheme(), "DistributedWeightSyncScheme is not supported"),
        ("policy", SharedMemWeightSyncScheme(), "ScriptedEngine has no model in this process"),
        ("policy", 1, "must hold TorchRL's weight-sync schemes, got int"),
        ("critic", NoWeightSyncScheme(), "must be of the model 'policy'.*got 'critic'"),
    ],
)
def test_schemes_that_bring_no_weights_here_are_refused(engine, model, scheme, words):
    with collecting(Chat, engine) as collector, pytest.raises((TypeError, ValueError), match=words):
        collector.register_scheme_receiver({model: scheme})
