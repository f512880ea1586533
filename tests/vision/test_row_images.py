"""Rows find their own images however they were cut, shuffled, repeated and joined."""

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_mt.vision.rows import COUNT, FIRST, GRIDS, PIXELS, RowImages


def table_of(counts, seed, with_grids=True):
    """Rows that show ``counts`` images each; also each row's inputs."""
    g = torch.Generator().manual_seed(seed)
    total, counts = sum(counts), torch.tensor(counts)
    grids = torch.tensor([[1, 2, 2 * int(k)] for k in torch.randint(1, 4, (total,), generator=g)])
    grids = grids.view(-1, 3)
    size = int(grids.prod(-1).sum()) if with_grids else total
    pixels = torch.rand(size, 5, generator=g)
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


def test_no_rows_and_rows_without_the_entries_have_no_images():
    assert RowImages.of(TensorDict({"row": torch.arange(2)}, [2])) is None
    one, _ = table_of([2, 0], 1)
    assert RowImages.of(one[:0]) is None
    assert RowImages.of(torch.cat([one, table_of([1], 2)[0]])[:0]) is None
