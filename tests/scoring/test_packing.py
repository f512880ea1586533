"""Forward passes hold every attended token once, after its row's tokens and no others."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import check_refused, refused
from torchrl_mt.scoring.packing import forward_passes, packs, put_back
from torchrl_mt.scoring.passes import Passes


def sequences(step):
    """The rows in a pass as lists of positions in ``[B * L]``, read from its inputs alone."""
    ids = step.inputs["input_ids"]
    if "position_ids" in step.inputs:
        starts = step.inputs["position_ids"] == 0
        attended = torch.ones_like(starts)
    else:
        attended = step.inputs["attention_mask"].bool()
        starts = (torch.arange(ids.shape[1]) == 0).expand_as(ids)
    out = []
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            if attended[b, t]:
                if starts[b, t]:
                    out.append([])
                out[-1].append(b * ids.shape[1] + t)
    return out


@given(
    seed=st.integers(0, 999),
    n=st.integers(1, 9),
    s=st.integers(1, 8),
    density=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    packed=st.booleans(),
    with_lengths=st.booleans(),
    size=st.sampled_from([None, 1, 3]),
    budget=st.sampled_from([None, 1, 5, 20]),
)
def test_every_sampled_token_is_predicted_by_its_rows_past(
    seed, n, s, density, packed, with_lengths, size, budget
):
    g = torch.Generator().manual_seed(seed)
    # Token ids tell where they come from.
    tokens = torch.arange(1, n * s + 1).view(n, s)
    attended = torch.rand(n, s, generator=g) < density
    mask = attended & (torch.rand(n, s, generator=g) < 0.6)
    found = {}
    for step in forward_passes(
        tokens,
        attended,
        mask,
        Passes(packed=packed, micro_batch_size=size, micro_batch_tokens=budget),
        with_lengths=with_lengths,
    ):
        ids = step.inputs["input_ids"]
        rows = sequences(step)
        if packed and with_lengths:
            ends = [r[-1] + 1 for r in rows]
            assert step.inputs["cu_seq_lens_q"].tolist() == [0, *ends]
            assert step.inputs["cu_seq_lens_q"].dtype is torch.int32
            assert step.inputs["max_length_k"] == max(map(len, rows))
            assert len(ids) == 1
        assert size is None or (len(rows) if packed and with_lengths else len(ids)) <= size
        one_row = len([r for r in rows if ids.flatten()[r[0]]]) <= 1
        assert budget is None or ids.numel() <= budget or one_row
        past = {r[i]: ids.flatten()[r[: i + 1]].tolist() for r in rows for i in range(len(r))}
        for state, target, place in zip(
            step.state.tolist(), step.target.tolist(), step.place.tolist(), strict=True
        ):
            assert place not in found
            found[place] = (past[state], target)
    expected = {}
    for i in range(n):
        row = tokens[i][attended[i]].tolist()
        for t in range(s):
            if mask[i, t] and row[0] != tokens[i, t]:
                before = row[: row.index(int(tokens[i, t]))]
                expected[i * s + t] = (before, int(tokens[i, t]))
    assert found == expected


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
