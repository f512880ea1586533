"""Episodes as one sequence each, however they were cut into rows, against plain float64 loops."""

import pytest
import torch

from torchrl_mt.objectives.episode_gae import episode_gae, whiten
from torchrl_mt.objectives.episode_time import order_episodes
from torchrl_mt.objectives.functional import masked_gae


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


def plain_gae(mask, turns, reward, value, episode, gamma, lmbda, by_turn):
    """GAE over each episode's tokens or turns by a loop in float64."""
    advantage = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for e in set(episode.tolist()):
        places = [(n, t) for n, t in mask.nonzero().tolist() if int(episode[n]) == e]
        places.sort(key=lambda place: (int(turns[place]), place[1]))
        steps = []
        for place in places:
            if by_turn and steps and turns[steps[-1][0]] == turns[place]:
                steps[-1].append(place)
            else:
                steps.append([place])
        after = next_value = 0.0
        for step in reversed(steps):
            earned, expected = sum(float(reward[p]) for p in step), float(value[step[0]])
            after = earned + gamma * next_value - expected + gamma * lmbda * after
            next_value = expected
            for place in step:
                advantage[place], returns[place] = after, after + expected
    return advantage, returns


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_gae_is_the_plain_recursion_over_whole_episodes(seed, by_turn):
    mask, turns, reward, value, episode = random_cut(seed)
    time = order_episodes(mask, turns, episode)
    got = episode_gae(reward, value, time, 0.9, 0.8, turns=turns if by_turn else None)
    expected = plain_gae(mask, turns, reward, value, episode, 0.9, 0.8, by_turn)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_one_row_per_episode_is_masked_gae(seed):
    mask, _, reward, value, _ = random_cut(seed)
    turns = (torch.arange(mask.shape[1]) // 2).expand(mask.shape)
    time = order_episodes(mask, turns, torch.randperm(len(mask)))
    got = episode_gae(reward, value, time, 0.9, 0.8)
    for x, y in zip(got, masked_gae(reward, value, mask, 0.9, 0.8), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("seed", range(4))
def test_order_round_trip_totals_and_last_tokens(seed):
    mask, turns, reward, _, episode = random_cut(seed)
    time = order_episodes(mask, turns, episode)
    assert torch.equal(time.scatter(time.gather(reward)), torch.where(mask, reward, 0.0))
    for e, ident in enumerate(sorted(set(episode.tolist()))):
        mine = mask & (episode == ident)[:, None]
        assert float(time.total(reward)[e]) == pytest.approx(float(reward[mine].sum()), abs=1e-5)
        if not mine.any():
            assert int(time.last_token[e]) == -1
            continue
        n, t = divmod(int(time.last_token[e]), mask.shape[1])
        assert mine[n, t]
        assert int(turns[n, t]) == int(turns[mine].max())
        assert not (mine[n, t + 1 :] & (turns[n, t + 1 :] == turns[n, t])).any()


def test_nothing_sampled_and_no_rows():
    for shape in [(3, 4), (0, 4), (2, 0)]:
        mask = torch.zeros(shape, dtype=torch.bool)
        time = order_episodes(mask, torch.zeros(shape, dtype=torch.long), torch.arange(shape[0]))
        for turns in (None, torch.zeros(shape, dtype=torch.long)):
            for x in episode_gae(torch.ones(shape), torch.ones(shape), time, 1.0, 1.0, turns=turns):
                assert x.shape == shape
                assert not x.any()
        assert not len(time.outcome_rows())


def test_whitening_ignores_masked_tokens_and_is_finite():
    mask = torch.rand(5, 7) < 0.5
    advantage = torch.where(mask, torch.randn(5, 7) * 4 + 3, torch.nan)
    out = whiten(advantage, mask)
    values = advantage[mask].double()
    expected = (values - values.mean()) / (values.std() + 1e-6)
    torch.testing.assert_close(out[mask].double(), expected, atol=1e-5, rtol=1e-5)
    assert not out[~mask].any()
    assert not whiten(torch.full((5, 7), 0.1), mask).any()
    assert not whiten(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)).any()
