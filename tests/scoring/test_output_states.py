"""Scores without whole logits are those with them, or whole logits are what one gets."""

import threading
from importlib import import_module

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scoring.helpers import INPUTS, close, entries, tiny
from tests.settings import grouped
from tests.tiers import pairs, slow
from tests.waiting import in_thread
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring import output_head as module
from torchrl_mt.scoring.linear_log_probs import linear_log_probs
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.output_head import OutputStates, output_states


def build(family="Qwen2", scale=1.0, **options):
    model = tiny(family, **{"num_hidden_layers": 1, "head_dim": 8} | options)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=scale)
    return model


FAMILIES = [
    ("Qwen2", {}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Gemma2", {"final_logit_softcapping": 2.0, "attn_implementation": "eager"}),
    ("Gemma2", {"final_logit_softcapping": None, "attn_implementation": "eager"}),
    ("Cohere", {"logit_scale": 0.25}),
    ("Granite", {"logits_scaling": 4.0}),
    ("Phi", {"num_key_value_heads": 2}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=[f"{f}-{o}" for f, o in FAMILIES])
@pytest.mark.parametrize(
    ("dtype", "scale"), pairs([torch.float64, torch.float32, torch.bfloat16], [1.0, 1e-3])
)
def test_the_models_own_logits_come_of_its_states(family, options, dtype, scale):
    model = build(family, scale, **options).to(dtype)
    states = output_states(model, INPUTS)
    assert isinstance(states, OutputStates)
    got = nn.functional.linear(states.hidden, states.weight, states.bias).double() * states.scale
    if states.softcap is not None:
        got = states.softcap * torch.tanh(got / states.softcap)
    expected = model(**INPUTS).logits.double()
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()
    assert model not in module.WHOLE_ONLY


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=[f"{f}-{o}" for f, o in FAMILIES])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_are_those_of_whole_logits(rows, family, options, temperature):
    model, batch = build(family, **options).double(), rows(suffix_padding=False)
    out = []
    for full in (True, False):
        passes = Passes(temperature=temperature, with_entropy=True)
        log_prob, entropy = row_log_probs(model, *entries(batch), passes=passes, full_logits=full)
        (log_prob.square().sum() + entropy.sum()).backward()
        out.append((log_prob, entropy, *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    assert out[0][0].any()
    close(*out)


class Adapter(nn.Linear):
    pass


class Shifted(transformers.Qwen2ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


def unusual(kind):
    model = build()
    if kind == "adapter":
        layer = Adapter(16, 24, bias=False)
        layer.weight = model.lm_head.weight
        model.lm_head = layer
    elif kind == "hook":
        model.lm_head.register_forward_hook(lambda _, args, output: 2 * output)
    elif kind == "parametrized":
        nn.utils.parametrizations.weight_norm(model.lm_head)
    elif kind == "compiled":
        model = torch.compile(model, backend="eager")
    elif kind == "other logits":
        model.__class__ = Shifted
    elif kind == "wrapped call":
        model.lm_head.forward = lambda x: nn.functional.linear(2 * x, model.lm_head.weight)
    return model


@pytest.mark.parametrize(
    "kind", ["adapter", "hook", "parametrized", slow("compiled"), "other logits", "wrapped call"]
)
def test_models_with_other_output_layers_give_whole_logits(kind):
    model = unusual(kind)
    expected = model(**INPUTS).logits
    for _ in range(2):
        states = output_states(model, INPUTS)
        assert isinstance(states, torch.Tensor)
        torch.testing.assert_close(states, expected, atol=0, rtol=0)


def test_nothing_stays_on_the_model_even_after_a_failure():
    model = build()
    output_states(model, INPUTS)
    fault = model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output_states(model, INPUTS)
    fault.remove()
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_other_threads_get_whole_logits_meanwhile():
    model, seen = build(), []

    def elsewhere(*_):
        if not seen and threading.current_thread() is threading.main_thread():
            seen.append(in_thread(lambda: model(**INPUTS).logits.shape)())

    model.model.norm.register_forward_hook(elsewhere)
    assert isinstance(output_states(model, INPUTS), OutputStates)
    assert seen == [(3, 6, 24)]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel())
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_no_tensor_has_the_size_of_the_logits(monkeypatch, packed):
    monkeypatch.setattr(import_module(linear_log_probs.__module__), "CHUNK_ELEMENTS", 5000)
    model = build(vocab_size=1000)
    tokens = torch.randint(3, 1000, (8, 40), generator=torch.Generator().manual_seed(0))
    attended = torch.arange(40) < torch.arange(40, 0, -5)[:, None]
    sizes = []
    for full in (True, False):
        with Largest() as largest:
            options = grouped(with_entropy=True, packed=packed, full_logits=full)
            log_prob, entropy = row_log_probs(model, tokens, attended, attended, **options)
            (log_prob + entropy).sum().backward()
        sizes.append(largest.size)
    states = 8 * 40 if not packed else 5 * 40
    assert sizes[0] >= states * 1000
    # The weights, and attention's scores.
    assert sizes[1] <= 32_000


@pytest.mark.parametrize("family", ["Qwen2", "Granite"])
def test_a_wrapper_is_looked_through_and_called(rows, family):
    options = {"logits_scaling": 4.0} if family == "Granite" else {}
    model = build(family, **options)
    wrapper, calls = nn.DataParallel(nn.DataParallel(model)), []
    wrapper.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["use_cache"]), with_kwargs=True
    )
    states = output_states(wrapper, INPUTS)
    assert isinstance(states, OutputStates)
    assert states.scale == output_states(model, INPUTS).scale
    assert wrapper not in module.WHOLE_ONLY
    assert calls == [False]
    args = entries(rows())
    for packed in (False, True):
        both = [row_log_probs(m, *args, passes=Passes(packed=packed))[0] for m in (wrapper, model)]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("packed", [False, True])
def test_distributed_data_parallel_gets_every_gradient(rows, options, packed):
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        args, expected = entries(rows()), build()
        row_log_probs(expected, *args)[0].sum().backward()
        model = build()
        parallel = nn.parallel.DistributedDataParallel(model, **options)
        assert isinstance(output_states(parallel, INPUTS), OutputStates) == (not options)
        parallel = nn.parallel.DistributedDataParallel(model, **options)
        for _ in range(2):
            model.zero_grad()
            row_log_probs(parallel, *args, passes=Passes(packed=packed))[0].sum().backward()
            close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])
    finally:
        distributed.destroy_process_group()


def test_nan_in_one_pass_is_not_held_against_the_model():
    model = build()
    weight = model.get_output_embeddings().weight.detach().clone()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    assert isinstance(output_states(model, INPUTS), torch.Tensor)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(weight)
    assert isinstance(output_states(model, INPUTS), OutputStates)


ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
MORE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class Changed(nn.Module):
    """A language model whose logits are its output layer's but for a share of them."""

    def __init__(self, by, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 16)
        self.head = nn.Linear(16, 24)
        self.by = by
        self.to(dtype)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None):
        logits = self.head(self.table(input_ids)).float()
        return logits + self.by * logits.abs().max() * torch.linspace(-1, 1, 24)


def given_by(by, dtype):
    model = Changed(by, dtype)
    ids = torch.arange(24).view(2, 12)
    return model, output_states(model, {"input_ids": ids})


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_is_not_taken_for_another_layer(dtype):
    _, states = given_by(ROUNDING[dtype], dtype)
    assert isinstance(states, OutputStates)


@pytest.mark.parametrize("dtype", MORE)
@pytest.mark.parametrize("factor", [1, 10])
def test_what_is_more_than_rounding_has_its_own_logits(dtype, factor):
    by = factor * MORE[dtype]
    model, states = given_by(by, dtype)
    assert isinstance(states, torch.Tensor)
    ids = torch.arange(24).view(2, 12)
    ones = torch.ones(2, 12, dtype=torch.bool)
    expected = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    got = row_log_probs(model, ids, ones, ones)[0][:, 1:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
