"""Groups are told apart by id; lone members and equal groups are finite, gradients included."""

from itertools import combinations
from math import comb, sqrt
from statistics import mean, pstdev, stdev
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional._batches import forked_rows
from torchrl_mt.objectives.functional import (
    gdpo_advantage,
    group_advantage,
    outcome_advantage,
    turn_normalize,
)
from torchrl_mt.objectives.functional.group import GroupKind

KINDS = get_args(GroupKind)
LENGTHS = {"opo", "reinforce_baseline", "batch"}
"""Kinds that are tested with lengths; the last two also go without."""


@st.composite
def members(draw):
    n = draw(st.integers(0, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # Few distinct values, none of them exact in binary: equal groups are common and rounding shows.
    returns = torch.randint(0, draw(st.integers(1, 4)), (n,), generator=g) * 0.1
    group = torch.randint(-2, 3, (n,), generator=g) * 10**10
    return returns, group, torch.rand(n, generator=g) < 0.8


def lengths_of(kind, returns):
    """A length for each member, from its return: permutes with it."""
    return (returns * 30).long() + 1 if kind in LENGTHS else None


def weighted_mean(x, weight):
    return sum(a * w for a, w in zip(x, weight, strict=True)) / sum(weight)


def whiten(x, everyone, weight):
    """Distance of ``x`` from the weighted mean of everyone in unbiased standard deviations."""
    if max(everyone) - min(everyone) < 1e-12:
        return 0.0
    center = weighted_mean(everyone, weight)
    square = sum(w * (y - center) ** 2 for y, w in zip(everyone, weight, strict=True))
    return (x - center) / (sqrt(square / (sum(weight) - 1)) + 1e-6)


def one(x, peers, batch, lengths, kind):
    """The formula of each paper for one valid member that is not alone."""
    returns, peer_lengths = zip(*peers, strict=True)
    center = mean(returns)
    if max(returns) == min(returns) and kind not in ("batch", "reinforce++"):
        return 0.0
    if kind == "dr_grpo":
        return x - center
    if kind == "rloo":
        others = list(returns)
        others.remove(x)
        return x - mean(others)
    if kind == "max_rl":
        return (x - center) / (center + 1e-6) if center > 0 else 0.0
    if kind == "pass_at_k":
        subsets = list(combinations(range(len(returns)), min(4, len(returns) - 1)))
        best = [max(returns[i] for i in chosen) for chosen in subsets]
        own = returns.index(x)
        with_it = [b for b, chosen in zip(best, subsets, strict=True) if own in chosen]
        return (mean(with_it) - mean(best)) / (pstdev(best) + 1e-6)
    if kind == "opo":
        return x - weighted_mean(returns, peer_lengths)
    if kind == "grpo":
        return (x - center) / (stdev(returns) + 1e-6)
    if kind == "reinforce_baseline":
        return whiten(x - center, batch, lengths)
    return whiten(x, returns, peer_lengths)


def loop(returns, group, kind, valid, lone_value=0.0, lengths=None):
    weight = [1] * len(group) if lengths is None else lengths.tolist()
    ids = [0 if kind in ("batch", "reinforce++") else k for k in group.tolist()]
    rows = list(zip(returns.double().tolist(), ids, valid.tolist(), weight, strict=True))
    peers = [[(y, w) for y, c, v, w in rows if v and c == k] for _, k, _, _ in rows]
    compared = [
        (x - mean(y for y, _ in of), w)
        for (x, _, v, w), of in zip(rows, peers, strict=True)
        if v and len(of) > 1
    ]
    out = []
    for (x, _, v, _), of in zip(rows, peers, strict=True):
        if not v:
            out.append(0.0)
        elif len(of) == 1:
            out.append(lone_value)
        else:
            out.append(one(x, of, *zip(*compared, strict=True), kind))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members())
def test_advantage_is_the_formula(kind, batch):
    returns, group, valid = batch
    lengths = lengths_of(kind, returns)
    dirty = torch.where(valid, returns, torch.nan)
    got = group_advantage(dirty, group, kind, valid=valid, lone_value=-0.5, lengths=lengths)
    expected = loop(returns, group, kind, valid, -0.5, lengths)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
    lengths = lengths if kind == "opo" else None
    everyone = group_advantage(returns, group, kind, lengths=lengths)
    expected = loop(returns, group, kind, torch.ones_like(valid), lengths=lengths)
    torch.testing.assert_close(everyone.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members())
def test_values_and_gradients_are_finite(kind, batch):
    returns, group, valid = batch
    lengths = lengths_of(kind, returns)
    returns.requires_grad_()
    advantage = group_advantage(returns, group, kind, valid=valid, lengths=lengths)
    (gradient,) = torch.autograd.grad(advantage.square().sum(), returns)
    assert advantage.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_members_get_exactly_zero(kind):
    returns, group = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)
    assert not group_advantage(returns, group, kind, lengths=torch.arange(1, 8)).any()
    assert not group_advantage(returns[:1], group[:1], kind, lengths=torch.ones(1)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_computed_in_float32(kind):
    returns = torch.randn(12, generator=torch.Generator().manual_seed(0)).bfloat16()
    group, lengths = torch.arange(12) // 4, torch.arange(12) + 1
    got = group_advantage(returns, group, kind, lengths=lengths)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, group_advantage(returns.float(), group, kind, lengths=lengths))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_outcome_is_compared_by_the_first_turn_of_each_episode(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    n, s = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    mask = torch.rand(n, s, generator=generator) < 0.6
    steps = torch.randint(0, 3, (n, s), generator=generator)
    turns = steps.cumsum(-1) + torch.randint(0, 6, (n, 1), generator=generator)
    episode = 7 * torch.randint(0, n, (n,), generator=generator)
    group = episode % 3
    scored = torch.rand(n, s, generator=generator) < 0.7
    of_turn = torch.randn(64, 64, generator=generator)
    returns = torch.where(mask, of_turn[episode[:, None], turns], torch.nan)

    first, length = {}, {}
    for row, position in mask.nonzero().tolist():
        e, turn = int(episode[row]), int(turns[row, position])
        first[e] = min(turn, first.get(e, turn))
        length[e] = length.get(e, 0) + (int(scored[row, position]) if seed % 2 else 1)
    outcome = torch.tensor([float(of_turn[e, first[e]]) for e in first])
    lengths = torch.tensor([length[e] for e in first])
    ids = torch.tensor([e % 3 for e in first], dtype=torch.long)
    per_episode = group_advantage(outcome, ids, kind, lengths=lengths if kind == "opo" else None)
    expected = torch.zeros(n, s)
    for e, value in zip(first, per_episode, strict=True):
        expected[(episode == e)[:, None] & mask] = value

    turns = torch.where(mask, turns, -1).to(torch.int32)
    options = {"scored": scored} if seed % 2 else {}
    got = outcome_advantage(returns, mask, turns, episode, group.int(), kind, **options)
    torch.testing.assert_close(got, expected)


def test_groups_without_success_teach_nothing_by_max_rl():
    returns = torch.tensor([-2.0, 0.0, -1.0, 1.0, 0.0, 3.0])
    got = group_advantage(returns, torch.arange(6) // 2, "max_rl", eps=0.0)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, 1.0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[3, 3, 3, 5, 5], [3, 4, 4, 5, 5]])
def test_nan_is_never_turned_into_a_number(kind, ids):
    group = torch.tensor(ids)
    returns = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 5.0])
    lengths = torch.ones(5) if kind == "opo" else None
    out = group_advantage(returns, group, kind, lengths=lengths, lone_value=1.0)
    assert out[0].isnan()
    assert out[group == 3].isnan().all()
    if kind not in ("batch", "reinforce++", "reinforce_baseline"):
        assert out[group != 3].isfinite().all()
    valid = torch.tensor([False, True, True, True, True])
    kept = group_advantage(returns, group, kind, lengths=lengths, valid=valid)
    assert kept.isfinite().all()


def test_opo_without_any_length_takes_the_plain_mean():
    returns, group = torch.tensor([1.0, 3.0, 5.0, 9.0]), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([0, 0, 3, 1])
    out = group_advantage(returns, group, "opo", lengths=lengths)
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0, -1.0, 3.0]))


def each_episode(x):
    """Arguments of an advantage of episodes with one token each, after a token that is not sampled."""
    n = x.shape[-1]
    mask = torch.tensor([[False, True]]).expand(n, 2)
    x = torch.stack([torch.full_like(x, torch.nan), x], dim=-1)
    return x, (mask, torch.zeros(n, 2).long(), torch.arange(n) * 3)


@given(members(), st.integers(1, 3), st.integers(0, 1000))
def test_rewards_are_compared_one_by_one_and_their_sum_whitened(batch, number, seed):
    _, group, _ = batch
    g = torch.Generator().manual_seed(seed)
    returns = torch.randint(0, 3, (number, len(group)), generator=g) * 0.1
    weight = torch.rand(number, 1, generator=g).expand(-1, len(group)) * 3
    total = [0.0] * len(group)
    for own, factor in zip(returns, weight, strict=True):
        compared = loop(own, group, "grpo", torch.ones_like(group, dtype=torch.bool)).tolist()
        total = [t + float(f) * x for t, f, x in zip(total, factor, compared, strict=True)]
    expected = [whiten(x, total, [1] * len(total)) if len(total) > 1 else 0.0 for x in total]
    stacked, where = each_episode(returns)
    got = gdpo_advantage(stacked, weight, *where, group)
    if len(total) > 1 and max(total) - min(total) < 1e-4:
        return  # What is left of the sum is rounding.
    assert not got[:, 0].any()
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got[:, 1].double(), expected, atol=1e-3, rtol=1e-3)


def test_numbers_of_several_rewards_are_verls():
    """Of verl 1dda039b9, ``compute_gdpo_outcome_advantage``, for responses of one token."""
    returns = torch.tensor([[0.0, 90.0, 10.0, 30.0, 5.0, 5.0], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]])
    weight = torch.tensor([[1.0], [0.5]]).expand(2, 6)
    stacked, where = each_episode(returns)
    got = gdpo_advantage(stacked, weight, *where, torch.tensor([7, 7, 7, 2, 2, 2]))[:, 1]
    torch.testing.assert_close(
        got,
        torch.tensor([-0.100109, 0.875122, -0.775013, 1.46862, -0.293724, -1.174895]),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("failures", [1, 4, 7])
def test_pass_at_k_of_successes_is_the_papers(k, failures):
    """Of Chen et al., 2025, with the binomial coefficients written out."""
    n = 8
    reward = 1 - comb(failures, k) / comb(n, k)
    scale = sqrt(reward * (1 - reward)) + 1e-6
    failed = (1 - reward - comb(failures - 1, k - 1) / comb(n - 1, k - 1)) / scale
    expected = [failed] * failures + [(1 - reward) / scale] * (n - failures)
    returns = torch.tensor([0.0] * failures + [1.0] * (n - failures))
    got = group_advantage(returns, torch.zeros(n).long(), "pass_at_k", pass_k=k)
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), atol=1e-6, rtol=1e-5)


@given(forked_rows())
def test_returns_of_turns_have_a_mean_for_each_turn_and_one_divisor(batch):
    _, _, mask, turns, episode = batch
    turns = torch.where(mask, turns % 3, -1)
    episode = torch.arange(len(mask)) if episode is None else episode // 1000 + 3
    value_of = torch.randn(100, generator=torch.Generator().manual_seed(0))
    returns = value_of[episode[:, None] * 3 + turns.clamp(min=0)]
    members = {}
    for n, t in mask.nonzero().tolist():
        members.setdefault(int(turns[n, t]), {})[int(episode[n])] = float(returns[n, t])
    centred = {
        k: {e: value - mean(own.values()) for e, value in own.items()}
        for k, own in members.items()
        if len(own) > 1
    }
    spread = [value for own in centred.values() for value in own.values()]
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for n, t in mask.nonzero().tolist():
        if own := centred.get(int(turns[n, t])):
            expected[n, t] = own[int(episode[n])] / (stdev(spread) + 1e-6)
    got = turn_normalize(returns, mask, turns, episode=episode)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def test_equal_turns_get_zero_and_count_in_the_divisor():
    returns = torch.tensor([[0.1, 3.0, 7.0], [0.1, 5.0, 0.0]])
    turns = torch.tensor([[0, 1, 2], [0, 1, -1]])
    got = turn_normalize(returns, turns >= 0, turns)
    expected = torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]]) * 1.5**0.5
    torch.testing.assert_close(got, expected)
    assert not turn_normalize(returns, turns > 2, turns).any()
