"""A checkpoint of what is trained: frozen parameters are not in it, all else comes back bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.tiers import examples
from torchrl_mt.datasets import RunCheckpoint, TrainedWeights
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss


class Net(nn.Module):
    """A shared parameter, a buffer and an extra state."""

    def __init__(self, seed=0, width=3):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(2, width), nn.Linear(2, width)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.norm.running_mean += torch.rand(width)
        self.extra = seed

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


PARAMETERS = [name for name, _ in Net().named_parameters()]


def frozen(net, names):
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in names)
    return net


@examples(15, few=2)
@given(st.sets(st.sampled_from(PARAMETERS)), st.booleans())
def test_frozen_parameters_stay_and_all_else_comes_back(tmp_path_factory, names, whole):
    folder = tmp_path_factory.mktemp("run")
    saved, net = frozen(Net(0), names), frozen(Net(1), names)
    before = copy.deepcopy(net.state_dict())
    RunCheckpoint(folder).save(3, trained=TrainedWeights(saved), other=[])
    assert RunCheckpoint(folder).restore(trained=TrainedWeights(net), other=[]) == 3
    there = [name for name in names if "weight" in name and "norm" not in name]
    left = names | ({"second.weight"} if there else set())
    for name, value in net.state_dict().items():
        if name == "_extra_state":
            assert value == {"extra": 0}
        else:
            assert torch.equal(value, (before if name in left else saved.state_dict())[name])


def test_engines_take_the_module_of_the_part_named_model(tmp_path):
    class Server:
        async def generate(self, prompt_ids): ...

        def update_weights(self, source):
            self.source = source

    net, server = Net(1), Server()
    RunCheckpoint(tmp_path).save(1, model=TrainedWeights(Net(0)))
    RunCheckpoint(tmp_path).restore(model=TrainedWeights(net), engine=server)
    assert server.source is net


def test_it_has_no_frozen_entries():
    net = frozen(Net(), {"first.weight", "norm.bias"})
    left_out = net.state_dict().keys() - TrainedWeights(net).state_dict().keys()
    assert left_out == {"first.weight", "second.weight", "norm.bias"}
    assert TrainedWeights(Net()).state_dict().keys() == Net().state_dict().keys()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (frozen(Net(1), {"first.bias"}), "got 'first.bias' in one of them only"),
        (Net(1, width=4), r"the shape \(3, 2\) as in the saved run, got \(4, 2\)"),
        (nn.Linear(2, 3), "the same parameters must be trained"),
    ],
    ids=["frozen", "shape", "another"],
)
def test_another_model_is_refused_and_stays(other, message, tmp_path):
    RunCheckpoint(tmp_path).save(1, trained=TrainedWeights(Net(0)), other=[1])
    kept, before = [], copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        RunCheckpoint(tmp_path).restore(trained=TrainedWeights(other), other=kept)
    assert not kept
    after = other.state_dict()
    assert all(torch.equal(after[k], before[k]) for k in before if k != "_extra_state")


def test_losses_and_makers_save_the_adapters_alone_and_once(tmp_path, model):
    config = LoraConfig(r=2, target_modules="all-linear")
    actor = get_peft_model(model, config)
    adapters = [p for p in actor.parameters() if p.requires_grad]
    for p in adapters:
        nn.init.normal_(p)
    parts = {
        "loss": TrainedWeights(MultiTurnLoss(actor)),
        "maker": TrainedWeights(ExperienceMaker(actor)),
    }
    for part in parts.values():
        names = part.state_dict().keys() - {"_extra_state"}
        assert len(names) == len(adapters)
        assert all("lora_" in name for name in names)
    RunCheckpoint(tmp_path).save(1, **parts)
    size = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
    assert size < 4 * sum(p.numel() for p in adapters) + 60_000
    expected = [p.detach().clone() for p in adapters]
    for p in adapters:
        nn.init.zeros_(p)
    RunCheckpoint(tmp_path).restore(**parts)
    assert all(map(torch.equal, expected, adapters))
