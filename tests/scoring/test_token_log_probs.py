"""Chunked log-probabilities and entropies equal the plain log-softmax, values and gradients."""

import pytest
import torch

from tests.scoring.helpers import close
from torchrl_mt.scoring import token_log_probs as module
from torchrl_mt.scoring.token_log_probs import log_probs_at


def plain(logits, position, tokens, temperature=1.0):
    log_p = (logits[position].double() / temperature).log_softmax(-1)
    log_prob = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)


@pytest.fixture(params=[1, 23, 1 << 24], ids=["chunk of one", "some chunks", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(2))
def test_values_and_gradients_are_those_of_log_softmax(temperature, dtype, share, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(18, 11, generator=g)).to(dtype)
    position = torch.randperm(18, generator=g)[: int(18 * share)]
    tokens = torch.randint(0, 11, position.shape, generator=g)
    weights = torch.randn(2, len(position), generator=g)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    given = position, tokens
    got = log_probs_at(ours, *given, temperature=temperature, with_entropy=True)
    expected = plain(exact, *given, temperature)
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
    alone, none = log_probs_at(logits, *given, temperature=temperature)
    assert none is None
    torch.testing.assert_close(alone, got[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": torch.zeros(3).long()}, "tokens must have shape"),
        ({"temperature": 0}, "temperature must be positive, got 0"),
    ],
)
def test_bad_input_is_refused_by_name(wrong, message):
    position = torch.arange(2)
    given = {"logits": torch.zeros(2, 5), "position": position, "tokens": position, **wrong}
    with pytest.raises(ValueError, match=message):
        log_probs_at(**given)


@pytest.mark.parametrize("scale", [1.0, 10.0, 2.0**16])
def test_everything_is_finite_where_a_logit_is_minus_infinity(scale):
    logits = torch.tensor([[1.0, 0.0, -torch.inf]], requires_grad=True)
    place = torch.tensor([0])
    log_prob, entropy = log_probs_at(logits, place, place, with_entropy=True)
    (scale * (log_prob + entropy)).sum().backward()
    two = torch.tensor([1.0, 0.0], requires_grad=True)
    plain_entropy = torch.distributions.Categorical(logits=two).entropy()
    (scale * (two.log_softmax(-1)[0] + plain_entropy)).backward()
    torch.testing.assert_close(logits.grad, torch.cat([two.grad, torch.zeros(1)])[None])
    torch.testing.assert_close((log_prob, entropy), (two.log_softmax(-1)[:1], plain_entropy[None]))
