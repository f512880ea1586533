"""A model is given packed rows only if they are there what they are alone."""

import gc

import pytest
import torch
from torch import nn

from tests.scoring.helpers import attention_over_lengths, close, entries, tiny
from tests.settings import grouped
from torchrl_mt.objectives import Passes
from torchrl_mt.scoring import packing_check
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.packing_check import check_packing, packing_fault, takes_lengths
from torchrl_mt.scoring.values import ValueModel

TOKENS = torch.arange(24)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen2", {}),
        ("Llama", {"attn_implementation": "eager"}),
        ("Mistral", {"sliding_window": 3}),
        ("GPT2", {}),
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_packed_rows_score_as_padded_ones_do(rows, family, options):
    model, out = tiny(family, **options), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = entries(rows(n=9, suffix_padding=False))
    for packed in (False, True):
        scores = row_log_probs(model, *batch, passes=Passes(packed=packed, with_entropy=True))
        (scores[0].square().sum() + scores[1].sum()).backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        out.append((scores, torch.cat(gradients)))
        model.zero_grad()
    assert out[0][0][0].any()
    close(out[1][0], out[0][0], 1e-4, 1e-4)
    assert (out[0][1] - out[1][1]).norm() < 1e-4 * out[0][1].norm()


@pytest.mark.filterwarnings("ignore")
def test_models_that_mix_packed_rows_are_refused():
    model, ones = tiny("Mamba"), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="MambaForCausalLM lets packed rows see each other"):
        row_log_probs(model, TOKENS[:8].view(2, 4), ones, ones, passes=Passes(packed=True))
    assert row_log_probs(model, TOKENS[:8].view(2, 4), ones, ones)[0].isfinite().all()


class Toy(nn.Module):
    """Sums of embeddings along each packed row, or not."""

    def __init__(self, leaks=False, shifts=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(24, 8)
        self.leaks, self.shifts = leaks, shifts

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        at = torch.arange(input_ids.shape[1])
        seen = at <= at[:, None]
        start = torch.zeros_like(input_ids) if position_ids is None else at - position_ids
        if not self.leaks:
            seen = seen & (start[:, :, None] == start[:, None])
        out = seen.float() @ self.table(input_ids)
        return out + self.shifts * (start > 0)[..., None].float()


def test_the_reason_is_what_the_model_does():
    assert packing_fault(Toy(), TOKENS) is None
    assert "see each other" in packing_fault(Toy(leaks=True), TOKENS)
    assert "otherwise than the row alone" in packing_fault(Toy(shifts=True), TOKENS)

    class Plain(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids

    class Masked(nn.Module):
        def forward(self, input_ids, attention_mask, position_ids=None):
            return input_ids

    assert "does not take position_ids" in packing_fault(Plain(), TOKENS)
    assert "without an attention_mask" in packing_fault(Masked(), TOKENS)
    with pytest.raises(ValueError, match=r"packed=True needs .* Plain does not take position_ids"):
        check_packing(Plain(), TOKENS)


def test_trying_leaves_the_model_as_it_was_and_is_done_once(model):
    model.train()
    state = torch.get_rng_state()
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    assert packing_fault(model, TOKENS) is None
    tried = len(calls)
    assert packing_fault(model, TOKENS) is None
    hook.remove()
    assert len(calls) == tried
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not model.model._forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_known_of_a_model_goes_with_it():
    gc.collect()
    model = Toy()
    packing_fault(model, TOKENS)
    count = len(packing_check._FAULTS)
    del model
    gc.collect()
    assert len(packing_check._FAULTS) == count - 1


def test_attention_over_lengths_gets_one_sequence_and_the_lengths(make_model, rows):
    seen, batch = [], entries(rows(n=9, suffix_padding=False))
    attention_over_lengths(seen)
    expected = row_log_probs(make_model(), *batch, passes=Passes(with_entropy=True))
    model = make_model()
    model.config._attn_implementation = "lengths_flash"
    assert takes_lengths(model)
    assert not takes_lengths(make_model())
    for budget in (None, 20):
        options = {"packed": True, "with_entropy": True, "micro_batch_tokens": budget}
        close(row_log_probs(model, *batch, **grouped(**options)), expected)
    assert 9 in seen


def test_nan_while_trying_is_an_error_that_is_not_remembered(model):
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(torch.nan)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM computes NaN or infinity"):
        check_packing(model, TOKENS)
    with torch.no_grad():
        norm.copy_(kept)
    check_packing(model, TOKENS)


def test_a_wrapped_critic_is_told_apart_by_its_states(model):
    head = ValueModel.from_model(model)
    assert packing_fault(nn.DataParallel(head), TOKENS) is None
    assert packing_fault(nn.DataParallel(Blind()), TOKENS) == packing_fault(Blind(), TOKENS)


class Blind(nn.Module):
    """Takes no positions."""

    def forward(self, input_ids, attention_mask=None):
        return input_ids.float()
