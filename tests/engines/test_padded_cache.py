"""Rows that join, grow and leave, against a list of plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.tiers import few_or_many
from torchrl_mt.engines.transformers.padded_cache import CacheLayout, PaddedCache

from .helpers import check

SHAPES = (((2, 3), (2, 3)), None, ((1, 4), (1, 2)))
"""Of a layer like any other, of one that keeps nothing, and of one whose values are narrower."""
WIDTH = 2 * 3 + 2 * 3 + 4 + 2
LAYOUT = CacheLayout(SHAPES, torch.float32, torch.device("cpu"))

actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("join"),
            st.lists(st.tuples(st.integers(0, 9), st.integers(1, 90)), min_size=1, max_size=4),
            st.integers(1, 50),
        ),
        st.tuples(st.just("extend"), st.just([]), st.integers(1, 80)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 99), min_size=1), st.just(0)),
        st.tuples(st.just("absorb"), st.lists(st.integers(0, 99), min_size=1), st.booleans()),
    ),
    max_size=12,
)


class Rows:
    """A cache, and what should be in it; every token is new numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.cache = PaddedCache(LAYOUT)
        self.expected: list[torch.Tensor] = []
        self.shifts: list[int] = []

    def new(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, WIDTH, generator=self.generator)

    def compute(self, inputs, new: torch.Tensor, rows: range, later: bool = False) -> None:
        """Do what a model does: give ``[B, Q, F]`` to the layers, and look at what comes back.

        Positions are shifted ``later``, in tokens that are computed one by one.
        """
        mask, position = inputs["attention_mask"], inputs["position_ids"]
        parts = new.split([6, 6, 4, 2], -1)
        for layer, (keys, values) in zip((0, 2), (parts[:2], parts[2:]), strict=True):
            given = [
                part.unflatten(-1, shape).transpose(1, 2)
                for part, shape in zip((keys, values), SHAPES[layer], strict=True)
            ]
            read = self.cache.update(*given, layer)
            assert self.cache.get_mask_sizes(torch.arange(new.shape[1]), layer)[0] == mask.shape[1]
            assert self.cache.get_seq_length(layer) == mask.shape[1] - new.shape[1]
            for memory in read:
                assert memory.shape[2] == mask.shape[1]
                assert memory.isfinite().all()
            got = torch.cat([memory.transpose(1, 2).flatten(2) for memory in read], -1)
            columns = slice(0, 12) if layer == 0 else slice(12, None)
            for i, row in enumerate(rows):
                begun = self.expected[row][: int(mask[i].sum())]
                assert torch.equal(got[i, mask[i]], begun[:, columns])
                # Padding is on the left, and the last position is that of the last token.
                assert mask[i].int().diff().clamp(max=0).sum() == 0
                assert position[i, -1] == max(len(begun) - 1, 0) + (
                    self.shifts[row] if later else 0
                )

    def join(self, sizes, chunk: int) -> None:
        pasts, lengths, new = [], [], max(count for _, count in sizes)
        computed = self.new(len(sizes), new)
        for i, (known, count) in enumerate(sizes):
            past = self.new(known)
            pasts.append([past[: known // 2], past[known // 2 :]] if known else [])
            lengths.append(known + count)
            self.expected.append(torch.cat([past, computed[i, new - count :]]))
            computed[i, : new - count] = torch.nan  # what a model makes of padding
        # Most texts have no images, and their positions are as ever.
        shifts = [-known % 5 if sum(lengths) % 2 else 0 for known, _ in sizes]
        self.shifts += shifts
        rows = self.cache.join(lengths, pasts, shifts if any(shifts) else None)
        for begin in range(0, new, chunk):
            part = computed[:, begin : begin + chunk]
            tokens = torch.zeros(part.shape[:2], dtype=torch.int64)
            left = new - begin - part.shape[1]
            inputs = self.cache.fill(rows, tokens, [count for _, count in sizes], left)
            full = list(self.expected)
            for i, row in enumerate(rows):  # at first only so much of it is there
                known, count = sizes[i]
                self.expected[row] = full[row][: known + count - min(count, left)]
                if (
                    count <= left
                ):  # nothing of the row was computed, and its past may not be in view
                    self.expected[row] = full[row][: int(inputs["attention_mask"][i].sum())]
            self.compute(inputs, part, rows)
            self.expected = full

    def extend(self) -> None:
        new = self.new(len(self.expected), 1)
        self.expected = [torch.cat([a, b]) for a, b in zip(self.expected, new, strict=True)]
        tokens = torch.zeros((len(new), 1), dtype=torch.int64)
        self.compute(self.cache.extend(tokens), new, range(len(new)), later=True)


@few_or_many(15, 150)
def test_rows_stay_what_they_are(examples):
    check(rows_stay, examples, script=actions, seed=st.integers(0, 99))


def rows_stay(script, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = Rows(generator)
    for action, items, number in script:
        count = len(rows.expected)
        if action == "join":
            rows.join(items, number)
        elif action == "extend" and count:
            for _ in range(number):
                rows.extend()
        elif action == "remove" and count:
            order = rows.cache.remove(sorted({item % count for item in items}))
            rows.expected = [rows.expected[row] for row in order]
            rows.shifts = [rows.shifts[row] for row in order]
            assert len(order) == count - len({item % count for item in items})
        elif action == "absorb" and count:
            other = rows if number else Rows(generator)
            if not number:
                other.join([(3, 7), (0, 40)], 9)
            picked = [item % len(other.expected) for item in items]
            rows.cache.absorb(other.cache, picked)
            rows.expected += [other.expected[row] for row in picked]
            rows.shifts += [other.shifts[row] for row in picked]
        assert rows.cache.num_rows == len(rows.expected)
        assert rows.cache.width == max(map(len, rows.expected), default=0)
    if rows.expected:
        lengths = [len(row) for row in rows.expected]
        begins = [length // 3 for length in lengths]
        pieces = rows.cache.pieces(range(len(lengths)), begins, lengths)
        for row, begin, piece in zip(rows.expected, begins, pieces, strict=True):
            assert torch.equal(piece, row[begin:])
            assert piece.untyped_storage().nbytes() == piece.nbytes
        rows.extend()


@pytest.mark.parametrize("how", ["join", "absorb"])
def test_nothing_of_earlier_rows_remains(how):
    """A mask does not hide what is not a number: a weight of 0 times it is none, either."""
    rows = Rows(torch.Generator().manual_seed(0))
    rows.join([(0, 50), (0, 30)], 50)
    for layer in (0, 2):
        rows.cache.layers[layer].keys[1] = torch.nan
        rows.cache.layers[layer].values[1] = torch.nan
    rows.cache.remove([1])
    rows.expected.pop()
    rows.shifts.pop()
    if how == "join":
        rows.join([(2, 3)], 3)
    else:
        other = Rows(rows.generator)
        other.join([(2, 3)], 3)
        rows.cache.absorb(other.cache, [0])
        rows.expected += other.expected
        rows.shifts += other.shifts
    rows.extend()
