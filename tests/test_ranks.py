"""Models that are divided among ranks: found, gathered, and refused where a whole one is needed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.adapters import lora, stirred
from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import value_model
from tests.rank_processes import needs_gloo
from tests.scoring.vision_rows import vl_model
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.engines import TransformersEngine, adapter_weights, merged_weights, save_adapter
from torchrl_mt.engines.server_weights.saved_models import SavedModels
from torchrl_mt.engines.weights import check_whole, fitting_weights
from torchrl_mt.objectives import Advantage, ExperienceMaker, ExperiencePipeline, MultiTurnLoss
from torchrl_mt.objectives.rewards.model import ModelReward
from torchrl_mt.ranks import is_dtensor, is_sharded, local, most, reshard

pytestmark = needs_gloo
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@pytest.fixture
def alone():
    """A group of this process only, as the world."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_a_divided_model_is_found_also_while_its_parameters_are_gathered(alone):
    model = make_model()
    assert not is_sharded(model)
    assert not is_sharded(DistributedDataParallel(model))
    fully_shard(model)
    assert is_sharded(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    weight = next(model.parameters())
    assert not is_dtensor(weight)
    assert is_sharded(model)
    assert most(3, model) == 3
    reshard(model)
    weight = next(model.parameters())
    assert is_dtensor(weight)
    assert not is_dtensor(local(weight))
    assert most(4, model) == 4


def test_scoring_leaves_a_model_divided(alone):
    model = fully_shard(make_model())
    ExperienceMaker(model, old_log_probs="actor")(make_rows())
    assert all(map(is_dtensor, model.parameters()))


def test_weights_that_are_divided_must_be_gathered(alone, tmp_path):
    own, model = make_model(), make_model(1)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert fitting_weights(DistributedDataParallel(model), own).keys() == expected.keys()
    fully_shard(model)
    for source in (model, model.state_dict()):
        with pytest.raises(ValueError, match=r"divided among ranks.*full_state_dict=True"):
            fitting_weights(source, own)
        with pytest.raises(ValueError, match=r"divided among ranks.*full_state_dict=True"):
            SavedModels(tmp_path).save(source, 1)
    assert not list(tmp_path.iterdir())
    found = fitting_weights(get_model_state_dict(model, options=FULL), own)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name])


def test_an_engine_needs_a_whole_model(alone):
    model = fully_shard(make_model())
    with pytest.raises(ValueError, match="model must be whole"):
        TransformersEngine(model, None)
    with pytest.raises(ValueError, match="model must be whole"):
        check_whole(model)


def test_a_reward_model_must_be_whole(alone):
    model = fully_shard(nn.Embedding(24, 1))
    with pytest.raises(ValueError, match="reward model"):
        ModelReward(model)(make_rows())


def test_a_checkpoint_takes_whole_states_of_a_divided_model(alone, tmp_path):
    def run(seed):
        torch.manual_seed(seed)
        model = fully_shard(nn.Linear(2, 3))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = run(0)
    checkpoint = RunCheckpoint(tmp_path)
    for part in (model, optimizer):
        with pytest.raises(TypeError, match="divided among ranks"):
            checkpoint.save(1, part=part)
    weights, moments = get_state_dict(model, optimizer, options=FULL)
    checkpoint.save(1, model=weights, optimizer=moments)
    again, other = run(1)
    weights, moments = get_state_dict(again, other, options=FULL)
    assert RunCheckpoint(tmp_path).restore(model=weights, optimizer=moments) == 1
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=moments, options=whole)
    assert torch.equal(again.weight.full_tensor(), model.weight.full_tensor())
    one, two = (o.state_dict()["state"][0]["exp_avg"].full_tensor() for o in (optimizer, other))
    assert torch.equal(one, two)


def test_an_adapter_that_is_divided_must_be_gathered(alone, tmp_path):
    actor = lora(make_model())
    served = copy.deepcopy(actor)
    expected = merged_weights(actor)
    divided = fully_shard(actor)
    save = partial(save_adapter, folder=tmp_path / "adapter")
    for call in (merged_weights, adapter_weights, save):
        with pytest.raises(ValueError, match=r"divided among ranks.*copy of the PEFT model"):
            call(divided)
    weights = get_model_state_dict(divided, options=FULL)
    with pytest.raises(ValueError, match="a whole copy"):
        fitting_weights(weights, make_model())
    stirred(served)
    served.load_state_dict(weights)
    for name, weight in fitting_weights(served, make_model()).items():
        assert torch.equal(weight, expected[name])


def test_a_tower_is_not_frozen_behind_the_back_of_ddp(alone):
    model, _ = vl_model("qwen2_vl")
    critic = DistributedDataParallel(value_model(model))
    for options in ({"actor": DistributedDataParallel(model)}, {"actor": model, "critic": critic}):
        with pytest.raises(ValueError, match="freeze_vision=True comes too late"):
            MultiTurnLoss(freeze_vision=True, **options)
    assert all(p.requires_grad for p in model.parameters())
    model.model.visual.requires_grad_(False)
    MultiTurnLoss(DistributedDataParallel(model), freeze_vision=True)


def test_a_group_of_one_changes_nothing(alone):
    rows, model = make_rows, make_model()
    loss = MultiTurnLoss(model, objective="sft", aggregation="prompt_mean")
    assert torch.equal(loss.total(rows(), process_group=alone), loss.total(rows()))
    advantage = Advantage("grpo", whiten=True)
    one = ExperienceMaker(model, advantage=advantage)(rows())
    other = ExperienceMaker(model, advantage=advantage, process_group=alone)(rows())
    assert torch.equal(one["advantage"], other["advantage"])


@pytest.mark.parametrize("group", [0, "world", [0, 1]])
def test_what_is_no_group_is_refused(group):
    rows, model = make_rows, make_model()
    with pytest.raises(TypeError, match="process_group"):
        ExperienceMaker(model, process_group=group)
    with pytest.raises(TypeError, match="process_group"):
        MultiTurnLoss(model, objective="sft").total(rows(), process_group=group)


def test_what_would_see_one_rank_alone_is_refused(alone):
    model = make_model()
    with pytest.raises(ValueError, match="maker must have no process_group"):
        ExperiencePipeline([], ExperienceMaker(model, process_group=alone))
