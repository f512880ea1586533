"""Each token has the baseline of the tokens of its number in its group, whatever rows these lie in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional._batches import forked_rows
from torchrl_mt.objectives.functional import otb_advantage


@st.composite
def batches(draw):
    """Returns, norms, mask, turns ``[N, S]``, episode, group ``[N]``."""
    reward, value, mask, turns, episode = draw(forked_rows())
    episode = torch.arange(len(mask)) * 1000 if episode is None else episode
    norms = value.nan_to_num().clamp(min=0)
    return (2 * reward).round(), norms, mask, turns, episode, episode // 1000 % 2 - 7


def loop(returns, norms, mask, turns, episode, group, lone):
    """Token by token in float64."""
    tokens = {}
    for n, t in mask.nonzero().tolist():
        tokens.setdefault(int(episode[n]), []).append((int(turns[n, t]), n, t))
    at, place = {}, {}
    for of in tokens.values():
        energy = 0.0
        for number, (_, n, t) in enumerate(sorted(of)):
            energy += float(norms[n, t])
            place[n, t] = int(group[n]), number
            at.setdefault(place[n, t], []).append((energy, float(returns[n, t])))
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for (n, t), where in place.items():
        total = sum(w for w, _ in at[where])
        weights = [w / total if total else 1 / len(at[where]) for w, _ in at[where]]
        mean = sum(w * x for w, (_, x) in zip(weights, at[where], strict=True))
        out[n, t] = lone if len(at[where]) == 1 else float(returns[n, t]) - mean
    return out


def evaluate(batch, lone=0.0):
    returns, norms, mask, turns, episode, group = batch
    returns, norms = (torch.where(mask, x, torch.nan) for x in (returns, norms))
    turns = torch.where(mask, turns, -1)
    return otb_advantage(returns, norms, mask, turns, episode, group, lone_value=lone)


@given(batches(), st.sampled_from([0.0, 0.5]))
def test_advantage_is_the_formula(batch, lone):
    got = evaluate(batch, lone)
    torch.testing.assert_close(got.double(), loop(*batch, lone), atol=1e-5, rtol=1e-5)


MASK = torch.tensor(
    [[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 1]]
)
RETURNS = [3.0, 3.0, 2.0, 1.5, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 3.0, 3.0, 0.0]
SAMPLED = [0.5, 0.9, 0.3, 0.2, 0.7, 0.4, 0.8, 0.6, 0.25, 0.95, 0.35, 0.5, 0.15]
SQUARES = [0.4, 0.82, 0.3, 0.3, 0.55, 0.4, 0.7, 0.45, 0.3, 0.91, 0.3, 0.5, 0.2]
VERL = [1.0930232, 1.7403314, 1.5145798, -0.4069768, -0.2596686, 0.5145798, 0.0]
VERL += [-2.9069768, -2.2596686, -1.4854202, 1.0930232, 1.7403314, -0.4854202]


@pytest.mark.parametrize("turn_of", [torch.zeros_like(MASK), torch.arange(6).expand(4, 6)])
def test_numbers_are_verls(turn_of):
    """Of ``compute_multi_turn_optimal_token_baseline_advantage(handle_zero_tail=False)``."""
    mask = MASK.bool()
    returns, sampled, squares = (
        torch.zeros(4, 6).masked_scatter(mask, torch.tensor(x)) for x in (RETURNS, SAMPLED, SQUARES)
    )
    where = mask, turn_of, torch.arange(4), torch.zeros(4).long()
    got = otb_advantage(returns, 1 - 2 * sampled + squares, *where)
    torch.testing.assert_close(got[mask], torch.tensor(VERL), atol=1e-6, rtol=1e-6)
