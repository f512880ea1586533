"""The limits of a forward pass hold however its rows are put together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.scoring.packing import forward_passes, packs
from torchrl_mt.scoring.passes import Passes


def passes_over(lengths, with_lengths=False, **limits):
    attended = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    passes = Passes(packed=True, **limits)
    rows = attended.long(), attended, attended
    return list(forward_passes(*rows, passes, with_lengths=with_lengths))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_one_sequence_of_many_rows_holds_no_more_than_the_micro_batch(size):
    steps = passes_over([16] * 8, with_lengths=True, micro_batch_size=size)
    rows = [len(step.inputs["cu_seq_lens_q"]) - 1 for step in steps]
    assert sum(rows) == 8
    assert max(rows) == size
    assert len(rows) == -(-8 // size)
    assert all(
        step.inputs["input_ids"].shape == (1, 16 * n) for step, n in zip(steps, rows, strict=True)
    )


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    size=st.sampled_from([None, 1, 2, 5]),
    budget=st.sampled_from([None, 6, 20]),
)
def test_every_row_is_in_one_pass_within_both_limits(lengths, size, budget):
    steps = passes_over(
        lengths, with_lengths=True, micro_batch_size=size, micro_batch_tokens=budget
    )
    seen = [step.inputs["cu_seq_lens_q"].diff().tolist() for step in steps]
    assert sorted(n for rows in seen for n in rows) == sorted(lengths)
    for rows in seen:
        assert size is None or len(rows) <= size
        assert budget is None or sum(rows) <= budget or len(rows) == 1


@given(
    lengths=st.lists(st.integers(0, 12), max_size=40),
    capacity=st.integers(1, 15),
    most=st.sampled_from([None, 1, 2, 4]),
)
def test_packs_hold_no_more_rows_than_asked(lengths, capacity, most):
    out = packs(torch.tensor(lengths, dtype=torch.long), capacity, most)
    assert sorted(row for pack in out for row in pack) == [i for i, n in enumerate(lengths) if n]
    assert most is None or max(map(len, out), default=0) <= most
    # If all fit together, at most one pack has room for another row.
    if most is not None and sum(lengths) <= capacity:
        assert sum(len(pack) < most for pack in out) <= 1


def test_a_mask_keeps_apart_as_many_rows_as_a_sequence_holds():
    (step,) = passes_over([8, 2, 2, 2, 2], micro_batch_size=2)
    assert step.inputs["input_ids"].shape == (2, 8)
