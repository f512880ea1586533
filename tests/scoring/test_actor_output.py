"""What an actor returns is one distribution after each token that it was given, or it is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.scoring.helpers import INPUTS, entries
from tests.settings import grouped
from torchrl_mt.objectives import Passes, row_values
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.output_head import WHOLE_ONLY, OutputStates, output_states


class Around(nn.Module):
    """An actor that does something to a model's logits."""

    def __init__(self, model, change, *, layer=False):
        super().__init__()
        self.model, self.change, self.layer = model, change, layer

    def get_output_embeddings(self):
        return self.model.get_output_embeddings() if self.layer else None

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        return self.change(self.model(input_ids=input_ids, **given).logits)


class SoftPrompt(nn.Module):
    """Three virtual tokens come first, and their logits, too, as PEFT's prompt tuning has it."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.prompt = nn.Parameter(torch.randn(1, 3, 16))

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        states = self.model.get_input_embeddings()(input_ids)
        states = torch.cat([self.prompt.expand(len(states), -1, -1), states], 1)
        return self.model(inputs_embeds=states)


OUTPUTS = {
    "one short": lambda logits: logits[:, :-1],
    "three long": lambda logits: torch.cat([logits[:, :3], logits], 1),
    "transposed": lambda logits: logits.transpose(0, 1),
    "flat": lambda logits: logits.flatten(0, 1),
    "values": lambda logits: logits[..., 0],
    "in an object": lambda logits: SimpleNamespace(logits=logits[:, :-1]),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_logits_of_another_shape_are_refused_by_both_shapes(model, rows, name, full_logits, layer):
    actor, batch = Around(model, OUTPUTS[name], layer=layer), rows()
    width = int(batch["masks", "all_attention_mask"].sum(-1).max())
    with pytest.raises(ValueError) as error:
        row_log_probs(actor, *entries(batch), full_logits=full_logits)
    logits = OUTPUTS[name](torch.zeros(6, width, 24))
    got = tuple(getattr(logits, "logits", logits).shape)
    assert "actor must return logits" in str(error.value)
    assert f"(6, {width}, vocabulary)" in str(error.value)
    assert f"got {got}" in str(error.value)


@pytest.mark.parametrize("full_logits", [False, True])
def test_logits_of_a_soft_prompt_are_refused(model, rows, full_logits):
    with pytest.raises(ValueError, match="soft prompt"):
        row_log_probs(SoftPrompt(model), *entries(rows()), full_logits=full_logits)


@pytest.mark.parametrize("actor", ["soft prompt", "one short", "transposed", "flat"])
def test_packed_logits_of_another_shape_are_refused_by_both_shapes(model, rows, actor):
    actor = SoftPrompt(model) if actor == "soft prompt" else Around(model, OUTPUTS[actor])
    with pytest.raises(ValueError, match=r"\(\d+, \d+.*\(\d+, \d+"):
        row_log_probs(actor, *entries(rows()), passes=Passes(packed=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda logits: (logits,), "tuple"),
        (lambda logits: None, "NoneType"),
        (lambda logits: {"logits": logits}, "dict"),
    ],
)
def test_an_output_without_logits_is_refused_by_its_type(
    model, rows, packed, full_logits, change, kind
):
    actor, options = Around(model, change), {"packed": packed, "full_logits": full_logits}
    with pytest.raises(TypeError, match=f"logits.* got {kind}"):
        row_log_probs(actor, *entries(rows()), **grouped(**options))


@pytest.mark.parametrize("packed", [False, True])
def test_a_critic_without_values_is_refused(model, rows, packed):
    critic = Around(model, lambda logits: (logits,))
    with pytest.raises((TypeError, ValueError), match="got tuple"):
        row_values(critic, *entries(rows()), passes=Passes(packed=packed))


class Checkpointed(nn.Module):
    """A model under one checkpoint; reentrant, nothing inside has a graph in the forward pass."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, input_ids, attention_mask=None):
        def run(_, *inputs):
            return self.model(input_ids=inputs[0], attention_mask=inputs[1]).logits

        anchor = torch.zeros((), requires_grad=True)
        return checkpoint(run, anchor, input_ids, attention_mask, use_reentrant=self.reentrant)


def gradients(actor, rows, model):
    model.zero_grad()
    row_log_probs(actor, *entries(rows))[0].square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpointed_model_is_trained_whole(make_model, rows, reentrant, tied, frozen):
    model, batch = make_model(tie_word_embeddings=tied), rows()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter is model.lm_head.weight or "embed" in name)
    expected = gradients(model, batch, model)
    got = gradients(Checkpointed(model, reentrant), batch, model)
    assert sum(g is not None for g in expected) == (2 - tied if frozen else len(expected))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_states_without_a_graph_are_taken_where_none_is_needed(make_model, rows):
    for frozen in (False, True):
        model = make_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "lm_head" in name)
        with torch.set_grad_enabled(frozen):
            assert isinstance(output_states(model, INPUTS), OutputStates)


class Toy(nn.Module):
    """Embeddings and an output layer that is called as ``call`` likes."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lm_head, self.call = nn.Embedding(24, 8), nn.Linear(8, 24), call
        self.calls = 0

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask):
        self.calls += 1
        return self.call(self.lm_head, self.table(input_ids), attention_mask)


CALLS = {
    "keyword": lambda layer, x, _: layer(input=x),
    "flattened": lambda layer, x, _: layer(x.flatten(0, 1)).view(*x.shape[:2], -1),
    "row by row": lambda layer, x, _: torch.stack([layer(row) for row in x]),
    "transposed": lambda layer, x, _: layer(x.transpose(0, 1)).transpose(0, 1),
    "last first": lambda layer, x, _: layer(x[:, -1:]).sum() * 0 + layer(x),
    "masked": lambda layer, x, mask: layer(x).masked_fill(mask[..., None] == 0, 0.0),
    "shaped": lambda layer, x, _: layer(x).view(*x.shape[:2], -1),
}


@pytest.mark.parametrize("call", CALLS)
def test_output_layers_may_be_called_in_any_way(rows, call):
    model, batch = Toy(CALLS[call]), entries(rows())
    for _ in range(2):
        got = [*gradients(model, rows(), model), row_log_probs(model, *batch)[0]]
    expected = row_log_probs(model, *batch, full_logits=True)[0]
    model.zero_grad()
    expected.square().sum().backward()
    for a, b in zip(got, [*(p.grad for p in model.parameters()), expected], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", ["masked", "shaped"])
def test_a_model_that_fails_without_all_logits_is_run_whole_from_then_on(call):
    model = Toy(CALLS[call])
    output_states(model, INPUTS)
    assert model.calls == 2
    assert model in WHOLE_ONLY
    output_states(model, INPUTS)
    assert model.calls == 3
    assert not model.lm_head._forward_hooks


@pytest.mark.parametrize("call", ["keyword", "flattened", "row by row"])
def test_a_call_that_is_left_alone_costs_no_second_pass(call):
    model = Toy(CALLS[call])
    assert isinstance(output_states(model, INPUTS), torch.Tensor)
    assert model.calls == 1


@pytest.mark.parametrize("calls", [1, 2])
def test_a_failure_of_the_models_own_is_raised_and_not_remembered(calls):
    def fail(layer, x, mask):
        if calls == 2:
            layer(x)
        raise KeyError("its own")

    model = Toy(fail)
    with pytest.raises(KeyError, match="its own"):
        output_states(model, INPUTS)
    assert model.calls == calls
    assert model not in WHOLE_ONLY
