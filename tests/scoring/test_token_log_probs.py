"""Chunked log-probabilities and entropies equal the plain log-softmax, values and gradients."""

import pytest
import torch

from torchrl_mt.scoring import token_log_probs as module
from torchrl_mt.scoring.token_log_probs import log_probs_and_entropy, token_entropy, token_log_probs


def plain(logits, tokens, mask, temperature=1.0):
    log_p = (logits.double() / temperature).log_softmax(-1)
    log_prob = log_p.gather(-1, tokens[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)
    return torch.where(mask, log_prob, 0.0), torch.where(mask, entropy, 0.0)


@pytest.fixture(params=[1, 23, 1 << 24], ids=["chunk of one", "some chunks", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_mask", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(seed, with_mask):
    g = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, 6, 11, generator=g)
    tokens = torch.randint(0, 11, (3, 6), generator=g)
    mask = torch.rand(3, 6, generator=g) < 0.5 if with_mask else torch.ones(3, 6).bool()
    weights = torch.randn(2, 3, 6, generator=g)
    got, expected = [], []
    for out, function in ((got, log_probs_and_entropy), (expected, plain)):
        x = logits.clone().requires_grad_()
        given = mask if with_mask or function is plain else None
        values = function(x, tokens, given)
        out.extend(v.detach().double() for v in values)
        for pick in ((1, 1), (1, 0), (0, 1)):
            loss = sum(p * (w * v).sum() for p, w, v in zip(pick, weights, values, strict=True))
            out.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(token_log_probs(logits, tokens, mask).double(), got[0])
    torch.testing.assert_close(token_entropy(logits, mask).double(), got[1])


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_temperature_divides_in_float32(temperature, dtype, with_mask):
    g = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(3, 6, 11, generator=g)).to(dtype)
    tokens = torch.randint(0, 11, (3, 6), generator=g)
    mask = torch.rand(3, 6, generator=g) < 0.5 if with_mask else torch.ones(3, 6).bool()
    weights = torch.randn(2, 3, 6, generator=g)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    given = mask if with_mask else None
    got = log_probs_and_entropy(ours, tokens, given, temperature=temperature)
    expected = plain(exact, tokens, mask, temperature)
    for values in (got, expected):
        sum((w * v).sum() for w, v in zip(weights, values, strict=True)).backward()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    assert ours.grad.dtype is dtype
    torch.testing.assert_close(
        ours.grad,
        exact.grad.to(dtype),
        **({} if dtype.itemsize == 2 else {"atol": 1e-5, "rtol": 1e-5}),
    )
    alone = (
        token_log_probs(logits, tokens, given, temperature=temperature),
        token_entropy(logits, given, temperature=temperature),
    )
    torch.testing.assert_close(alone, got)


def test_masked_tokens_are_not_read():
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    mask = torch.tensor([[True, False]])
    got = token_log_probs(logits, torch.tensor([[1, -100]]), mask)
    got.sum().backward()
    assert got[0, 1] == 0
    assert not logits.grad[0, 1].any()


def test_impossible_tokens_leave_everything_finite():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(logits, torch.tensor([0]))
    (log_prob + entropy).sum().backward()
    assert log_prob.isfinite().all()
    assert entropy.isfinite().all()
    assert logits.grad.isfinite().all()


def test_half_precision_logits_are_scored_in_float32():
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 50, generator=g)).bfloat16().requires_grad_()
    tokens = torch.randint(0, 50, (4,), generator=g)
    got = token_log_probs(logits, tokens)
    got.sum().backward()
    assert got.dtype is torch.float32
    assert logits.grad.dtype is torch.bfloat16
    expected = plain(logits, tokens, torch.ones(4, dtype=torch.bool))[0]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_nothing_to_score():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    log_prob, entropy = log_probs_and_entropy(logits, torch.zeros(2, 3, dtype=torch.long), mask)
    (log_prob.sum() + entropy.sum()).backward()
    assert not log_prob.any()
    assert not entropy.any()
    assert not logits.grad.any()


def test_bad_input_is_refused_by_name():
    logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="tokens must have shape"):
        token_log_probs(logits, tokens[:1])
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        token_log_probs(logits, tokens, torch.ones(2, 3))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        token_log_probs(logits, tokens, temperature=0)


@pytest.mark.parametrize("scale", [1.0, 10.0, 2.0**16])
def test_entropy_has_a_finite_slope_where_a_logit_is_minus_infinity(scale):
    logits = torch.tensor([[1.0, 0.0, -torch.inf]], requires_grad=True)
    _, entropy = log_probs_and_entropy(logits, torch.tensor([0]))
    (scale * entropy).sum().backward()
    two = torch.tensor([1.0, 0.0], requires_grad=True)
    (scale * torch.distributions.Categorical(logits=two).entropy()).backward()
    torch.testing.assert_close(logits.grad, torch.cat([two.grad, torch.zeros(1)])[None])
