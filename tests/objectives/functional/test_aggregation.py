"""Aggregations are the means they say, blind to padding, and exact however the batch is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import aggregate, aggregation_total

KINDS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


@st.composite
def batches(draw):
    n, s = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    return torch.randn(n, s, generator=g), mask


def loop(loss, mask, kind):
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
    loss, mask = batch
    assert float(aggregate(loss, mask, kind)) == pytest.approx(loop(loss, mask, kind), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches(), size=st.integers(1, 4))
def test_shards_add_up_to_the_batch(kind, batch, size):
    loss, mask = batch
    loss.requires_grad_()
    (whole,) = torch.autograd.grad(aggregate(loss, mask, kind), loss)
    total = aggregation_total(mask, kind)
    value = 0.0
    for part, m in zip(loss.split(size), mask.split(size), strict=True):
        shard = aggregate(part, m, kind, total=total)
        shard.backward()
        value += float(shard.detach())
    assert value == pytest.approx(float(aggregate(loss, mask, kind).detach()), abs=1e-5)
    torch.testing.assert_close(loss.grad, whole)


@pytest.mark.parametrize("kind", KINDS)
@given(batch=batches())
def test_padding_and_what_lies_on_it_change_nothing(kind, batch):
    loss, mask = batch
    dirty = torch.where(mask, loss, torch.inf)
    dirty = torch.nn.functional.pad(dirty, (2, 1, 0, 2), value=torch.nan).requires_grad_()
    padded = torch.nn.functional.pad(mask, (2, 1, 0, 2))
    got = aggregate(dirty, padded, kind)
    torch.testing.assert_close(got, aggregate(loss, mask, kind), atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(got, dirty)
    assert gradient.isfinite().all()
    assert not gradient[~padded].any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_sampled_gives_zero(kind):
    loss = torch.ones(2, 3, requires_grad=True)
    got = aggregate(loss, torch.zeros(2, 3, dtype=torch.bool), kind)
    got.backward()
    assert got == 0
    assert not loss.grad.any()


def test_half_precision_is_summed_in_float32():
    loss = torch.ones(1, 3000, dtype=torch.bfloat16)
    got = aggregate(loss, torch.ones(1, 3000, dtype=torch.bool), "seq_mean_token_sum")
    assert got.dtype is torch.float32
    assert got == 3000


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "median")
