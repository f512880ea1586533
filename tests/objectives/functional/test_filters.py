"""Which tokens and groups are kept, and what too long a response costs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional.test_group import members
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


@pytest.mark.parametrize(
    ("returns", "group", "kept"),
    [([torch.nan, 1.0, 2.0], [0, 1, 1], [0, 1, 1]), ([1, 1, 0, 2], [0, 0, 1, 1], [0, 0, 1, 1])],
)
def test_lone_members_are_degenerate_and_integers_are_taken(returns, group, kept):
    returns, group = torch.tensor(returns), torch.tensor(group)
    assert dynamic_sampling_mask(returns, group).tolist() == kept
    assert clip_filter_weight(returns, group).tolist() == [2.0 * k for k in kept]


@pytest.mark.parametrize(("size", "rho", "kept"), [(15, 0.2, 3), (25, 0.28, 7)])
def test_a_share_that_is_a_whole_number_is_not_rounded_up(size, rho, kept):
    # 0.28 * 25 is 7.000000000000001 in floating point.
    entropy = torch.arange(float(size))[None]
    assert entropy_mask(entropy, entropy >= 0, rho).sum() == kept
