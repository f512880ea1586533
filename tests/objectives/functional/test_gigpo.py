"""GiGPO compares episodes, and turns that began with the same message, whatever rows these lie in."""

from statistics import mean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import gigpo_advantage, message_states


@st.composite
def games(draw):
    """Tokens, attention, mask, turns, returns, outcome ``[N, S]``, episode, group ``[N]``."""
    n, s = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    attended = torch.rand(n, s, generator=g) < 0.9
    mask = attended & (torch.rand(n, s, generator=g) < 0.5)
    # A turn is sampled in one row only: rows that share an episode have turns of their own.
    turns = (torch.rand(n, s, generator=g) < 0.3).long().cumsum(-1)
    turns = turns + 20 * torch.randperm(n, generator=g)[:, None]
    episode = torch.randint(0, 4, (n,), generator=g) * 1000
    tokens = torch.randint(0, 2, (n, s), generator=g)
    value = torch.randn(2, 4, 200, generator=g)[:, episode[:, None] // 1000, turns]
    return tokens, attended, mask, turns, *value, episode, episode // 1000 % 2


def loop(tokens, attended, mask, turns, returns, outcome, episode, group, kind, weight):
    """Turn by turn in float64; groups, states and turns by their values."""
    message, first, of = {}, {}, {}
    for n in range(len(mask)):
        said = []
        for t in range(mask.shape[1]):
            turn = (int(episode[n]), int(turns[n, t]))
            if mask[n, t]:
                if turn not in message:
                    state = tuple(said) or ("none", turn)
                    message[turn] = (int(group[n]), state, float(returns[n, t]))
                    lead = first.get(turn[0])
                    if lead is None or turn[1] < lead[0]:
                        first[turn[0]] = turn[1], (int(group[n]), float(outcome[n, t]))
                of[n, t], said = turn, []
            elif attended[n, t]:
                said.append(int(tokens[n, t]))

    def compare(x, peers):
        if len(peers) < 2:
            return 0.0
        return (x - mean(peers)) / (stdev(peers) + 1e-6 if kind == "grpo" else 1.0)

    out = torch.zeros(mask.shape, dtype=torch.float64)
    for place, turn in of.items():
        of_group, said, value = message[turn]
        same = [v for g, m, v in message.values() if (g, m) == (of_group, said)]
        whole = first[turn[0]][1][1]
        peers = [v for _, (g, v) in first.values() if g == of_group]
        out[place] = compare(whole, peers) + weight * compare(value, same)
    return out


def evaluate(game, kind="dr_grpo", weight=0.5):
    tokens, attended, mask, turns, returns, outcome, episode, group = game
    where = torch.where(mask, turns, -1)
    state = message_states(tokens, attended, mask, where, episode)
    assert torch.equal(state >= 0, mask)
    returns, outcome = (torch.where(mask, x, torch.nan) for x in (returns, outcome))
    given = returns, outcome, mask, where, episode, group, state
    return gigpo_advantage(*given, kind, step_weight=weight)


@pytest.mark.parametrize("kind", ["dr_grpo", "grpo"])
@given(game=games())
def test_advantage_is_the_formula(kind, game):
    got = evaluate(game, kind)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), loop(*game, kind, 0.5), atol=1e-4, rtol=1e-4)


RETURNS = [[1.0, 2.0, 4.0], [1.0, 0.0], [1.0, 2.0], [5.0], [0.5, 1.0]]
OUTCOMES = [4.0, 1.0, 2.0, 5.0, 1.0]
SAID = ["aba", "ac", "ba", "a", "ba"]
DR_GRPO = [1.166667, 1.916667, 2.666667, -1.833333, -1.333333]
DR_GRPO += [-0.583333, -0.333333, 3.0, -2.0, -3.0]
GRPO = [0.737536, 1.444642, 1.798195, -1.226424, -0.872871]
GRPO += [-0.571771, -0.218218, 1.060660, -0.707107, -1.060660]


@pytest.mark.parametrize(("kind", "expected"), [("dr_grpo", DR_GRPO), ("grpo", GRPO)])
def test_numbers_are_verl_agents(kind, expected):
    """Of ``gigpo/core_gigpo.py`` with its statistics over episodes, in both of its modes."""
    rows = [(e, k) for e, said in enumerate(SAID) for k in range(len(said))]
    tokens = torch.tensor([[ord(SAID[e][k]), 0] for e, k in rows])
    turns = torch.tensor([[k, k] for _, k in rows])
    episode = torch.tensor([e for e, _ in rows])
    returns = torch.tensor([[0.0, RETURNS[e][k]] for e, k in rows])
    outcome = torch.tensor([[0.0, OUTCOMES[e]] for e, _ in rows])
    mask = torch.tensor([[False, True]]).expand(len(rows), 2)
    group = torch.tensor([0, 0, 0, 1, 1])[episode]
    state = message_states(tokens, torch.ones_like(mask), mask, turns, episode)
    where = mask, turns, episode, group, state
    got = gigpo_advantage(returns, outcome, *where, kind, step_weight=0.5)
    torch.testing.assert_close(got[:, 1], torch.tensor(expected), atol=2e-6, rtol=0)
