"""Episodes as one sequence each, however they were cut into rows, against plain float64 loops."""

import pytest
import torch

from torchrl_mt.objectives.functional import episode_gae, masked_gae
from torchrl_mt.objectives.functional.time.episodes import index_episodes


def random_cut(seed, *, episodes=4, columns=9, rows_each=3):
    """Rows of forked episodes: every turn of an episode lies in one of its rows, rows shuffled."""
    g = torch.Generator().manual_seed(seed)
    n = episodes * rows_each
    turns = torch.full((n, columns), -1)
    for e in range(episodes):
        column = [0] * rows_each
        for turn in range(int(torch.randint(1, 6, (), generator=g))):
            row = int(torch.randint(rows_each, (), generator=g))
            size = int(torch.randint(1, 4, (), generator=g))
            at = column[row]
            turns[e * rows_each + row, at : at + size] = turn
            column[row] = min(columns, at + size)
    mask = (turns >= 0) & (torch.rand(n, columns, generator=g) < 0.7)
    reward = torch.where(mask, torch.randn(n, columns, generator=g), 0.0)
    value = torch.randn(n, columns, generator=g)
    order = torch.randperm(n, generator=g)
    episode = (torch.arange(n) // rows_each * 3 + 5)[order]
    return *(x[order] for x in (mask, turns, reward, value)), episode


def plain_gae(mask, turns, reward, value, episode, gamma, lmbda):
    """GAE over each episode's tokens by a loop in float64."""
    advantage = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for e in set(episode.tolist()):
        places = [(n, t) for n, t in mask.nonzero().tolist() if int(episode[n]) == e]
        places.sort(key=lambda place: (int(turns[place]), place[1]))
        after = next_value = 0.0
        for place in reversed(places):
            earned, expected = float(reward[place]), float(value[place])
            after = earned + gamma * next_value - expected + gamma * lmbda * after
            next_value = expected
            advantage[place], returns[place] = after, after + expected
    return advantage, returns


@pytest.mark.parametrize("seed", range(8))
def test_gae_is_the_plain_recursion_over_whole_episodes(seed):
    mask, turns, reward, value, episode = random_cut(seed)
    value = torch.where(mask, value, torch.nan)
    got = episode_gae(reward, value, mask, turns, 0.9, 0.8, episode=episode)
    expected = plain_gae(mask, turns, reward, value, episode, 0.9, 0.8)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_one_row_per_episode_is_masked_gae(seed):
    mask, _, reward, value, _ = random_cut(seed)
    turns = (torch.arange(mask.shape[1]) // 2).expand(mask.shape)
    got = episode_gae(reward, value, mask, turns, 0.9, 0.8, episode=torch.randperm(len(mask)))
    alone = episode_gae(reward, value, mask, turns, 0.9, 0.8)
    for x, y in zip(got, alone, strict=True):
        assert torch.equal(x, y)
    for x, y in zip(got, masked_gae(reward, value, mask, 0.9, 0.8), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("seed", range(4))
def test_order_round_trip_totals_and_last_tokens(seed):
    mask, turns, reward, _, episode = random_cut(seed)
    index = index_episodes(mask, turns, episode)
    assert torch.equal(index.write(reward.flatten()[index.token]), torch.where(mask, reward, 0.0))
    for e, ident in enumerate(sorted(set(episode.tolist()))):
        mine = mask & (episode == ident)[:, None]
        assert float(index.total(reward)[e]) == pytest.approx(float(reward[mine].sum()), abs=1e-5)
        if not mine.any():
            assert int(index.last_token[e]) == -1
            continue
        n, t = divmod(int(index.last_token[e]), mask.shape[1])
        assert mine[n, t]
        assert int(turns[n, t]) == int(turns[mine].max())
        assert not (mine[n, t + 1 :] & (turns[n, t + 1 :] == turns[n, t])).any()


def test_nothing_sampled_and_no_rows():
    for shape in [(3, 4), (0, 4), (2, 0)]:
        mask = torch.zeros(shape, dtype=torch.bool)
        turns = torch.zeros(shape, dtype=torch.long)
        for x in episode_gae(torch.ones(shape), torch.ones(shape), mask, turns, 1.0, 1.0):
            assert x.shape == shape
            assert not x.any()
        assert not len(index_episodes(mask, turns).outcome_rows())


def test_turns_and_shapes_are_checked():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="turns must be 0 or more on every sampled token, got -1"):
        episode_gae(ones, ones, ones.bool(), torch.tensor([[0, -1]]), 1.0, 1.0)
    flat = torch.ones(2)
    with pytest.raises(ValueError, match=r"mask must have shape \[N, S\], got \(2,\)"):
        episode_gae(flat, flat, flat.bool(), flat.long(), 1.0, 1.0)
