"""KL estimates: value and gradient of each kind, and coefficients driven by TorchRL's controllers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import AdaptiveKLController, ConstantKLController

from torchrl_mt.objectives.functional import kl_estimate

VALUE = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "k3+": lambda d: math.exp(d) - 1 - d,
}
SLOPE = {
    "k1": lambda d: 1.0,
    "k2": lambda d: -d,
    "k3": lambda d: 1 - math.exp(d),
    "k3+": lambda d: -d,
}
"""Derivative by log_prob, with d = ref_log_prob - log_prob."""


@pytest.mark.parametrize("kind", VALUE)
@given(st.floats(-30, 0, width=32), st.floats(-5, 5, width=32))
def test_value_and_gradient_are_the_formulas(kind, ref, difference):
    ref_log_prob = torch.tensor([ref])
    log_prob = (ref_log_prob - difference).requires_grad_()
    d = float(ref_log_prob.double() - log_prob.detach().double())
    kl = kl_estimate(log_prob, ref_log_prob, kind)
    (slope,) = torch.autograd.grad(kl.sum(), log_prob)
    assert kl.dtype is torch.float32
    assert float(kl.detach()) == pytest.approx(VALUE[kind](d), rel=1e-4, abs=1e-5)
    assert float(slope) == pytest.approx(SLOPE[kind](d), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", VALUE)
def test_an_absurd_token_is_finite(kind):
    log_prob = torch.tensor([-1e4, 0.0], requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor([0.0, -1e4]), kind)
    (slope,) = torch.autograd.grad(kl.sum(), log_prob)
    assert kl.isfinite().all()
    assert slope.isfinite().all()


@pytest.mark.parametrize("kind", ["k2", "k3+"])
def test_as_a_loss_term_the_expected_gradient_is_that_of_the_kl(kind):
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ref = torch.randn(6, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    exact = (log_prob.exp() * (log_prob - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (log_prob.exp().detach() * kl_estimate(log_prob, ref, kind)).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
def test_the_expected_value_is_the_kl(kind):
    g = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 6, generator=g, dtype=torch.float64).log_softmax(-1)
    per_token = kl_estimate(p, q, kind)
    torch.testing.assert_close((p.exp() * per_token).sum(), (p.exp() * (p - q)).sum())


def test_k3_plus_reports_the_value_of_k3_exactly():
    log_prob, ref = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kl_estimate(log_prob, ref, "k3+"), kl_estimate(log_prob, ref, "k3"))


class Penalty(torch.nn.Module):
    """Anything with a ``kl_coef``, as the experience maker and the loss have."""

    kl_coef: float = 0.0

    def forward(self, kl):
        return -self.kl_coef * kl


def test_torchrl_constant_controller_sets_the_coefficient():
    penalty = Penalty()
    controller = ConstantKLController(kl_coef=0.3, model=penalty)
    penalty.kl_coef = 0.0
    assert controller.update() == penalty.kl_coef == 0.3


@pytest.mark.parametrize(("kl", "grows"), [(0.5, True), (0.01, False)])
def test_torchrl_adaptive_controller_follows_the_estimate(kl, grows):
    penalty = Penalty()
    controller = AdaptiveKLController(init_kl_coef=0.2, target=0.1, horizon=100, model=penalty)
    sampled = torch.full((10,), kl)
    # It takes the penalties as they stood in the reward, one for each step, and divides the
    # coefficient out again.
    controller.update(penalty(sampled).tolist())
    error = max(-0.2, min(0.2, kl / 0.1 - 1))
    assert float(penalty.kl_coef) == pytest.approx(0.2 * (1 + error * 10 / 100))
    assert (penalty.kl_coef > 0.2) == grows


def test_bad_input_is_refused_by_name():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="kind must be one of 'k1', 'k2', 'k3', 'k3\\+'"):
        kl_estimate(x, x, "k4")
    with pytest.raises(ValueError, match=r"ref_log_prob must have shape \(2, 3\), got \(2,\)"):
        kl_estimate(x, x[:, 0])


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
