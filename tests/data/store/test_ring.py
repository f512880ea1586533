from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from torchrl_mt.data._store.ring import Blocks, Ring

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=120)


def overlaps(blocks):
    taken = sorted((start, start + size) for start, size in blocks if size)
    return any(after[0] < before[1] for before, after in pairwise(taken))


@examples()
@given(sizes=sizes, budget=st.integers(9, 40))
def test_budget_plus_longest_block_always_has_a_place(sizes, budget):
    longest = max(sizes)
    ring, blocks = Ring(budget + longest), []
    for size in sizes:
        while sum(n for _, n in blocks) + size > budget:
            blocks.pop(0)
            ring.pop(next_start=blocks[0][0] if blocks else None)
        start = ring.push(size)
        assert start is not None
        assert 0 <= start <= start + size <= ring.capacity
        blocks.append((start, size))
        assert not overlaps(blocks)


@examples()
@given(
    events=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=60),
    capacity=st.integers(0, 12),
)
def test_resizing_and_freeing_keep_every_block(events, capacity):
    ring, blocks, rows = Ring(capacity), [], torch.full((capacity,), -1)
    for k, (size, leave) in enumerate(events):
        if leave and blocks:
            blocks = blocks[leave:]
            ring.pop(next_start=blocks[0][0] if blocks else None)
        start = ring.push(size)
        if start is None:
            live = ring.layout()
            moves = ring.resize(max(live.upper + live.lower + size, ring.capacity + 1))
            old, rows = rows, torch.full((ring.capacity,), -1)
            moves.rows(old, rows)
            places = moves.positions(torch.tensor([s for s, _, _ in blocks], dtype=torch.int64))
            blocks = [(s, n, v) for s, (_, n, v) in zip(places.tolist(), blocks, strict=True)]
            start = ring.push(size)
            assert start is not None
        rows[start : start + size] = k
        blocks.append((start, size, k))
        for start, size, value in blocks:
            assert (rows[start : start + size] == value).all()


def test_a_ring_that_cannot_hold_its_blocks_is_refused():
    ring = Ring(4)
    ring.push(3)
    with pytest.raises(ValueError, match="at least the 3 live rows"):
        ring.resize(2)


def test_several_blocks_are_placed_or_none():
    ring = Ring(6)
    assert ring.push_all([2, 3]) == [0, 2]
    before = vars(ring).copy()
    assert ring.push_all([1, 1]) is None
    assert vars(ring) == before


@examples()
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=9))
def test_pieces_are_the_rows_of_the_blocks(blocks):
    starts, lengths = map(torch.tensor, zip(*blocks, strict=True))
    rows = [start + k for start, n in blocks for k in range(n)]
    blocks = Blocks(starts.tolist(), lengths.tolist())
    assert blocks.rows.tolist() == rows
    got = {}
    for row, first, stop in blocks.pieces:
        got.update({first + k: row + k for k in range(stop - first)})
    assert got == dict(enumerate(rows))
    assert all(a[0] + a[2] - a[1] != b[0] for a, b in pairwise(blocks.pieces))


def test_a_block_may_fill_the_gap_before_the_oldest():
    ring = Ring(4)
    assert ring.push_all([2, 2]) == [0, 2]
    ring.pop(next_start=2)
    assert ring.push(2) == 0
    assert ring.push(1) is None


def test_a_block_without_rows_is_refused():
    with pytest.raises(ValueError, match="positive number of rows, got 0"):
        Ring(4).push(0)
