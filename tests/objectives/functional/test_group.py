"""Groups are told apart by id; lone members and equal groups are finite, gradients included."""

from math import sqrt
from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import group_advantage, outcome_advantage

KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_baseline", "max_rl", "opo", "batch", "reinforce++"]
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
    got = group_advantage(returns, group, kind, valid=valid, lone_value=-0.5, lengths=lengths)
    expected = loop(returns, group, kind, valid, -0.5, lengths)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)
    lengths = lengths if kind == "opo" else None
    everyone = group_advantage(returns, group, kind, lengths=lengths)
    expected = loop(returns, group, kind, torch.ones_like(valid), lengths=lengths)
    torch.testing.assert_close(everyone.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=members(), seed=st.integers(0, 2**31))
def test_position_does_not_matter(kind, batch, seed):
    returns, group, valid = batch
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    lengths = lengths_of(kind, returns)
    got = group_advantage(returns, group, kind, valid=valid, lengths=lengths)
    lengths = None if lengths is None else lengths[order]
    permuted = group_advantage(
        returns[order], group[order], kind, valid=valid[order], lengths=lengths
    )
    torch.testing.assert_close(got[order], permuted, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "max_rl", "opo"])
@given(batch=members())
def test_a_shard_of_whole_groups_has_the_whole_batches_advantages(kind, batch):
    returns, group, valid = batch
    lengths = lengths_of("opo", returns)
    whole = group_advantage(returns, group, kind, valid=valid, lengths=lengths)
    for i in group.unique():
        of = group == i
        part = group_advantage(returns[of], group[of], kind, valid=valid[of], lengths=lengths[of])
        torch.testing.assert_close(part, whole[of])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_computed_in_float32(kind):
    returns = torch.randn(12, generator=torch.Generator().manual_seed(0)).bfloat16()
    group, lengths = torch.arange(12) // 4, torch.arange(12) + 1
    got = group_advantage(returns, group, kind, lengths=lengths)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, group_advantage(returns.float(), group, kind, lengths=lengths))


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_members_are_not_read(kind):
    returns = torch.tensor([1.0, torch.nan, 3.0, 2.0])
    valid = torch.tensor([True, False, True, True])
    group = torch.zeros(4, dtype=torch.long)
    lengths = torch.tensor([1, 0, 3, 2])
    got = group_advantage(returns, group, kind, valid=valid, lengths=lengths)
    assert got[1] == 0
    alone = group_advantage(returns[valid], group[valid], kind, lengths=lengths[valid])
    torch.testing.assert_close(got[valid], alone)


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        group_advantage(torch.zeros(2), torch.zeros(2, dtype=torch.long), "median")
    with pytest.raises(ValueError, match="group must have shape"):
        group_advantage(torch.zeros(2), torch.zeros(3, dtype=torch.long))
    group = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="lengths must be given for kind 'opo'"):
        group_advantage(torch.zeros(2), group, "opo")
    with pytest.raises(ValueError, match=r"lengths must have shape \(2,\), got \(3,\)"):
        group_advantage(torch.zeros(2), group, "opo", lengths=torch.ones(3))
    with pytest.raises(TypeError, match="group must hold integer ids"):
        group_advantage(group, torch.zeros(2))


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
        length[e] = length.get(e, 0) + int(scored[row, position])
    outcome = torch.tensor([float(of_turn[e, first[e]]) for e in first])
    lengths = torch.tensor([length[e] for e in first])
    ids = torch.tensor([e % 3 for e in first], dtype=torch.long)
    per_episode = group_advantage(outcome, ids, kind, lengths=lengths if kind == "opo" else None)
    expected = torch.zeros(n, s)
    for e, value in zip(first, per_episode, strict=True):
        expected[(episode == e)[:, None] & mask] = value

    turns = torch.where(mask, turns, -1).to(torch.int32)
    got = outcome_advantage(returns, mask, turns, episode, group.int(), kind, scored=scored)
    torch.testing.assert_close(got, expected)


def test_a_sampled_token_has_a_turn_and_shapes_are_named():
    ones = torch.ones(1, 2)
    ids = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="turns must be 0 or more on every sampled token"):
        outcome_advantage(ones, ones.bool(), -ones.long(), ids, ids)
    with pytest.raises(ValueError, match=r"turns must have shape \(1, 2\), got \(1, 3\)"):
        outcome_advantage(ones, ones.bool(), torch.zeros(1, 3, dtype=torch.long), ids, ids)


def test_an_episode_has_one_group():
    ones = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="group must be the same"):
        outcome_advantage(
            ones.float(), ones.bool(), ones, torch.tensor([4, 4]), torch.tensor([0, 1])
        )


def test_groups_without_success_teach_nothing_by_max_rl():
    returns = torch.tensor([-2.0, 0.0, -1.0, 1.0, 0.0, 3.0])
    got = group_advantage(returns, torch.arange(6) // 2, "max_rl", eps=0.0)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0, 1.0]))


def test_outcome_lengths_are_the_episodes_sampled_tokens():
    returns = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [False, True, False], [True, False, False]])
    turns = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1]])
    episode, group = torch.tensor([5, 6, 5]), torch.tensor([9, 9, 9])
    got = outcome_advantage(returns, mask, turns, episode, group, "opo")
    torch.testing.assert_close(got[mask], torch.tensor([-1.0, -1.0, 3.0, -1.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_outcome_advantages(kind):
    returns = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    got = outcome_advantage(
        returns,
        mask,
        torch.zeros(3, 2, dtype=torch.long),
        torch.arange(3),
        torch.zeros(3).long(),
        kind,
    )
    assert got[0, 0] == got[0, 1] > 0 > got[1, 0]
    assert not got[~mask].any()


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


def test_missing_ids_are_named():
    with pytest.raises(TypeError, match=r"group must be a tensor of shape \(2,\), got None"):
        group_advantage(torch.zeros(2), None)
    ones = torch.ones(1, 2)
    with pytest.raises(TypeError, match=r"turns must be a tensor of shape \(1, 2\), got None"):
        outcome_advantage(ones, ones.bool(), None, torch.zeros(1).long(), torch.zeros(1).long())
