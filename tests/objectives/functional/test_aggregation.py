"""Aggregations are the means they say, blind to padding, and exact however the batch is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.objectives.functional import aggregate, merge_totals
from torchrl_mt.objectives.functional.aggregation import aggregation_total

KINDS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"]


@st.composite
def batches(draw):
    n, s = draw(st.integers(1, 7)), draw(st.integers(1, 9))
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
    for total in (None, aggregation_total(~mask, kind, group=group)):
        loss.grad = None
        got = aggregate(loss, mask, kind, total=total, group=group)
        got.backward()
        assert got == 0
        assert not loss.grad.any()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_total_of_nothing_for_rows_of_nothing_gives_zero(kind):
    loss, mask = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for total in (0, 0.0, torch.tensor(0)):
        assert aggregate(loss, mask, kind, total=total) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_zero(kind):
    mask, group = torch.zeros(0, 3, dtype=torch.bool), torch.zeros(0, dtype=torch.long)
    assert aggregate(torch.zeros(0, 3), mask, kind, group=group) == 0


@given(batch=batches())
def test_norm_divides_as_well(batch):
    loss, mask, _ = batch
    expected = aggregate(loss, mask, "seq_mean_token_sum") / 7
    torch.testing.assert_close(aggregate(loss, mask, "seq_mean_token_sum", norm=7), expected)


def test_half_precision_is_summed_in_float32():
    loss = torch.ones(1, 3000, dtype=torch.bfloat16)
    got = aggregate(loss, torch.ones(1, 3000, dtype=torch.bool), "seq_mean_token_sum")
    assert got.dtype is torch.float32
    assert got == 3000


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind must be one of"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "median")


def test_bad_input_is_refused_by_name():
    loss, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    group = torch.tensor([4, 5])
    for options, message in [
        ({"kind": "prompt_mean"}, "group must be each row"),
        ({"kind": "prompt_mean", "group": group[:1]}, "group must have shape"),
        ({"kind": "prompt_mean", "group": group, "total": 3}, "total must be a table"),
        (
            {"kind": "prompt_mean", "group": group, "total": torch.tensor([[4, 9]])},
            "total has no tokens of group 5",
        ),
        (
            {"kind": "prompt_mean", "group": group, "total": torch.tensor([[4, 9], [5, 2]])},
            "total has fewer tokens of group 5",
        ),
        ({"total": 0}, "total must be finite and at least 6"),
        ({"total": 5.5}, "total must be finite and at least 6"),
        ({"total": torch.tensor(5)}, "total must be finite and at least 6"),
        ({"total": torch.nan}, "total must be finite"),
        ({"total": torch.inf}, "total must be finite"),
        ({"total": torch.tensor([6, 6])}, "total must be one number"),
        ({"norm": 3.0}, "norm is for 'seq_mean_token_sum' alone"),
        ({"kind": "seq_mean_token_sum", "norm": 0.0}, "norm must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            aggregate(loss, mask, **options)


def test_tables_that_were_not_merged_are_refused():
    loss, mask = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)
    group = torch.tensor([5, 5])
    table = aggregation_total(mask[:1], "prompt_mean", group=group[:1])
    with pytest.raises(ValueError, match="merge_totals"):
        aggregate(loss, mask, "prompt_mean", total=torch.cat([table, table]), group=group)
    with pytest.raises(ValueError, match="totals must be one or more, got none"):
        merge_totals()
    with pytest.raises(TypeError, match="group must hold integer ids"):
        aggregate(loss, mask, "prompt_mean", group=group.float())
