"""Which tokens and groups are kept, and what too long a response costs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import (
    clip_filter_weight,
    dynamic_sampling_mask,
    entropy_mask,
    overlong_penalty,
)


@st.composite
def tokens(draw):
    n, s = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    entropy = torch.randint(0, draw(st.sampled_from([2, 5, 1000])), (n, s), generator=g) * 0.01
    return entropy, torch.rand(n, s, generator=g) < draw(st.sampled_from([0.0, 0.4, 0.9]))


@given(tokens(), st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0]))
def test_entropy_mask_is_the_top_share_of_the_batch(batch, rho):
    entropy, mask = batch
    kept = entropy_mask(torch.where(mask, entropy, torch.nan), mask, rho)
    ranked = sorted(entropy[mask].tolist(), reverse=True)
    expected = torch.zeros_like(mask)
    if ranked:
        threshold = ranked[math.ceil(rho * len(ranked) - 1e-9) - 1]
        expected = mask & (entropy >= threshold)
    assert torch.equal(kept, expected)


@given(tokens(), st.integers(0, 2**31))
def test_entropy_mask_does_not_depend_on_rows_or_padding(batch, seed):
    entropy, mask = batch
    kept = entropy_mask(entropy, mask, 0.3)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(entropy_mask(entropy[order], mask[order], 0.3), kept[order])
    compact = entropy[mask][None]
    assert torch.equal(
        entropy_mask(compact, torch.ones_like(compact, dtype=torch.bool), 0.3)[0], kept[mask]
    )


def test_a_share_of_15_tokens_is_not_rounded_up():
    entropy = torch.arange(15.0)[None]
    assert entropy_mask(entropy, entropy >= 0, 0.2).sum() == 3


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_overlong_penalty_is_the_formula(length, buffer, before):
    limit = before + buffer
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer
    else:
        expected = -1.0
    got = overlong_penalty(torch.tensor(length), limit, buffer)
    assert float(got) == pytest.approx(expected, abs=1e-6)


@st.composite
def members(draw):
    n = draw(st.integers(0, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    returns = torch.randint(0, draw(st.integers(1, 3)), (n,), generator=g) * 0.1
    group = torch.randint(-2, 3, (n,), generator=g) * 10**10
    return returns, group, torch.rand(n, generator=g) < 0.8


@given(members(), st.sampled_from([0.5, 3.0]))
def test_groups_without_spread_are_dropped_and_the_others_weigh_more(batch, bound):
    returns, group, valid = batch
    of: dict[int, set] = {}
    for x, k, v in zip(returns.tolist(), group.tolist(), valid.tolist(), strict=True):
        if v:
            of.setdefault(k, set()).add(x)
    good = {k for k, values in of.items() if len(values) > 1}
    keep = [v and k in good for k, v in zip(group.tolist(), valid.tolist(), strict=True)]
    dirty = torch.where(valid, returns, torch.nan)
    assert dynamic_sampling_mask(dirty, group, valid=valid).tolist() == keep
    weight = min(len(of) / len(good), bound) if good else 0.0
    got = clip_filter_weight(dirty, group, valid=valid, max_weight=bound)
    torch.testing.assert_close(got, torch.tensor(keep, dtype=torch.float32) * weight)


@given(members(), st.integers(0, 2**31))
def test_position_does_not_matter(batch, seed):
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    for f in (dynamic_sampling_mask, clip_filter_weight):
        returns, group, valid = batch
        got = f(returns[order], group[order], valid=valid[order])
        assert torch.equal(got, f(returns, group, valid=valid)[order])


def test_bad_input_is_refused_by_name():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for rho in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="rho must lie in"):
            entropy_mask(x, mask, rho)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\), got \(2, 2\)"):
        entropy_mask(x, mask[:, :2])
    with pytest.raises(ValueError, match="buffer must be positive"):
        overlong_penalty(x, 10, 0)
    with pytest.raises(ValueError, match="buffer must be at most max_length"):
        overlong_penalty(x, 10, 11)
    with pytest.raises(ValueError, match=r"group must have shape \(2,\), got \(3,\)"):
        dynamic_sampling_mask(x[:, 0], torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="valid must be a bool tensor"):
        clip_filter_weight(x[:, 0], torch.zeros(2, dtype=torch.long), valid=x[:, 0])
    with pytest.raises(ValueError, match="max_weight must be positive"):
        clip_filter_weight(x[:, 0], torch.zeros(2, dtype=torch.long), max_weight=0.0)


def test_a_lone_member_is_degenerate_whatever_it_earned():
    returns, group = torch.tensor([torch.nan, 1.0, 2.0]), torch.tensor([0, 1, 1])
    assert dynamic_sampling_mask(returns, group).tolist() == [False, True, True]
    assert clip_filter_weight(returns, group).tolist() == [0.0, 2.0, 2.0]


def test_returns_of_integers_are_taken():
    returns, group = torch.tensor([1, 1, 0, 2]), torch.tensor([0, 0, 1, 1])
    assert dynamic_sampling_mask(returns, group).tolist() == [False, False, True, True]
    assert clip_filter_weight(returns, group).tolist() == [0.0, 0.0, 2.0, 2.0]


def test_a_share_that_is_a_whole_number_is_not_rounded_up():
    # 0.28 * 25 is 7.000000000000001 in floating point.
    mask = torch.ones(1, 25, dtype=torch.bool)
    assert entropy_mask(torch.arange(25.0)[None], mask, rho=0.28).sum() == 7


def test_entropy_that_is_no_number_is_refused():
    entropy = torch.tensor([[torch.nan, 1.0, 2.0]])
    with pytest.raises(ValueError, match="entropy must not be NaN on sampled tokens"):
        entropy_mask(entropy, torch.ones(1, 3, dtype=torch.bool))
    mask = torch.tensor([[False, True, True]])
    assert entropy_mask(entropy, mask, rho=0.5).tolist() == [[False, False, True]]
