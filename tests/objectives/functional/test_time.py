"""Returns and advantages count sampled tokens only, against the papers' recursions in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.functional._batches import forked_rows
from tests.tiers import slow
from torchrl_mt.objectives.functional import (
    bilevel_gae,
    episode_gae,
    masked_gae,
    masked_returns,
    turn_gae,
    turn_returns,
)

NAMES = ["masked_returns", "masked_gae", "episode_gae", "turn_returns", "turn_gae", "bilevel_gae"]
FACTOR = st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0])


def call(name, batch, factors=(0.9, 0.8, 0.7, 0.6)):
    """Advantages and returns; ``factors`` are gamma, lambda, and those of turns."""
    reward, value, mask, turns, episode = batch
    gamma, lmbda, turn_gamma, turn_lmbda = factors
    if name == "masked_returns":
        return [masked_returns(reward, mask, gamma)] * 2
    if name == "masked_gae":
        return masked_gae(reward, value, mask, gamma, lmbda)
    if name == "turn_returns":
        return [turn_returns(reward, mask, turns, gamma, episode=episode)] * 2
    options = {"episode": episode}
    if name == "bilevel_gae":
        options |= {"turn_gamma": turn_gamma, "turn_lmbda": turn_lmbda}
    estimate = {"episode_gae": episode_gae, "turn_gae": turn_gae, "bilevel_gae": bilevel_gae}[name]
    return estimate(reward, value, mask, turns, gamma, lmbda, **options)


def collect(reward, value, mask, turns, episode):
    """Each episode's turns in order: turn id, then place, own reward and value of its tokens."""
    episodes = {}
    for n in range(len(mask)):
        positions = mask[n].nonzero().flatten().tolist()
        own, owner = dict.fromkeys(positions, 0.0), next(iter(positions), None)
        for t, r in enumerate(reward[n].tolist()):
            owner = t if t in own else owner
            if owner is not None:
                own[owner] += r
        for p in positions:
            of_episode = episodes.setdefault(n if episode is None else int(episode[n]), {})
            token = ((n, p), own[p], float(value[n, p]))
            of_episode.setdefault(int(turns[n, p]), []).append(token)
    return [sorted(of_episode.items()) for of_episode in episodes.values()]


def over_tokens(turns, gamma, lmbda, *_):
    out, later, next_value = {}, 0.0, 0.0
    for at, r, v in reversed([token for _, tokens in turns for token in tokens]):
        later = r + gamma * next_value - v + gamma * lmbda * later
        out[at], next_value = (later, v), v
    return out


def over_turns(turns, read, gamma, lmbda):
    """Advantages of one episode's turns; ``read`` picks the token whose value is the turn's."""
    out, after, later = {}, None, 0.0
    for k, tokens in reversed(turns):
        r, v = sum(x[1] for x in tokens), tokens[read][2]
        discount = gamma ** (after[0] - k) if after else 0.0
        later = r + discount * (after[1] if after else 0.0) - v + discount * lmbda * later
        out[k], after = later, (k, v)
    return out


def of_turns(turns, gamma, lmbda, *_):
    of_turn = over_turns(turns, 0, gamma, lmbda)
    return {x[0]: (of_turn[k], tokens[0][2]) for k, tokens in turns for x in tokens}


def within_turns(turns, gamma, lmbda, turn_gamma, turn_lmbda):
    out, of_turn = {}, over_turns(turns, -1, turn_gamma, turn_lmbda)
    for k, tokens in turns:
        a = of_turn[k] - sum(x[1] for x in tokens[:-1])
        out[tokens[-1][0]] = a, tokens[-1][2]
        for (at, r, v), (_, _, next_v) in reversed(list(pairwise(tokens))):
            a = r + gamma * next_v - v + gamma * lmbda * a
            out[at] = a, v
    return out


def loop(name, batch, factors=(0.9, 0.8, 0.7, 0.6)):
    reward, value, mask, turns, episode = batch
    if name.startswith("masked"):
        turns, episode = torch.zeros_like(turns), None
    if name.endswith("returns"):
        value, factors = torch.zeros_like(value), (factors[0], 1.0, None, None)
    rule = {"turn_gae": of_turns, "turn_returns": of_turns, "bilevel_gae": within_turns}
    advantage, returns = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for of_episode in collect(reward, value, mask, turns, episode):
        for at, (a, v) in rule.get(name, over_tokens)(of_episode, *factors).items():
            advantage[at], returns[at] = a, a + v
    return advantage, returns


def close(got, expected, atol, rtol):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", NAMES)
@given(batch=forked_rows(), factors=st.tuples(FACTOR, FACTOR, FACTOR, FACTOR))
def test_it_is_the_formula(name, batch, factors):
    tolerance = 1e-5 if name.startswith("masked") else 1e-4
    close(call(name, batch, factors), loop(name, batch, factors), tolerance, tolerance)


def of_row(*rows):
    """A batch of rows that are episodes, without ``episode``; three tokens are a turn."""
    return *rows, (torch.arange(rows[0].shape[1]) // 3).expand_as(rows[0]), None


@pytest.mark.parametrize("decay", [0.0, 1e-200, 1e-30, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("size", [1, 2, 700, slow(4096)])
def test_any_discount_on_long_rows(decay, size):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=g)
    mask = torch.rand(4, size, generator=g) < torch.tensor([[0.0], [0.02], [0.5], [1.0]])
    batch, factors = of_row(x, torch.zeros_like(x), mask), (decay, None, None, None)
    expected = loop("masked_returns", batch, factors)
    close(call("masked_returns", batch, factors), expected, 2e-5, 1e-5)


@pytest.mark.parametrize("lmbda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.99, 1.0])
def test_small_advantages_of_large_values_stay_exact(gamma, lmbda):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 64, generator=g) < 0.6
    reward, value = 1e-2 * torch.randn(3, 64, generator=g), 1e4 + torch.rand(3, 64, generator=g)
    batch, factors = of_row(reward, value, mask), (gamma, lmbda, None, None)
    close(call("masked_gae", batch, factors), loop("masked_gae", batch, factors), 1e-8, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name):
    reward, value = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = reward < 0.5
    got = call(name, of_row(reward, value, mask))
    close(got, call(name, of_row(reward.float(), value.float(), mask)), 0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [9, 90])
@pytest.mark.parametrize("gamma", [0.0, 1e-12, 0.01, 0.9])
def test_derivatives_are_those_of_a_linear_function(name, size, gamma):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, size, generator=g) < 0.6
    rows, tangent, seed = torch.randn(3, 2, 3, size, generator=g, dtype=torch.float64)
    rows.requires_grad_()

    def estimate(rows):
        return torch.stack(list(call(name, of_row(*rows, mask), (gamma, 0.8, gamma, 0.8)))).double()

    _, forward = torch.func.jvp(estimate, (rows,), (tangent,))
    torch.testing.assert_close(forward, estimate(tangent), atol=1e-4, rtol=1e-4)
    (slope,) = torch.autograd.grad((estimate(rows) * seed).sum(), rows)
    expected = (estimate(tangent) * seed).sum()
    torch.testing.assert_close((slope * tangent).sum(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_bad_reaches_no_later_token_and_no_other_episode(name, gamma, bad):
    good, turns = torch.ones(3, 900), torch.arange(900).expand(3, 900)
    spoilt = good.clone()
    spoilt[1, 450] = bad
    rest, factors = (good > 0, turns, torch.tensor([4, 5, 6])), (gamma, 1.0, gamma, 1.0)
    got = call(name, (spoilt, good, *rest), factors)[0]
    assert got[[0, 2]].isfinite().all()
    assert got[1, 451:].isfinite().all()
    assert not got[1, 450].isfinite()
    assert got[1, 449].isfinite() == (gamma == 0)
    got = call(name, (good, spoilt, *rest), factors)
    assert all(x[[0, 2]].isfinite().all() for x in got)


@pytest.mark.parametrize("name", ["masked_returns", "masked_gae"])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
def test_any_number_of_leading_dimensions_and_any_strides(name, shape):
    batch = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, True, False])
    rows = of_row(*batch.reshape(2, -1, 5), mask.repeat(batch[0].numel() // 5, 1))
    strided = batch.mT.contiguous().mT if len(shape) > 1 else batch
    got = call(name, (*strided, mask.expand(shape), None, None))
    close([x.reshape(-1, 5) for x in got], loop(name, rows), 1e-5, 1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_input_is_left_as_it_was(name, dtype):
    batch = of_row(*torch.randn(2, 3, 8, dtype=dtype), torch.rand(3, 8) < 0.7)
    before = [x.clone() for x in batch[:-1]]
    call(name, batch)
    assert all(map(torch.equal, batch, before))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 4), (2, 0)])
def test_nothing_sampled_gives_zeros(name, shape):
    ones = torch.ones(shape)
    for x in call(name, (ones, ones, ones < 0, torch.full(shape, -1), None)):
        assert x.shape == shape
        assert not x.any()


@pytest.mark.parametrize("name", ["turn_returns", "turn_gae", "episode_gae"])
def test_the_order_of_rewards_on_one_token_does_not_matter(name):
    g = torch.Generator().manual_seed(0)
    reward = 1e3 * torch.randn(9, generator=g)
    reward = reward[torch.stack([torch.randperm(9, generator=g) for _ in range(40)])]
    mask = (torch.arange(9) == 0).expand(40, 9)
    turns = torch.zeros(40, 9, dtype=torch.long)
    got = call(name, (reward, torch.zeros(40, 9), mask, turns, None), (1.0,) * 4)[0][:, 0]
    assert (got == got[0]).all()
