"""Returns and advantages count sampled tokens only, against the formula in a float64 loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchrl_mt.objectives.functional import masked_gae, masked_returns
from torchrl_mt.objectives.functional.time.recurrence import (
    reverse_linear_recurrence,
    sampled_recurrence,
)
from torchrl_mt.objectives.functional.time.sampled import rewards_on_sampled

DISCOUNTS = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


@st.composite
def batches(draw):
    """Reward, value, mask ``[N, S]``; every row density from empty to full occurs."""
    n, s = draw(st.integers(0, 5)), draw(st.integers(1, 17))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    density = torch.rand(n, 1, generator=g) * 1.4 - 0.2
    mask = torch.rand(n, s, generator=g) < density
    return torch.randn(n, s, generator=g), torch.randn(n, s, generator=g), mask


def owned(reward: Tensor, mask: Tensor) -> list[list[float]]:
    """Rewards of each row's sampled tokens, in order, by the rule told word for word."""
    out = []
    for r, m in zip(reward.double().tolist(), mask.tolist(), strict=True):
        positions = [t for t in range(len(m)) if m[t]]
        own = dict.fromkeys(positions, 0.0)
        for t, x in enumerate(r):
            before = [p for p in positions if p <= t]
            if positions:
                own[before[-1] if before else positions[0]] += x
        out.append([own[p] for p in positions])
    return out


def loop_gae(reward, value, mask, gamma, lmbda):
    """The recurrence of the paper over each row's sampled tokens."""
    advantage = torch.zeros(mask.shape, dtype=torch.float64)
    for n, rewards in enumerate(owned(reward, mask)):
        positions = mask[n].nonzero().flatten().tolist()
        a, next_value = 0.0, 0.0
        for r, t in zip(reversed(rewards), reversed(positions), strict=True):
            v = float(value[n, t])
            a = r + gamma * next_value - v + gamma * lmbda * a
            next_value = v
            advantage[n, t] = a
    return advantage


@given(batches(), DISCOUNTS, DISCOUNTS)
def test_gae_is_the_formula(batch, gamma, lmbda):
    reward, value, mask = batch
    advantage, returns = masked_gae(reward, value, mask, gamma, lmbda)
    expected = loop_gae(reward, value, mask, gamma, lmbda)
    torch.testing.assert_close(advantage.double(), expected, atol=1e-5, rtol=1e-5)
    expected_returns = torch.where(mask, expected + value.double(), 0.0)
    torch.testing.assert_close(returns.double(), expected_returns, atol=1e-5, rtol=1e-5)


@given(batches(), DISCOUNTS)
def test_returns_are_gae_without_values(batch, gamma):
    reward, value, mask = batch
    expected = loop_gae(reward, torch.zeros_like(value), mask, gamma, 1.0)
    got = masked_returns(reward, mask, gamma)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@given(batches(), DISCOUNTS, DISCOUNTS)
def test_dropping_masked_tokens_changes_nothing(batch, gamma, lmbda):
    reward, value, mask = batch
    advantage, returns = masked_gae(reward, value, mask, gamma, lmbda)
    for n, rewards in enumerate(owned(reward, mask)):
        full = torch.ones(1, len(rewards), dtype=torch.bool)
        r, v = torch.tensor([rewards], dtype=torch.float32), value[n][mask[n]][None]
        compact = masked_gae(r, v, full, gamma, lmbda)
        torch.testing.assert_close(advantage[n][mask[n]], compact[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(returns[n][mask[n]], compact[1][0], atol=1e-5, rtol=1e-5)


@given(batches(), st.integers(0, 2**31))
def test_rows_are_independent_of_their_order(batch, seed):
    reward, value, mask = batch
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    whole = masked_gae(reward, value, mask, 0.9, 0.8)
    permuted = masked_gae(reward[order], value[order], mask[order], 0.9, 0.8)
    for a, b in zip(whole, permuted, strict=True):
        torch.testing.assert_close(a[order], b)


@given(batches())
def test_what_lies_on_masked_values_is_not_read(batch):
    reward, value, mask = batch
    clean = masked_gae(reward, value, mask, 0.9, 0.8)
    dirty = masked_gae(reward, torch.where(mask, value, torch.nan), mask, 0.9, 0.8)
    for a, b in zip(clean, dirty, strict=True):
        torch.testing.assert_close(a, b)


@given(batches())
def test_rewards_keep_their_sum_and_lie_on_sampled_tokens(batch):
    reward, _, mask = batch
    moved = rewards_on_sampled(reward, mask)
    assert not moved[~mask].any()
    expected = torch.where(mask.any(-1), reward.sum(-1), 0.0)
    torch.testing.assert_close(moved.sum(-1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("gamma", "size"),
    [
        (0.9, 1024),
        *(pytest.param(gamma, 4096, marks=pytest.mark.slow) for gamma in (0.5, 0.9, 0.999, 1.0)),
    ],
)
def test_long_rows_stay_exact(gamma, size):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, size, generator=g) < 0.6
    reward = torch.randn(3, size, generator=g)
    expected = loop_gae(reward, torch.zeros_like(reward), mask, gamma, 1.0)
    got = masked_returns(reward, mask, gamma).double()
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("lmbda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.99, 1.0])
def test_small_advantages_of_large_values_stay_exact(gamma, lmbda):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 64, generator=g) < 0.6
    reward = 1e-2 * torch.randn(3, 64, generator=g)
    value = 1e4 + torch.rand(3, 64, generator=g)
    expected = loop_gae(reward, value, mask, gamma, lmbda)
    advantage, returns = masked_gae(reward, value, mask, gamma, lmbda)
    torch.testing.assert_close(advantage.double(), expected, atol=1e-8, rtol=1e-6)
    got = returns.double()
    torch.testing.assert_close(got, torch.where(mask, expected + value, 0.0), atol=1e-8, rtol=1e-6)


def test_recurrence_takes_any_decay():
    g = torch.Generator().manual_seed(0)
    for size in [1, 2, 3, 8, 13]:
        x = torch.randn(4, size, generator=g, dtype=torch.float64)
        decay = torch.rand(4, size, generator=g, dtype=torch.float64) * 2 - 1
        expected, y = torch.zeros_like(x), torch.zeros(4, dtype=torch.float64)
        for t in reversed(range(size)):
            expected[:, t] = y = x[:, t] + decay[:, t] * y
        torch.testing.assert_close(reverse_linear_recurrence(x, decay), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_factor_of_0_hands_nothing_on(bad):
    x = torch.tensor([1.0, 2.0, bad, 3.0, 4.0])
    got = reverse_linear_recurrence(x, torch.tensor([0.5, 0.0, 0.5, 0.5, 0.5]))
    assert got[:2].tolist() == [2.0, 2.0]
    assert not torch.isfinite(got[2])
    assert got[3:].tolist() == [5.0, 4.0]


def test_half_precision_is_computed_in_float32():
    g = torch.Generator().manual_seed(0)
    reward = torch.randn(2, 64, generator=g).bfloat16()
    mask = torch.rand(2, 64, generator=g) < 0.5
    got = masked_returns(reward, mask, 0.99)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, masked_returns(reward.float(), mask, 0.99), atol=0, rtol=0)


def test_bad_input_is_refused_by_name():
    reward, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        masked_returns(reward, mask.float(), 0.9)
    with pytest.raises(ValueError, match="mask must have shape"):
        masked_returns(reward, mask[:, :2], 0.9)
    with pytest.raises(ValueError, match="gamma must lie in"):
        masked_returns(reward, mask, 1.1)
    with pytest.raises(ValueError, match="value must have shape"):
        masked_gae(reward, reward[:1], mask, 0.9, 0.9)
    with pytest.raises(ValueError, match="lmbda must lie in"):
        masked_gae(reward, reward, mask, 0.9, -0.1)


def test_forward_mode_agrees_with_reverse_mode():
    mask = torch.tensor([[True, False, True, True]])
    reward, value = torch.randn(1, 4), torch.randn(1, 4)
    tangent = torch.randn(1, 4)
    for estimate in (
        lambda r: masked_gae(r, value, mask, 0.9, 0.8)[0],
        lambda v: masked_gae(reward, v, mask, 0.9, 0.8)[0],
        lambda r: masked_returns(r, mask, 0.9),
    ):
        _, forward = torch.func.jvp(estimate, (reward,), (tangent,))
        jacobian = torch.autograd.functional.jacobian(estimate, reward)
        torch.testing.assert_close(forward, (jacobian * tangent).sum((-1, -2)))


def test_a_decay_out_of_range_is_refused():
    mask = torch.ones(1, 2, dtype=torch.bool)
    for decay in (1.5, -0.5, math.nan):
        with pytest.raises(ValueError, match="decay must lie in"):
            sampled_recurrence(torch.ones(1, 2), mask, decay)
