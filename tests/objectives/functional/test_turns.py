"""A turn counts once, its discount counts turns, and rows of one episode are one sequence."""

from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import episode_gae, turn_gae, turn_normalize, turn_returns
from torchrl_mt.objectives.functional.time.episodes import index_turns


@st.composite
def batches(draw):
    """Reward, mask, turns ``[N, S]`` and episode ``[N]``; turn ids skip numbers, rows share episodes."""
    n, s = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    steps = torch.randint(0, 3, (n, s), generator=g) * (torch.rand(n, s, generator=g) < 0.4)
    turns = torch.where(torch.rand(n, s, generator=g) < 0.1, -1, steps.cumsum(-1))
    turns = torch.where(mask, turns.clamp(min=0), turns)
    episode = torch.randint(-3, 3, (n,), generator=g) * 1000
    # A turn is sampled in one row only: rows that share an episode have turns of their own.
    turns = torch.where(turns >= 0, turns + 40 * torch.randperm(n, generator=g)[:, None], -1)
    return torch.randn(n, s, generator=g), mask, turns, episode


def loop_rewards(reward, mask, turns, episode):
    """Reward of each (episode, turn)."""
    earned: dict[tuple[int, int], float] = {}
    for n in range(len(mask)):
        positions = mask[n].nonzero().flatten().tolist()
        for t in positions:
            earned.setdefault((int(episode[n]), int(turns[n, t])), 0.0)
        for t in range(mask.shape[1]):
            before = [p for p in positions if p <= t] or positions[:1]
            if before:
                earned[int(episode[n]), int(turns[n, before[-1]])] += float(reward[n, t])
    return earned


@given(batches(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_turn_returns_are_the_formula(batch, gamma):
    reward, mask, turns, episode = batch
    earned = loop_rewards(reward, mask, turns, episode)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for n, t in mask.nonzero().tolist():
        e, now = int(episode[n]), int(turns[n, t])
        expected[n, t] = sum(
            gamma ** (u - now) * r for (f, u), r in earned.items() if f == e and u >= now
        )
    got = turn_returns(reward, mask, turns, gamma, episode=episode)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


@given(batches())
def test_without_episode_every_row_stands_alone(batch):
    reward, mask, turns, _ = batch
    together = turn_returns(reward, mask, turns, 0.9)
    for n in range(len(mask)):
        row = slice(n, n + 1)
        alone = turn_returns(reward[row], mask[row], turns[row], 0.9)
        torch.testing.assert_close(together[row], alone)


def test_a_fork_does_not_change_a_turns_return():
    reward = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    turns = torch.arange(4)[None]
    straight = turn_returns(reward, turns >= 0, turns, 0.5)[0]
    reward = torch.tensor([[1.0, 2.0], [8.0, 4.0]])
    turns = torch.tensor([[0, 1], [3, 2]])
    forked = turn_returns(reward, turns >= 0, turns, 0.5, episode=torch.tensor([5, 5]))
    torch.testing.assert_close(forked.flatten()[[0, 1, 3, 2]], straight)


@given(batches())
def test_normalisation_has_a_mean_for_each_turn_and_one_divisor(batch):
    _, mask, turns, episode = batch
    turns = torch.where(turns >= 0, turns % 3, -1)
    value_of = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    key = (episode[:, None] // 1000 + 3) * 3 + turns.clamp(min=0)
    returns = value_of[key]
    members: dict[int, dict[int, float]] = {}
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


def test_lone_and_equal_turns_get_zero():
    returns = torch.full((3, 2), 0.1)
    returns[0, 1] = 7.0
    turns = torch.tensor([[0, 1], [0, -1], [0, -1]])
    assert not turn_normalize(returns, turns >= 0, turns).any()
    # Of the divisor only equal turns are a part: a lone one has no mean of others to differ from.
    returns = torch.tensor([[0.1, 3.0, 7.0], [0.1, 5.0, 0.0]])
    turns = torch.tensor([[0, 1, 2], [0, 1, -1]])
    got = turn_normalize(returns, turns >= 0, turns)
    expected = torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]]) * 1.5**0.5
    torch.testing.assert_close(got, expected)


def test_equal_returns_come_out_equal_whatever_the_order_of_the_sums():
    reward = 100 * torch.rand(1, 12, generator=torch.Generator().manual_seed(0))
    reward = torch.cat([reward, reward.flip(-1)])
    turns = torch.zeros(2, 12, dtype=torch.long)
    returns = turn_returns(reward, turns == 0, turns, 1.0)
    assert not turn_normalize(returns, turns == 0, turns).any()


def test_index_is_ordered_and_invertible():
    mask = torch.tensor([[True, False, True, True], [True, True, False, True]])
    turns = torch.tensor([[2, -1, 2, 4], [1, 3, 3, 3]])
    index = index_turns(mask, turns, torch.tensor([9, 9]))
    assert index.turn.tolist() == [1, 2, 3, 4]
    assert index.opens_episode().tolist() == [True, False, False, False]
    assert index.total(torch.ones(2, 4)).tolist() == [1, 2, 2, 1]
    per_turn = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert index.read(index.write(per_turn)).tolist() == per_turn.tolist()
    assert not index.write(per_turn)[~mask].any()


def test_huge_turn_ids_cost_nothing():
    turns = torch.tensor([[0, 1_000_000_000]])
    got = turn_returns(torch.ones(1, 2), turns >= 0, turns, 0.5)
    torch.testing.assert_close(got, torch.ones(1, 2))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_a_bad_reward_stays_in_its_episode(bad, gamma):
    reward = torch.tensor([[1.0, 1.0], [1.0, bad], [1.0, 1.0]])
    turns = torch.tensor([[0, 1], [0, 1], [0, 1]])
    got = turn_returns(reward, turns >= 0, turns, gamma, episode=torch.tensor([4, 5, 6]))
    assert torch.isfinite(got[[0, 2]]).all()
    assert not torch.isfinite(got[1, 1])
    assert torch.isfinite(got[1, 0]) == (gamma == 0)


def test_nothing_sampled_gives_zeros():
    mask, turns = torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 3), -1)
    assert not turn_returns(torch.ones(2, 3), mask, turns, 0.9).any()
    assert not turn_normalize(torch.ones(2, 3), mask, turns).any()


def test_a_sampled_token_needs_a_turn():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="turns must be 0 or more"):
        turn_returns(torch.ones(1, 2), mask, torch.tensor([[0, -1]]), 0.9)
    with pytest.raises(ValueError, match="episode must have shape"):
        index_turns(mask, torch.tensor([[0, 0]]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="gamma must lie in"):
        turn_returns(torch.ones(1, 2), mask, torch.tensor([[0, 0]]), 2.0)


def test_the_order_of_rewards_on_one_token_does_not_matter():
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(40, 9, dtype=torch.bool)
    mask[:, 0] = True
    reward = 1e3 * torch.randn(9, generator=generator)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in mask])
    turns = torch.zeros(40, 9, dtype=torch.long)
    returns = turn_returns(reward[order], mask, turns, 1.0)[:, 0]
    assert (returns == returns[0]).all()
    for estimate in (turn_gae, episode_gae):
        value = torch.zeros(40, 9)
        got = estimate(reward[order], value, mask, turns, 1.0, 1.0)[0][:, 0]
        assert (got == got[0]).all()
