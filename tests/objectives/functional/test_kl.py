"""KL estimates: value and gradient of each kind, and coefficients driven by TorchRL's controllers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import kl_estimate

VALUE = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "k3+": lambda d: math.exp(d) - 1 - d,
    "k3_is": lambda d: math.exp(0.7) * (math.exp(d) - 1 - d),
}
SLOPE = {
    "k1": lambda d: 1.0,
    "k2": lambda d: -d,
    "k3": lambda d: 1 - math.exp(d),
    "k3+": lambda d: -d,
    "k3_is": lambda d: -math.exp(0.7) * d,
}
"""Derivative by log_prob, with d = ref_log_prob - log_prob; the older policy is 0.7 below."""


@pytest.mark.parametrize("kind", VALUE)
@given(st.floats(-30, 0, width=32), st.floats(-5, 5, width=32))
def test_value_and_gradient_are_the_formulas(kind, ref, difference):
    ref_log_prob = torch.tensor([ref])
    log_prob = (ref_log_prob - difference).requires_grad_()
    d = float(ref_log_prob.double() - log_prob.detach().double())
    kl = kl_estimate(log_prob, ref_log_prob, kind, old_log_prob=log_prob.detach() - 0.7)
    (slope,) = torch.autograd.grad(kl.sum(), log_prob)
    assert kl.dtype is torch.float32
    assert float(kl.detach()) == pytest.approx(VALUE[kind](d), rel=1e-4, abs=1e-5)
    assert float(slope) == pytest.approx(SLOPE[kind](d), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", VALUE)
def test_an_absurd_token_is_finite(kind):
    log_prob = torch.tensor([-1e4, 0.0], requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor([0.0, -1e4]), kind, old_log_prob=torch.zeros(2))
    (slope,) = torch.autograd.grad(kl.sum(), log_prob)
    assert kl.isfinite().all()
    assert slope.isfinite().all()


def test_forward_mode_has_the_gradient_of_k2():
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    _, forward = torch.func.jvp(lambda x: kl_estimate(x, ref, "k3+"), (new,), (torch.ones(2),))
    torch.testing.assert_close(forward, new - ref)


@pytest.mark.parametrize("kind", ["k3", "k3+"])
def test_no_token_is_pushed_away_from_the_reference(kind):
    new = torch.tensor([-19.9, -20.1, -25.0, -1e30], requires_grad=True)
    kl = kl_estimate(new, torch.zeros(4), kind)
    assert (kl > 1e7).all()
    kl.sum().backward()
    assert (new.grad <= 0).all()


def test_the_gradient_on_samples_of_an_older_policy_is_that_of_the_kl():
    """Over all tokens of a small vocabulary; and it is that of the product, as the paper has it."""
    g = torch.Generator().manual_seed(0)
    old, ref, logit = (torch.randn(5, generator=g).double() for _ in range(3))
    old, ref, logit = old.log_softmax(-1), ref.log_softmax(-1), logit.requires_grad_()
    new = logit.log_softmax(-1)
    kl = (new.exp() * (new - ref)).sum()
    (expected,) = torch.autograd.grad(kl, logit, retain_graph=True)
    loss = (old.exp() * kl_estimate(new, ref, "k3_is", old_log_prob=old)).sum()
    (slope,) = torch.autograd.grad(loss, logit, retain_graph=True)
    assert float(loss.detach()) == pytest.approx(float(kl.detach()), abs=1e-5)
    torch.testing.assert_close(slope, expected, atol=1e-5, rtol=1e-4)
    product = (new - old).exp() * ((ref - new).exp() - 1 - (ref - new))
    (of_product,) = torch.autograd.grad((old.exp() * product).sum(), logit)
    torch.testing.assert_close(slope, of_product, atol=1e-5, rtol=1e-4)
