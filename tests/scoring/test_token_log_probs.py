"""Chunked log-probabilities and entropies equal the plain log-softmax, values and gradients."""

import pytest
import torch

from tests.scoring.helpers import close
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
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [None, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(2))
def test_values_and_gradients_are_those_of_log_softmax(temperature, dtype, share, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(3, 6, 11, generator=g)).to(dtype)
    tokens = torch.randint(0, 11, (3, 6), generator=g)
    mask = torch.rand(3, 6, generator=g) < (1.0 if share is None else share)
    weights = torch.randn(2, 3, 6, generator=g)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    given = None if share is None else mask
    got = log_probs_and_entropy(ours, tokens, given, temperature=temperature)
    expected = plain(exact, tokens, mask, temperature)
    assert got[0].dtype is got[1].dtype is torch.float32
    close([x.double() for x in got], expected)
    tolerance = {} if dtype.itemsize == 2 else {"atol": 1e-5, "rtol": 1e-5}
    for pick in ((1, 1), (1, 0), (0, 1)):
        slopes = []
        for values, leaf in ((got, ours), (expected, exact)):
            loss = sum(p * (w * v).sum() for p, w, v in zip(pick, weights, values, strict=True))
            slopes += torch.autograd.grad(loss, leaf, retain_graph=True)
        assert slopes[0].dtype is dtype
        torch.testing.assert_close(slopes[0], slopes[1].to(dtype), **tolerance)
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


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"tokens": torch.zeros(1, 3).long()}, ValueError, "tokens must have shape"),
        ({"mask": torch.ones(2, 3)}, TypeError, "mask must be a bool tensor"),
        ({"temperature": 0}, ValueError, "temperature must be positive, got 0"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, error, message):
    given = {"logits": torch.zeros(2, 3, 5), "tokens": torch.zeros(2, 3).long(), **wrong}
    with pytest.raises(error, match=message):
        token_log_probs(**given)


@pytest.mark.parametrize("scale", [1.0, 10.0, 2.0**16])
def test_entropy_has_a_finite_slope_where_a_logit_is_minus_infinity(scale):
    logits = torch.tensor([[1.0, 0.0, -torch.inf]], requires_grad=True)
    _, entropy = log_probs_and_entropy(logits, torch.tensor([0]))
    (scale * entropy).sum().backward()
    two = torch.tensor([1.0, 0.0], requires_grad=True)
    (scale * torch.distributions.Categorical(logits=two).entropy()).backward()
    torch.testing.assert_close(logits.grad, torch.cat([two.grad, torch.zeros(1)])[None])
