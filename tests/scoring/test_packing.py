"""Rows share forward passes with little padding, within the limits of a pass."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import check_refused, refused
from torchrl_mt.scoring.packing import forward_passes, packs, put_back
from torchrl_mt.scoring.passes import Passes


@given(
    lengths=st.lists(st.integers(0, 12), max_size=40),
    capacity=st.integers(1, 15),
    most=st.sampled_from([None, None, 1, 2, 4]),
)
def test_packs_hold_every_row_once_within_limits_and_leave_little_room(lengths, capacity, most):
    out = packs(torch.tensor(lengths, dtype=torch.long), capacity, most)
    assert sorted(row for pack in out for row in pack) == [i for i, n in enumerate(lengths) if n]
    fills = [sum(lengths[row] for row in pack) for pack in out]
    assert all(len(pack) == 1 or fill <= capacity for pack, fill in zip(out, fills, strict=True))
    assert most is None or max(map(len, out), default=0) <= most
    if most is None:
        # No two packs could be one: at most one is half empty.
        assert sum(fill <= capacity // 2 for fill in fills) <= 1
    elif sum(lengths) <= capacity:
        # All fit together: at most one pack has room for another row.
        assert sum(len(pack) < most for pack in out) <= 1


def test_packing_uneven_rows_computes_half_the_tokens():
    g = torch.Generator().manual_seed(0)
    lengths = (512 * torch.rand(64, generator=g) ** 2).long().clamp(min=1)
    lengths[0] = 512
    attended = torch.arange(512) < lengths[:, None]
    count = [
        sum(
            step.inputs["input_ids"].numel()
            for step in forward_passes(attended.long(), attended, attended, Passes(packed=packed))
        )
        for packed in (False, True)
    ]
    assert count[0] > 2 * count[1]
    assert count[1] < 1.1 * lengths.sum()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_without_tokens_there_is_one_pass_that_nothing_is_read_of(shape, packed, with_lengths):
    empty = torch.zeros(shape, dtype=torch.long)
    masks = empty.bool(), empty.bool()
    (step,) = forward_passes(empty, *masks, Passes(packed=packed), with_lengths=with_lengths)
    assert step.inputs["input_ids"].tolist() == [[0]]
    assert step.inputs.get("attention_mask", torch.ones(1)).all(), "attention over nothing is NaN"
    assert len(step.state) == len(step.target) == len(step.place) == 0
    assert put_back([step.target.float()], [step.place], empty).shape == shape


LIMIT, NUMBER = "must be at least 1 or None, got", "temperature must be"
DTYPE = "dtype must be torch.bfloat16, torch.float16 or None, got"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused(f"micro_batch_tokens {LIMIT} 0", Passes, micro_batch_tokens=0),
        refused(f"micro_batch_size {LIMIT} -1", Passes, micro_batch_size=-1),
        *(
            refused(f"{DTYPE} {dtype}", Passes, dtype=dtype)
            for dtype in (torch.float64, torch.float32, torch.int8)
        ),
        refused("head_dtype must be torch.float32", Passes, head_dtype=torch.float16),
        refused(f"{NUMBER} positive, got 0", Passes, temperature=0),
        *(
            refused(f"{NUMBER} finite, got {x}", Passes, temperature=x)
            for x in (math.inf, math.nan)
        ),
        refused(f"{NUMBER} a number, got '1'", Passes, temperature="1", error=TypeError),
        refused("passes must be of class", Passes.checked, {"packed": True}, error=TypeError),
    ],
)
def test_bad_settings_of_passes_are_refused_by_name(call, error, text):
    check_refused(call, error, text)


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


def test_a_mask_keeps_apart_as_many_rows_as_a_sequence_holds():
    (step,) = passes_over([8, 2, 2, 2, 2], micro_batch_size=2)
    assert step.inputs["input_ids"].shape == (2, 8)


def test_lengths_are_those_of_the_rows_as_flash_attention_takes_them():
    (step,) = passes_over([3, 5, 2], with_lengths=True)
    ends = step.inputs["cu_seq_lens_q"]
    assert ends.dtype is torch.int32
    assert sorted(ends.diff().tolist()) == [2, 3, 5]
    assert step.inputs["cu_seq_lens_k"] is ends
    assert step.inputs["max_length_q"] == step.inputs["max_length_k"] == 5


def test_a_packed_sequence_is_filled_with_rows_of_one_token():
    (step,) = passes_over([5, 2])
    assert step.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
