"""The value at a sampled token depends on the attended tokens before it and on nothing else."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, Qwen2Config, Qwen2ForCausalLM

from tests.scoring.helpers import DEVICES, close, entries
from tests.settings import grouped
from tests.tiers import pairs, some_fast
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring.values import ValueModel, row_values


@pytest.fixture(params=["value model", "token classification"])
def critic(request, model):
    if request.param == "value model":
        critic = ValueModel.from_model(model)
        nn.init.normal_(critic.head.weight)
        nn.init.normal_(critic.head.bias)
        return critic
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    return AutoModelForTokenClassification.from_config(config).eval()


def values(critic, tokens):
    out = critic(input_ids=tokens[None])
    return (out if isinstance(out, torch.Tensor) else out.logits[..., 0])[0]


@pytest.mark.parametrize("seed", some_fast([0], range(3)))
@pytest.mark.parametrize(("budget", "packed"), pairs([None, 1, 20], [False, True]))
def test_values_are_predicted_from_the_past_alone(critic, rows, seed, packed, budget):
    tokens, attention, mask = entries(rows(seed, suffix_padding=False))
    passes = Passes(packed=packed, micro_batch_tokens=budget)
    got = row_values(critic, tokens, attention, mask, passes=passes)
    expected = torch.zeros(tokens.shape)
    for n in range(len(tokens)):
        where = attention[n].nonzero().flatten().tolist()
        for i, t in enumerate(where):
            if mask[n, t] and i:
                # The token itself and all that follows are withheld.
                expected[n, t] = values(critic, tokens[n][where[:i]])[-1]
    assert expected.any()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_packed_and_padded_gradients_agree(critic, rows):
    out = []
    for packed in (False, True):
        row_values(critic, *entries(rows()), passes=Passes(packed=packed)).square().sum().backward()
        out.append([p.grad.clone() for p in critic.parameters() if p.grad is not None])
        critic.zero_grad()
    assert len(out[0]) > 4
    close(*out, 1e-4, 1e-4)


def test_a_new_head_predicts_zero_and_learns(model, rows):
    critic = ValueModel.from_model(model)
    batch = entries(rows())
    got = row_values(critic, *batch, passes=Passes(packed=True))
    assert not got.any()
    (got - 1).square().sum().backward()
    assert critic.head.weight.grad.any()
    assert critic.head.bias.grad.any()


def test_the_backbone_is_the_models_own_and_its_output_layer_is_left_out(model):
    critic = ValueModel.from_model(model)
    assert critic.backbone is model.model
    assert ValueModel.from_model(model.model).backbone is model.model
    theirs = {id(p) for p in model.lm_head.parameters()}
    assert not theirs & {id(p) for p in critic.parameters()}
    again = ValueModel.from_model(Qwen2ForCausalLM(model.config))
    again.load_state_dict(critic.state_dict())
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(again(tokens), critic(tokens))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_mixed_precision_gives_float32_values_nearby(model, rows, packed, device):
    critic = ValueModel.from_model(model).to(device)
    nn.init.normal_(critic.head.weight)
    batch = entries(rows())
    exact = row_values(critic, *batch)
    got = row_values(critic, *batch, passes=Passes(packed=packed, dtype=torch.bfloat16))
    assert got.dtype is torch.float32
    assert got.device.type == "cpu"
    assert 0 < (got - exact).norm() < 0.1 * exact.norm()


def test_half_precision_weights_work(model, rows):
    critic = ValueModel.from_model(model.bfloat16())
    nn.init.normal_(critic.head.weight)
    batch = entries(rows())
    got = row_values(critic.bfloat16(), *batch, passes=Passes(packed=True))
    assert got.dtype is torch.float32
    assert got.any()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"critic": "actor"}, ValueError, "critic must give one value for each token"),
        ({"critic": "three labels"}, ValueError, "num_labels=1"),
        ({"critic": print}, TypeError, "Module, got builtin_function"),
        ({"attention_mask": torch.zeros(6, 12).bool()}, ValueError, "must be false on padding"),
    ],
)
def test_bad_input_is_refused_by_name(model, rows, wrong, error, message):
    config = Qwen2Config(**model.config.to_dict() | {"num_labels": 3})
    critics = {"actor": model, "critic": ValueModel.from_model(model)}
    critics["three labels"] = AutoModelForTokenClassification.from_config(config)
    given = dict(zip(["tokens", "attention_mask", "mask"], entries(rows()), strict=True))
    given = {"critic": "critic", **given, **wrong}
    if isinstance(given["critic"], str):
        given["critic"] = critics[given["critic"]]
    with pytest.raises(error, match=message):
        row_values(**grouped(**given))


def test_a_critic_is_made_of_a_pretrained_model():
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel"):
        ValueModel.from_model(nn.Linear(2, 2))
