"""Aggregations are the means they say, blind to padding, and exact however the batch is cut."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import aggregate, merge_totals
from torchrl_mt.objectives.functional.aggregation import Aggregation, aggregation_total

KINDS = get_args(Aggregation)


@st.composite
def batches(draw):
    n, s = draw(st.integers(0, 7)), draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    group = torch.randint(-2, 3, (n,), generator=g)
    return torch.randn(n, s, generator=g), mask, group


def loop(loss, mask, group, kind):
    if kind == "prompt_mean":
        prompts = {}
        for x, m, g in zip(loss.double(), mask, group.tolist(), strict=True):
            prompts.setdefault(g, []).extend(x[m].tolist())
        means = [sum(tokens) / len(tokens) for tokens in prompts.values() if tokens]
        return sum(means) / len(means) if means else 0.0
    rows = [x[m].double().tolist() for x, m in zip(loss, mask, strict=True) if m.any()]
    if not rows:
        return 0.0
    if kind == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    sums = [sum(row) / (len(row) if kind == "seq_mean_token_mean" else 1) for row in rows]
    return sum(sums) / len(rows)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches())
def test_aggregate_is_the_mean_it_says(kind, batch):
    loss, mask, group = batch
    got = aggregate(loss, mask, kind, group=group)
    assert float(got) == pytest.approx(loop(loss, mask, group, kind), abs=1e-5)
    if kind == "seq_mean_token_sum":
        torch.testing.assert_close(aggregate(loss, mask, kind, norm=7), got / 7)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), size=st.integers(1, 4), seed=st.integers(0, 99))
def test_shards_add_up_to_the_batch(kind, batch, size, seed):
    """Shuffled first, so that they cut through groups."""
    loss, mask, group = batch
    loss.requires_grad_()
    expected = aggregate(loss, mask, kind, group=group)
    (whole,) = torch.autograd.grad(expected, loss)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    parts = order.split(size)
    total = aggregation_total(mask, kind, group=group)
    workers = [aggregation_total(mask[i], kind, group=group[i]) for i in parts]
    assert torch.equal(merge_totals(*workers), total)
    value = 0.0
    for i in parts:
        shard = aggregate(loss[i], mask[i], kind, total=total, group=group[i])
        shard.backward()
        value += float(shard.detach())
    assert value == pytest.approx(float(expected.detach()), abs=1e-5)
    torch.testing.assert_close(loss.grad, whole)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches())
def test_padding_and_what_lies_on_it_change_nothing(kind, batch):
    loss, mask, group = batch
    dirty = torch.where(mask, loss, torch.inf)
    dirty = torch.nn.functional.pad(dirty, (2, 1, 0, 2), value=torch.nan).requires_grad_()
    padded = torch.nn.functional.pad(mask, (2, 1, 0, 2))
    more = torch.cat([group, torch.tensor([7, -7])])
    got = aggregate(dirty, padded, kind, group=more)
    expected = aggregate(loss, mask, kind, group=group)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(got, dirty)
    assert gradient.isfinite().all()
    assert not gradient[~padded].any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_sampled_gives_zero(kind):
    loss = torch.ones(2, 3, requires_grad=True)
    mask, group = torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1])
    totals = [None, aggregation_total(~mask, kind, group=group)]
    if kind != "prompt_mean":
        totals += [0, 0.0, torch.tensor(0)]
    for total in totals:
        loss.grad = None
        got = aggregate(loss, mask, kind, total=total, group=group)
        got.backward()
        assert got == 0
        assert not loss.grad.any()


def test_half_precision_is_summed_in_float32():
    loss = torch.ones(1, 3000, dtype=torch.bfloat16)
    got = aggregate(loss, torch.ones(1, 3000, dtype=torch.bool), "seq_mean_token_sum")
    assert got.dtype is torch.float32
    assert got == 3000
