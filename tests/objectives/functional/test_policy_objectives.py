"""Policy objectives and KL estimates against their formulas; finite whatever the ratio."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import kl_estimate, ppo, reinforce

FINITE = st.floats(-4, 4, width=32)


@given(FINITE, FINITE, FINITE, st.sampled_from([(0.2, 0.2), (0.1, 0.3), (0.0, 0.0)]))
def test_ppo_is_the_formula(new, old, advantage, clip):
    one = torch.ones(1, 1)
    log_prob = (new * one).requires_grad_()
    loss, clipped = ppo(log_prob, old * one, advantage * one, one.bool(), clip)
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1 - clip[0]), 1 + clip[1])
    expected = -min(ratio * advantage, bounded * advantage)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if abs(ratio - bounded) > 1e-5:
        assert clipped.item() == (1 if ratio > bounded else -1)
        binding = (advantage > 0) == (ratio > bounded)
        slope = 0.0 if binding else -ratio * advantage
        loss.sum().backward()
        assert float(log_prob.grad) == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_reinforce_is_minus_advantage_times_log_prob():
    g = torch.Generator().manual_seed(0)
    log_prob = torch.randn(3, 5, generator=g, requires_grad=True)
    advantage, mask = torch.randn(3, 5, generator=g), torch.rand(3, 5, generator=g) < 0.5
    loss, clipped = reinforce(log_prob, torch.zeros(3, 5), advantage, mask)
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.where(mask, -advantage, 0.0))
    torch.testing.assert_close(loss, torch.where(mask, -advantage * log_prob, 0.0))
    assert not clipped.any()


@given(FINITE, FINITE)
def test_kl_estimates_are_their_formulas(p, q):
    d = q - p
    lp, lq = torch.tensor([p]), torch.tensor([q])
    assert float(kl_estimate(lp, lq, "k1")) == pytest.approx(-d, abs=1e-4)
    assert float(kl_estimate(lp, lq, "k2")) == pytest.approx(d * d / 2, rel=1e-4, abs=1e-4)
    expected = math.exp(d) - 1 - d
    assert float(kl_estimate(lp, lq, "k3")) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_are_unbiased(kind):
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    per_token = kl_estimate(p, q, kind)
    torch.testing.assert_close((p.exp() * per_token).sum(), (p.exp() * (p - q)).sum())


def test_the_slope_of_k2_is_an_unbiased_slope_of_the_kl():
    g = torch.Generator().manual_seed(0)
    logits, q = torch.randn(2, 6, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    q = q.log_softmax(-1)
    p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    (estimate,) = torch.autograd.grad((p.exp().detach() * kl_estimate(p, q, "k2")).sum(), logits)
    torch.testing.assert_close(estimate, exact, atol=1e-5, rtol=1e-5)


def test_kl_is_finite_at_absurd_ratios():
    p = torch.tensor([-1000.0], requires_grad=True)
    for kind in ("k1", "k2", "k3"):
        estimate = kl_estimate(p, torch.tensor([0.0]), kind)
        assert estimate.isfinite().all()
        assert torch.autograd.grad(estimate.sum(), p)[0].isfinite().all()


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
