"""A leak between packed rows is found however weak it is, and rounding is not taken for one."""

import pytest
import torch
from torch import nn

from tests.scoring.helpers import tiny
from tests.tiers import pairs
from torchrl_mt.scoring.packing_check import packing_fault

TOKENS = torch.arange(3, 64)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
OTHER_SIZES = {
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "Bloom": {"n_head": 4},
    "XGLM": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "Bert": {"is_decoder": True},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 3},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 3},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    | {"head_dim": 8},
}
TYPES = [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
# Each type and each size of weights once in the fast tier.
SCALES = pairs([0.03, 1.0, 20.0], TYPES)


def fresh(family, scale=1.0, **options):
    """A model as its first training step finds it, but for the weights' size."""
    model = tiny(family, **SIZES | OTHER_SIZES.get(family, {}) | options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scale", "types"), SCALES)
@pytest.mark.parametrize("family", ["XGLM", "Bert", "Lfm2", "FalconH1", "OPT", "Bloom", "Mamba"])
def test_a_leak_through_weak_weights_is_a_leak(family, scale, types):
    weights, dtype = types
    model = fresh(family, scale).to(weights)
    assert "see each other" in packing_fault(model, TOKENS, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scale", "types"), SCALES)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"attn_implementation": "eager"}),
        ("Qwen2", {}),
        ("Gemma2", {"attn_implementation": "eager"}),
        ("Gemma3Text", {}),
        ("GPT2", {}),
        ("Mixtral", {}),
        ("Qwen3Moe", {"hidden_size": 256}),
    ],
    ids=lambda x: "" if x == {} else None,
)
def test_models_that_keep_rows_apart_are_accepted(family, options, scale, types):
    weights, dtype = types
    model = fresh(family, scale, **options).to(weights)
    assert packing_fault(model, TOKENS, dtype) is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("weights", "dtype"), TYPES)
def test_what_holds_in_one_type_is_not_taken_for_another(weights, dtype):
    class Mixing(nn.Module):
        """Keeps rows apart in one type alone."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 8, dtype=weights)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            out = self.table(input_ids)
            autocast = torch.is_autocast_enabled("cpu")
            apart = out.dtype is weights and autocast == (dtype is not None)
            return out if apart else out + 1e-4 * out.mean(1, keepdim=True)

    model = Mixing()
    assert packing_fault(model, TOKENS, dtype) is None
    for other_weights, other_dtype in TYPES:
        if (other_weights, other_dtype) != (weights, dtype):
            assert packing_fault(model.to(other_weights), TOKENS, other_dtype) is not None
    assert packing_fault(model.to(weights), TOKENS, dtype) is None
    with torch.autocast("cpu", torch.bfloat16):
        told = packing_fault(model.to(torch.float32), TOKENS)
    assert (told is None) == ((weights, dtype) == (torch.float32, torch.bfloat16))


class Table(nn.Module):
    """Embeddings, changed in place as some models do, and what the rows beside add to them."""

    def __init__(self, leak):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 8)
        self.leak = leak

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        out = self.table(input_ids).mul_(2.0)
        if position_ids is None:
            return out
        row = (position_ids == 0).cumsum(-1)
        return out + 1e-6 * self.leak(out, row)


def of_rows(wanted):
    """Mean over the tokens of other rows of the same sequence: those whose number is wanted."""

    def leak(out, row):
        weight = wanted(row[:, None], row[:, :, None]).to(out)
        return weight @ out

    return leak


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (of_rows(lambda a, b: a == b), False),
        (of_rows(lambda a, b: a < b), True),
        (of_rows(lambda a, b: a > b), True),
        (lambda out, row: 1e-6 * of_rows(lambda a, b: a < b)(out, row), True),
        (lambda out, row: out.sum((0, 1)) - out.sum(1, keepdim=True), True),
    ],
    ids=["itself", "earlier", "later", "far below rounding", "another sequence"],
)
def test_rows_are_kept_apart_from_all_others_of_the_pass(leak, told):
    fault = packing_fault(Table(leak), TOKENS)
    assert (fault is not None) == told
    assert not told or "see each other" in fault


def test_a_leak_that_has_no_gradient_is_refused_where_it_is_more_than_rounding():
    def crowded(out, row):
        return 1e6 * (out.mean((0, 1)) > 0).to(out)

    def detached(out, row):
        return 1e6 * out.mean((0, 1)).detach()

    assert packing_fault(Table(crowded), TOKENS) is not None
    assert packing_fault(Table(detached), TOKENS) is not None


class Backless(torch.autograd.Function):
    """A kernel that has no backward pass."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("not implemented")


@pytest.mark.parametrize(
    "kernel",
    [Backless.apply, torch.round, torch.Tensor.detach, lambda x: x + (0 * x).sqrt()],
    ids=["none", "zero", "cut", "NaN"],
)
def test_where_the_gradient_is_none_not_a_bit_may_change(kernel):
    def model(leak):
        out = Table(lambda out, row: leak(kernel(out), row))
        out.register_forward_hook(lambda *args: kernel(1e8 * args[-1]))
        return out

    assert packing_fault(model(of_rows(lambda a, b: a == b)), TOKENS) is None
    assert "see each other" in packing_fault(model(of_rows(lambda a, b: a < b)), TOKENS)


def test_models_are_told_apart_in_inference_mode_too():
    with torch.inference_mode():
        assert packing_fault(Table(of_rows(lambda a, b: a == b)), TOKENS.clone()) is None
        assert packing_fault(Table(of_rows(lambda a, b: a < b)), TOKENS.clone()) is not None


def test_a_model_is_tried_the_same_way_in_inference_mode():
    def noisy(out, row):
        return of_rows(lambda a, b: a == b)(out, row) + 10.0 * torch.rand(1)

    # Not to the bit the same twice: a gradient tells nevertheless.
    with torch.inference_mode():
        assert packing_fault(Table(noisy), TOKENS.clone()) is None


def test_what_does_not_depend_on_tokens_tells_nothing_and_is_not_remembered():
    class New(nn.Module):
        """A critic whose output layer is zero as yet, over states that leak."""

        def __init__(self):
            super().__init__()
            self.body = Table(of_rows(lambda a, b: a < b))
            self.head = nn.Linear(8, 1)
            nn.init.zeros_(self.head.weight)

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return self.head(self.body(input_ids, attention_mask, position_ids)).squeeze(-1)

    critic = New()
    with pytest.raises(ValueError, match="New computes the same from any"):
        packing_fault(critic, TOKENS)
    nn.init.ones_(critic.head.weight)
    assert "see each other" in packing_fault(critic, TOKENS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunked", [True, False])
def test_chunks_of_a_sequence_are_not_those_of_its_rows(chunked):
    sizes = {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 8}
    kind = "chunked_attention" if chunked else "full_attention"
    model = tiny("Llama4", **SIZES | sizes, attention_chunk_size=10, layer_types=[kind] * 2)
    fault = packing_fault(model, TOKENS)
    assert ("within chunks of 10 tokens" in fault) if chunked else fault is None


def test_a_wrapper_must_take_what_packed_rows_need():
    class Wrapper(nn.Module):
        """Hands on no position_ids."""

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, input_ids, attention_mask=None):
            return self.module(input_ids, attention_mask)

    inner = Table(of_rows(lambda a, b: a == b))
    assert packing_fault(inner, TOKENS) is None
    assert packing_fault(Wrapper(inner), TOKENS) == "does not take position_ids"
