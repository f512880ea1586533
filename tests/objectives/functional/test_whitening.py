"""Statistics under a mask: those of the values alone, merged from any shards, never infinite."""

from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import RewardNormalizer, clip_reward, masked_whiten
from torchrl_mt.objectives.functional.whitening import masked_moments


@st.composite
def batches(draw):
    """Values and mask ``[N, S]``; few distinct values, far from 0, so that rounding shows."""
    n, s = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randint(0, draw(st.integers(1, 4)), (n, s), generator=g) * 0.1
    x = x + draw(st.sampled_from([0.0, 1000.1]))
    return x, torch.rand(n, s, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.9]))


def loop(x, mask, eps=1e-8):
    values = x[mask].double().tolist()
    out = torch.zeros(mask.shape, dtype=torch.float64)
    if len(values) > 1 and max(values) > min(values):
        out[mask] = (x[mask].double() - mean(values)) / (stdev(values) + eps)
    return out


@given(batches())
def test_whitening_is_the_formula(batch):
    x, mask = batch
    dirty = torch.where(mask, x, torch.nan)
    got = masked_whiten(dirty, mask)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), loop(x, mask), atol=1e-5, rtol=1e-5)


@given(batches())
def test_shards_with_merged_moments_are_the_whole(batch):
    x, mask = batch
    merged = masked_moments(x[:0], mask[:0])
    for i in reversed(range(len(x))):
        merged = merged.merge(masked_moments(x[i], mask[i]))
    whole = masked_moments(x, mask)
    for name in vars(whole):
        torch.testing.assert_close(
            getattr(merged, name), getattr(whole, name), atol=1e-9, rtol=1e-9
        )
    for i in range(len(x)):
        part = masked_whiten(x[i], mask[i], moments=merged)
        torch.testing.assert_close(part, masked_whiten(x, mask)[i], atol=1e-5, rtol=1e-5)


@given(batches())
def test_a_weight_is_a_number_of_copies(batch):
    x, mask = batch
    weight = (x * 30).long() % 3
    copies = x.flatten().repeat_interleave((weight * mask).flatten())
    expected = masked_moments(copies, torch.ones_like(copies, dtype=torch.bool))
    got = masked_moments(x, mask, weight=weight)
    for name in vars(got):
        torch.testing.assert_close(
            getattr(got, name), getattr(expected, name), atol=1e-6, rtol=1e-9
        )


@given(batches())
def test_values_and_gradients_are_finite(batch):
    x, mask = batch
    x.requires_grad_()
    whitened = masked_whiten(x, mask)
    (gradient,) = torch.autograd.grad(whitened.square().sum(), x)
    assert whitened.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_gradient_is_that_of_the_formula(junk):
    x = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3] = junk
    seed, mask = torch.arange(7.0), torch.arange(7) != 3
    x.requires_grad_()
    (got,) = torch.autograd.grad((masked_whiten(x, mask) * seed).sum(), x)
    own = x[mask]
    plain = (own - own.mean()) / (own.std() + 1e-8)
    (expected,) = torch.autograd.grad((plain * seed[mask]).sum(), own)
    torch.testing.assert_close(got[mask], expected, atol=1e-6, rtol=1e-5)
    assert got[3] == 0


@given(batches(), st.booleans())
def test_running_statistics_are_those_of_all_rewards_in_any_order(batch, center):
    x, mask = batch
    forward, backward = RewardNormalizer(center=center), RewardNormalizer(center=center)
    for i in range(len(x)):
        forward.update(x[i], mask[i])
    for row, of_row in zip(x.flip(0), mask.flip(0), strict=True):
        for value in row[of_row]:
            other = RewardNormalizer()
            other.update(value)
            backward.update(other.moments)
    values = x[mask].double()
    spread = len(values) > 1 and bool(values.max() > values.min())
    scale = 1 / (values.std() + 1e-8) if spread else float(not center)
    shift = values.mean() if center and len(values) else 0.0
    for normalizer in (forward, backward):
        got = normalizer(x)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), (x.double() - shift) * scale, atol=1e-4, rtol=1e-4)


def test_running_state_is_saved():
    normalizer = RewardNormalizer(clip=1.5)
    normalizer.update(torch.tensor([1.0, 2.0, 6.0]))
    copy = RewardNormalizer(clip=1.5)
    copy.load_state_dict(normalizer.state_dict())
    rewards = torch.tensor([-9.0, 2.0, 30.0])
    torch.testing.assert_close(copy(rewards), normalizer(rewards))
    assert copy(rewards).abs().max() == 1.5


def test_bad_rewards_change_nothing():
    normalizer = RewardNormalizer()
    normalizer.update(torch.tensor([1.0, 2.0]))
    before = {k: v.clone() for k, v in normalizer.state_dict().items()}
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="reward must be finite"):
            normalizer.update(torch.tensor([0.0, bad]))
    normalizer.update(torch.tensor([torch.nan]), torch.tensor([False]))
    for name, value in normalizer.state_dict().items():
        assert torch.equal(value, before[name])


def test_clipped_rewards_are_counted_under_the_mask():
    reward = torch.tensor([-3.0, 0.0, 3.0, 9.0])
    mask = torch.tensor([True, True, True, False])
    clipped, cut = clip_reward(reward, -1.0, 3.0, mask=mask)
    assert clipped.tolist() == [-1.0, 0.0, 3.0, 3.0]
    assert float(cut) == pytest.approx(1 / 3)
    assert clip_reward(reward[:0], 0.0, 1.0)[1] == 0


@pytest.mark.parametrize("values", [[float("nan")], [1.0, float("nan")], [float("nan"), 2.0, 3.0]])
def test_nan_is_never_turned_into_a_number(values):
    x = torch.tensor([*values, 7.0])
    mask = torch.arange(len(x)) < len(values)
    out = masked_whiten(x, mask)
    assert out[mask].isnan().all()
    assert float(out[-1]) == 0.0
    assert masked_whiten(x, mask & ~x.isnan()).isfinite().all()


def test_statistics_without_spread_given_from_elsewhere_give_zero():
    x, mask = torch.tensor([1.0, 2.0]), torch.ones(2, dtype=torch.bool)
    equal = masked_moments(torch.ones(5), torch.ones(5, dtype=torch.bool))
    assert masked_whiten(x, mask, moments=equal).tolist() == [0.0, 0.0]


def test_the_largest_numbers_are_whitened():
    x = torch.tensor([3e38, 3e38, -3e38])
    got = masked_whiten(x, torch.ones(3, dtype=torch.bool))
    small = masked_whiten(torch.tensor([3.0, 3.0, -3.0]), torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(got, small, rtol=1e-5, atol=1e-6)
