"""Groups are told apart by id; lone members and equal groups are finite, gradients included."""

from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import group_advantage, outcome_advantage

KINDS = ["grpo", "dr_grpo", "rloo", "batch"]


@st.composite
def members(draw):
    n = draw(st.integers(0, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Few distinct values, none of them exact in binary: equal groups are common and rounding shows.
    returns = torch.randint(0, draw(st.integers(1, 4)), (n,), generator=g) * 0.1
    group = torch.randint(-2, 3, (n,), generator=g) * 10**10
    return returns, group, torch.rand(n, generator=g) < 0.8


def loop(returns, group, kind, valid, lone_value=0.0):
    out = []
    for i, (x, k) in enumerate(zip(returns.double().tolist(), group.tolist(), strict=True)):
        peers = [
            y
            for y, c, v in zip(
                returns.double().tolist(), group.tolist(), valid.tolist(), strict=True
            )
            if v and (c == k or kind == "batch")
        ]
        if not valid[i]:
            out.append(0.0)
        elif len(peers) == 1:
            out.append(lone_value)
        elif kind == "rloo":
            out.append(x - (sum(peers) - x) / (len(peers) - 1))
        elif kind == "dr_grpo":
            out.append(x - mean(peers))
        else:
            spread = max(peers) > min(peers)
            out.append((x - mean(peers)) / (stdev(peers) + 1e-6) if spread else 0.0)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members())
def test_advantage_is_the_formula(kind, batch):
    returns, group, valid = batch
    got = group_advantage(returns, group, kind, valid=valid, lone_value=-0.5)
    expected = loop(returns, group, kind, valid, -0.5)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
    everyone = group_advantage(returns, group, kind)
    expected = loop(returns, group, kind, torch.ones_like(valid))
    torch.testing.assert_close(everyone.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members(), seed=st.integers(0, 2**31))
def test_position_does_not_matter(kind, batch, seed):
    returns, group, valid = batch
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    got = group_advantage(returns, group, kind, valid=valid)
    permuted = group_advantage(returns[order], group[order], kind, valid=valid[order])
    torch.testing.assert_close(got[order], permuted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members())
def test_values_and_gradients_are_finite(kind, batch):
    returns, group, valid = batch
    returns.requires_grad_()
    advantage = group_advantage(returns, group, kind, valid=valid)
    (gradient,) = torch.autograd.grad(advantage.square().sum(), returns)
    assert advantage.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_members_get_exactly_zero(kind):
    returns = torch.full((7,), 0.1)
    assert not group_advantage(returns, torch.zeros(7, dtype=torch.long), kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_members_are_not_read(kind):
    returns = torch.tensor([1.0, torch.nan, 3.0, 2.0])
    valid = torch.tensor([True, False, True, True])
    group = torch.zeros(4, dtype=torch.long)
    got = group_advantage(returns, group, kind, valid=valid)
    assert got[1] == 0
    torch.testing.assert_close(got[valid], group_advantage(returns[valid], group[valid], kind))


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        group_advantage(torch.zeros(2), torch.zeros(2, dtype=torch.long), "median")
    with pytest.raises(ValueError, match="group must have shape"):
        group_advantage(torch.zeros(2), torch.zeros(3, dtype=torch.long))


def test_an_episode_counts_once_however_often_it_forks():
    plain = outcome_advantage(
        torch.tensor([[3.0, 3.0], [1.0, 1.0], [0.0, 0.0]]),
        torch.ones(3, 2, dtype=torch.bool),
        torch.zeros(3, 2, dtype=torch.long),
        torch.tensor([1, 2, 3]),
        torch.zeros(3, dtype=torch.long),
    )
    forked = outcome_advantage(
        torch.tensor([[9.0, 9.0], [1.0, 1.0], [3.0, 3.0], [0.0, 0.0]]),
        torch.ones(4, 2, dtype=torch.bool),
        torch.tensor([[1, 1], [0, 0], [0, 0], [0, 0]]),
        torch.tensor([1, 2, 1, 3]),
        torch.zeros(4, dtype=torch.long),
    )
    torch.testing.assert_close(forked, plain[[0, 1, 0, 2]])


def test_an_episode_has_one_group():
    ones = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="group must be the same"):
        outcome_advantage(
            ones.float(), ones.bool(), ones, torch.tensor([4, 4]), torch.tensor([0, 1])
        )
