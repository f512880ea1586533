"""Scores from hidden states equal those from whole logits: values and all gradients."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scoring.helpers import DEVICES, close
from torchrl_mt.scoring.linear_log_probs import linear_log_probs
from torchrl_mt.scoring.token_log_probs import log_probs_at

module = import_module(linear_log_probs.__module__)


def plain(hidden, weight, tokens, bias, scale, softcap, temperature, barred=()):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = [k for k in range(len(weight)) if k not in barred]
    log_p = (logits[:, kept] / temperature).log_softmax(-1)
    tokens = torch.searchsorted(torch.tensor(kept), tokens.cpu()).to(tokens.device)
    return log_p.gather(-1, tokens[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def inputs(seed, k, h, v, dtype=torch.float64, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(k, h, generator=g), torch.randn(v, h, generator=g)
    bias, tokens = torch.randn(v, generator=g), torch.randint(0, v, (k,), generator=g)
    leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *leaves, tokens.to(device), torch.randn(2, k, generator=g).to(device)


@given(
    seed=st.integers(0, 999),
    k=st.integers(0, 9),
    v=st.integers(1, 7),
    chunk=st.sampled_from([1, 15, 1 << 20]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.6, 3.0]),
    with_bias=st.booleans(),
    pick=st.sampled_from([(1, 1), (1, 0), (0, 1)]),
    barring=st.booleans(),
)
def test_values_and_gradients_are_those_of_whole_logits(
    seed, k, v, chunk, scale, softcap, temperature, with_bias, pick, barring
):
    hidden, weight, bias, tokens, weights = inputs(seed, k, 4, v)
    bias = bias if with_bias else None
    barred = sorted({0, v // 2} - {v - 1}) if barring else []
    tokens = torch.where(torch.isin(tokens, torch.tensor(barred)), v - 1, tokens)
    leaves = [hidden, weight] + [bias] * with_bias
    expected = plain(hidden, weight, tokens, bias, scale, softcap, temperature, barred)
    old, module.CHUNK_ELEMENTS = module.CHUNK_ELEMENTS, chunk
    try:
        options = {"scale": scale, "softcap": softcap, "temperature": temperature}
        options["barred"] = barred
        norms = []
        got = linear_log_probs(
            hidden, weight, tokens, bias, **options, with_entropy=True, norms=norms
        )
        gradients = [
            torch.autograd.grad(
                sum(p * (w * x).sum() for p, w, x in zip(pick, weights, values, strict=True)),
                leaves,
            )
            for values in (got, expected)
        ]
    finally:
        module.CHUNK_ELEMENTS = old
    close((*got, *gradients[0]), (*expected, *gradients[1]), 1e-10, 1e-10)
    own = 1 - 2 * expected[0].exp()
    for j in {*range(v)} - {*barred}:
        given = hidden, weight, tokens * 0 + j, bias, scale, softcap, temperature, barred
        own = own + plain(*given)[0].exp().square()
    close([torch.cat([own[:0], *norms])], [own], 1e-10, 1e-10)


def test_barred_tokens_have_no_probability_in_whole_logits_either():
    hidden, weight, _, _, weights = inputs(0, 5, 3, 7)
    tokens, barred = torch.tensor([0, 1, 3, 6, 1]), [2, 5]
    expected = plain(hidden, weight, tokens, None, 1.0, None, 0.7, barred)
    rows, options = torch.arange(5), {"temperature": 0.7, "with_entropy": True, "barred": barred}
    got = log_probs_at(hidden @ weight.T, rows, tokens, **options)
    close(got, expected, 1e-7, 1e-7)
    slopes = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, of, strict=True)), weight)
        for of in (got, expected)
    ]
    close(*slopes, 1e-7, 1e-7)
    for log_prob, _ in (
        linear_log_probs(hidden, weight, tokens * 0 + 2, barred=barred),
        log_probs_at(hidden @ weight.T, rows, tokens * 0 + 2, barred=barred),
    ):
        assert log_prob.tolist() == [-torch.inf] * 5
        (slope,) = torch.autograd.grad(log_prob.sum(), weight)
        assert slope.any()
        assert not slope[barred].any()


def test_without_entropy_the_log_probs_are_the_same():
    hidden, weight, bias, tokens, _ = inputs(0, 5, 4, 7)
    log_prob, entropy = linear_log_probs(hidden, weight, tokens, bias)
    assert entropy is None
    expected = linear_log_probs(hidden, weight, tokens, bias, with_entropy=True)[0]
    assert torch.equal(log_prob, expected)
    torch.autograd.gradcheck(
        lambda *x: linear_log_probs(x[0], x[1], tokens, x[2])[0], inputs(0, 5, 4, 7)[:3]
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["argument", "autocast", "weights"])
def test_half_precision_is_of_the_products_alone(device, how):
    leaves = inputs(0, 40, 16, 50, torch.float32, device)
    hidden, weight, bias, tokens, weights = leaves
    with torch.no_grad():
        for x in (hidden, weight, bias):
            x.copy_(x.bfloat16())
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    if how == "weights":
        hidden, weight, bias = (
            x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)
        )
    dtype = torch.bfloat16 if how == "argument" else None
    with torch.autocast(device, dtype=torch.bfloat16, enabled=how == "autocast"):
        got = linear_log_probs(hidden, weight, tokens, bias, with_entropy=True, dtype=dtype)
    half = (x.bfloat16() for x in (hidden, weight, bias))
    log_p = torch.nn.functional.linear(*half).double().log_softmax(-1)
    assert got[0].dtype is got[1].dtype is torch.float32
    expected = log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    close([x.double() for x in got], expected)
    expected = plain(exact[0], exact[1], tokens, exact[2], 1.0, None, 1.0)
    for values in (got, expected):
        sum((w * x).sum() for w, x in zip(weights, values, strict=True)).backward()
    for a, b in zip((hidden, weight, bias), exact, strict=True):
        assert a.grad.dtype is a.dtype
        assert (a.grad.double() - b.grad).norm() < 0.02 * b.grad.norm()


def test_gradients_of_half_precision_weights_are_summed_in_float32(monkeypatch):
    # 1024 equal positions, one a chunk: a sum in bfloat16 stops growing at 256 times its summand.
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    hidden = torch.ones(1024, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(1024, dtype=torch.long)
    linear_log_probs(hidden, weight, tokens, bias)[0].sum().backward()
    expected = torch.tensor([512.0, -512.0])
    torch.testing.assert_close(bias.grad.float(), expected)
    torch.testing.assert_close(weight.grad.float(), expected[:, None].expand(2, 2))


def test_frozen_weights_get_no_gradient():
    hidden, weight, bias, tokens, _ = inputs(0, 5, 4, 7)
    weight.requires_grad_(False)
    linear_log_probs(hidden, weight, tokens, bias)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad.any()
    assert bias.grad.any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": torch.zeros(5, 3)}, "weight must have shape"),
        ({"tokens": torch.zeros(4).long()}, "tokens must have shape"),
        ({"bias": torch.zeros(6)}, "bias must have shape"),
        ({"softcap": 0}, "softcap must be positive"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, message):
    hidden, weight, _, tokens, _ = inputs(0, 5, 4, 7)
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**{"hidden": hidden, "weight": weight, "tokens": tokens, **wrong})
