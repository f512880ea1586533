"""Rows find their own images however they were cut, shuffled, repeated and joined."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from tests.tiers import examples
from torchrl_mt.vision import compact_images
from torchrl_mt.vision.rows import COUNT, FIRST, GRIDS, KEYS, PIXELS, RowImages


def table_of(counts, seed, with_grids=True, width=5):
    """Rows that show ``counts`` images each; also each row's inputs."""
    g = torch.Generator().manual_seed(seed)
    total, counts = sum(counts), torch.tensor(counts)
    grids = torch.tensor([[1, 2, 2 * int(k)] for k in torch.randint(1, 4, (total,), generator=g)])
    grids = grids.view(-1, 3)
    size = int(grids.prod(-1).sum()) if with_grids else total
    pixels = torch.rand(size, width, generator=g)
    rows = TensorDict({"row": torch.arange(len(counts)) + 100 * seed}, [len(counts)])
    rows[FIRST], rows[COUNT] = counts.cumsum(0) - counts, counts
    rows[PIXELS] = NonTensorData(pixels, batch_size=rows.batch_size)
    if with_grids:
        rows[GRIDS] = NonTensorData(grids, batch_size=rows.batch_size)
    parts = pixels.split(grids.prod(-1).tolist() if with_grids else 1)
    own = {}
    for name, first, count in zip(rows["row"].tolist(), rows[FIRST], counts, strict=True):
        here = slice(int(first), int(first + count))
        own[name] = (torch.cat([pixels[:0], *parts[here]]), grids[here])
    return rows, own


@pytest.mark.parametrize("with_grids", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_their_images_when_cut_shuffled_repeated_and_joined(seed, with_grids):
    one, own = table_of([2, 0, 1, 3], 1 + seed, with_grids)
    other, more = table_of([1, 2], 10 + seed, with_grids)
    own |= more
    g = torch.Generator().manual_seed(seed)
    joined = torch.cat([one[torch.randperm(4, generator=g)], other, one[1:3]])
    forms = (one, one[2:], joined, joined[torch.randperm(8, generator=g)], joined.split(3)[1])
    for rows in (*forms, torch.stack(list(joined.unbind(0))), joined.clone()):
        images = RowImages.of(rows)
        chosen = torch.randperm(len(rows), generator=g)
        got = images.inputs(chosen)
        names = rows["row"][chosen].tolist()
        expected = [own[name] for name in names]
        if sum(len(grids) for _, grids in expected):
            assert torch.equal(got["pixel_values"], torch.cat([x for x, _ in expected]))
        else:
            assert got == {}
        if with_grids and got:
            assert torch.equal(got["image_grid_thw"], torch.cat([x for _, x in expected]))
        for k, name in enumerate(rows["row"].tolist()):
            found = [tuple(x) for x in own[name][1].tolist()] if with_grids else []
            assert images.grids_of(k) == found


@examples(20, 4)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    more=st.lists(st.integers(0, 3), max_size=3),
    chosen=st.lists(st.integers(0, 8), max_size=6),
    with_grids=st.booleans(),
)
def test_what_is_pickled_has_the_images_of_its_rows_alone(counts, more, chosen, with_grids):
    one, own = table_of(counts, 1, with_grids, width=500)
    one.set(KEYS, NonTensorData(tuple(map(str, range(sum(counts)))), batch_size=one.batch_size))
    rows = one
    if more:
        other, others = table_of(more, 2, with_grids, width=500)
        other.set(KEYS, NonTensorData(tuple("abcdefghi"[: sum(more)]), batch_size=[len(more)]))
        rows, own = torch.cat([one, other]), own | others
    # tensordict cannot read lazy stacks of no rows.
    rows = rows[[k % len(rows) for k in chosen]] if chosen else one[:0]
    compact = compact_images(rows)
    needed = {name: own[name][0] for name in rows["row"].tolist()}
    size = sum(pixels.nbytes for pixels in needed.values())
    every = torch.arange(len(rows))
    for made in (compact, compact[:1]):
        assert len(pickle.dumps(made)) < size + 20_000
    images = RowImages.of(rows)
    if images is None:  # No rows.
        assert set(compact.keys(True)) == set(rows.keys(True))
        return
    assert len(pickle.dumps(images)) < size + 3000
    for again in (pickle.loads(pickle.dumps(images)), RowImages.of(compact)):
        assert again.inputs(every).keys() == images.inputs(every).keys()
        for key, value in images.inputs(every).items():
            assert torch.equal(again.inputs(every)[key], value)
        assert torch.equal(again.count, images.count)
    grids = images.inputs(every).get("image_grid_thw")
    assert (RowImages.grids_in(rows) is None) == (grids is None)
    assert grids is None or torch.equal(RowImages.grids_in(rows), grids)
    if any(rows[COUNT]):
        assert len(compact[KEYS]) == sum(len(own[name][1]) for name in needed)


def test_no_rows_and_rows_without_the_entries_have_no_images():
    assert RowImages.of(TensorDict({"row": torch.arange(2)}, [2])) is None
    one, _ = table_of([2, 0], 1)
    assert RowImages.of(one[:0]) is None
    assert RowImages.of(torch.cat([one, table_of([1], 2)[0]])[:0]) is None
