"""Advantages of whole turns, and of tokens within turns, against the papers' recursions in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import bilevel_gae, masked_gae, turn_gae, turn_returns

DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@st.composite
def batches(draw):
    """Reward, value, mask, turns ``[N, S]``, episode ``[N]``; ids skip numbers, rows share episodes."""
    n, s = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    steps = torch.randint(0, 3, (n, s), generator=g) * (torch.rand(n, s, generator=g) < 0.4)
    turns = torch.where(mask | (torch.rand(n, s, generator=g) < 0.9), steps.cumsum(-1), -1)
    # A turn is sampled in one row only: rows that share an episode have turns of their own.
    turns = torch.where(turns >= 0, turns + 40 * torch.randperm(n, generator=g)[:, None], -1)
    episode = torch.randint(-3, 3, (n,), generator=g) * 1000
    reward, value = torch.randn(2, n, s, generator=g)
    return reward, value, mask, turns, episode


def collect(reward, value, mask, turns, episode):
    """Each episode's turns in order: turn id, then position, own reward and value of its tokens."""
    episodes: dict[int, dict[int, list[list]]] = {}
    for n in range(len(mask)):
        positions = mask[n].nonzero().flatten().tolist()
        own = dict.fromkeys(positions, 0.0)
        for t in range(mask.shape[1]):
            before = [p for p in positions if p <= t] or positions[:1]
            if before:
                own[before[-1]] += float(reward[n, t])
        for p in positions:
            tokens = episodes.setdefault(int(episode[n]), {}).setdefault(int(turns[n, p]), [])
            tokens.append([(n, p), own[p], float(value[n, p])])
    return [sorted(of.items()) for of in episodes.values()]


def over_turns(turns, read, gamma, lmbda):
    """The recursion over one episode's turns; ``read`` picks the token whose value is the turn's."""
    out, after, later = {}, None, 0.0
    for k, tokens in reversed(turns):
        r, v = sum(x[1] for x in tokens), tokens[read][2]
        if after is None:
            later = r - v
        else:
            discount = gamma ** (after[0] - k)
            later = r + discount * after[1] - v + discount * lmbda * later
        out[k], after = later, (k, v)
    return out


def loop_turn_gae(batch, gamma, lmbda):
    advantage = torch.zeros(batch[2].shape, dtype=torch.float64)
    returns = advantage.clone()
    for turns in collect(*batch):
        of_turn = over_turns(turns, 0, gamma, lmbda)
        for k, tokens in turns:
            for at, _, _ in tokens:
                advantage[at], returns[at] = of_turn[k], of_turn[k] + tokens[0][2]
    return advantage, returns


def loop_bilevel(batch, gamma, lmbda, turn_gamma, turn_lmbda):
    advantage = torch.zeros(batch[2].shape, dtype=torch.float64)
    for turns in collect(*batch):
        of_turn = over_turns(turns, -1, turn_gamma, turn_lmbda)
        for k, tokens in turns:
            a = of_turn[k] - sum(x[1] for x in tokens[:-1])
            advantage[tokens[-1][0]] = a
            for (at, r, v), (_, _, next_v) in reversed(list(pairwise(tokens))):
                a = r + gamma * next_v - v + gamma * lmbda * a
                advantage[at] = a
    return advantage, torch.where(batch[2], advantage + batch[1].double(), 0.0)


def call_turn(batch, gamma=0.9, lmbda=0.8):
    reward, value, mask, turns, episode = batch
    return turn_gae(reward, value, mask, turns, gamma, lmbda, episode=episode)


def call_bilevel(batch, gamma=0.9, lmbda=0.8, turn_gamma=0.7, turn_lmbda=0.6):
    reward, value, mask, turns, episode = batch
    return bilevel_gae(
        reward,
        value,
        mask,
        turns,
        gamma,
        lmbda,
        turn_gamma=turn_gamma,
        turn_lmbda=turn_lmbda,
        episode=episode,
    )


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=1e-4, rtol=1e-4)


@given(batches(), DISCOUNTS, DISCOUNTS)
def test_turn_gae_is_the_formula(batch, gamma, lmbda):
    close(call_turn(batch, gamma, lmbda), loop_turn_gae(batch, gamma, lmbda))


@given(batches(), DISCOUNTS, DISCOUNTS, DISCOUNTS, DISCOUNTS)
def test_bilevel_gae_is_the_formula(batch, gamma, lmbda, turn_gamma, turn_lmbda):
    factors = gamma, lmbda, turn_gamma, turn_lmbda
    close(call_bilevel(batch, *factors), loop_bilevel(batch, *factors))


@given(batches(), DISCOUNTS)
def test_turn_gae_without_values_is_turn_returns(batch, gamma):
    reward, value, mask, turns, episode = batch
    got = call_turn((reward, torch.zeros_like(value), mask, turns, episode), gamma, 1.0)
    close(got, [turn_returns(reward, mask, turns, gamma, episode=episode)] * 2)


@given(batches(), DISCOUNTS, DISCOUNTS)
def test_with_one_token_a_turn_all_are_one(batch, gamma, lmbda):
    reward, value, mask, _, _ = batch
    turns = mask.cumsum(-1) - 1
    rows = torch.arange(len(mask))
    batch = (reward, value, mask, turns, rows)
    close(call_turn(batch, gamma, lmbda), masked_gae(reward, value, mask, gamma, lmbda))
    got = call_bilevel(batch, 0.3, 0.4, gamma, lmbda)
    close(got, masked_gae(reward, value, mask, gamma, lmbda))


@given(batches(), DISCOUNTS, DISCOUNTS)
def test_with_one_turn_bilevel_gae_is_gae_over_tokens(batch, gamma, lmbda):
    reward, value, mask, _, _ = batch
    turns, rows = torch.zeros_like(mask, dtype=torch.long), torch.arange(len(mask))
    got = call_bilevel((reward, value, mask, turns, rows), gamma, lmbda, 0.3, 0.4)
    close(got, masked_gae(reward, value, mask, gamma, lmbda))


@given(batches())
def test_without_discount_and_values_credit_is_what_is_still_to_come(batch):
    reward, value, mask, turns, episode = batch
    batch = (reward, torch.zeros_like(value), mask, turns, episode)
    advantage, _ = call_bilevel(batch, 1.0, 1.0, 1.0, 1.0)
    for of_episode in collect(*batch):
        tokens = [x for _, turn in of_episode for x in turn]
        for i, (at, _, _) in enumerate(tokens):
            assert float(advantage[at]) == pytest.approx(sum(x[1] for x in tokens[i:]), abs=1e-4)


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
@given(batches(), st.integers(0, 2**31))
def test_neither_padding_nor_order_of_rows_changes_anything(call, batch, seed):
    reward, value, mask, turns, episode = batch
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    whole = call(batch)
    close([a[order] for a in whole], call(tuple(x[order] for x in batch)))
    pad = torch.nn.functional.pad
    padded = call(
        (
            pad(reward, (0, 2)),
            pad(value, (0, 2), value=torch.nan),
            pad(mask, (0, 2)),
            pad(turns, (0, 2), value=-1),
            episode,
        )
    )
    close([a[:, :-2] for a in padded], whole)


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
@given(batches())
def test_dropping_masked_tokens_changes_nothing(call, batch):
    mask, episode = batch[2], batch[4]
    whole = call(batch)
    longest = max(1, int(mask.sum(-1).max()))
    compact_value = torch.zeros(len(mask), longest)
    compact_reward, compact_mask = torch.zeros_like(compact_value), compact_value.bool()
    compact_turns = torch.full_like(compact_mask, -1, dtype=torch.long)
    for of_episode in collect(*batch):
        for k, tokens in of_episode:
            for (n, p), r, v in tokens:
                i = int(mask[n, :p].sum())
                compact_reward[n, i], compact_value[n, i] = r, v
                compact_turns[n, i], compact_mask[n, i] = k, True
    compact = call((compact_reward, compact_value, compact_mask, compact_turns, episode))
    close([a[compact_mask] for a in compact], [a[mask] for a in whole])


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
def test_a_fork_changes_no_turns_advantage(call):
    g = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 1, 8, generator=g)
    turns = torch.arange(8)[None] // 2
    straight = call((reward, value, turns >= 0, turns, torch.tensor([3])))
    rows = [torch.cat([x[:, :4], x[:, 4:]]) for x in (reward, value, turns >= 0, turns)]
    forked = call((*rows, torch.tensor([3, 3])))
    close([a.reshape(1, 8) for a in forked], straight)


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
def test_a_bad_value_stays_in_its_episode(call):
    value = torch.tensor([[0.0, 1.0], [torch.inf, 1.0], [0.0, torch.nan]])
    turns = torch.tensor([[0, 1], [0, 1], [0, 1]])
    got = call((torch.ones(3, 2), value, turns >= 0, turns, torch.tensor([4, 5, 6])))
    assert all(a[0].isfinite().all() for a in got)


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
def test_nothing_sampled_gives_zeros(call):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = (torch.ones(2, 3), torch.ones(2, 3), mask, torch.full((2, 3), -1), torch.arange(2))
    assert not any(a.any() for a in call(batch))
    assert all(a.shape == (0, 3) for a in call(tuple(x[:0] for x in batch)))


@pytest.mark.parametrize("call", [call_turn, call_bilevel])
def test_bad_input_is_refused_by_name(call):
    x, turns, rows = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.arange(2)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        call((x, x, x, turns, rows))
    with pytest.raises(ValueError, match=r"value must have shape \(2, 3\), got \(1, 3\)"):
        call((x, x[:1], mask, turns, rows))
    with pytest.raises(ValueError, match="turns must be 0 or more"):
        call((x, x, mask, turns - 1, rows))
    with pytest.raises(ValueError, match=r"turns must have shape \(2, 3\), got \(2, 2\)"):
        call((x, x, mask, turns[:, :2], rows))
    with pytest.raises(ValueError, match="lmbda must lie in"):
        call((x, x, mask, turns, rows), 0.9, 1.5)
