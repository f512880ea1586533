"""Rows divided among ranks and cut into micro-batches: every row once, in balanced parts."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from tests.scoring.vision_rows import rows_with_images
from torchrl_mt.objectives import Passes, micro_batches, split_rows
from torchrl_mt.objectives.rows.reading import read_episode
from torchrl_mt.scoring.row_trees import row_trees
from torchrl_mt.vision import RowImages

LENGTHS = st.lists(st.integers(0, 9), max_size=12)


def rows_of(lengths, groups=3):
    number = torch.arange(len(lengths))
    attended = torch.arange(9) < torch.tensor(lengths, dtype=torch.long)[:, None]
    of_rows = {"number": number, "group": number * 7 % groups - 1}
    of_rows |= {"episode": number // 2 * 2 % 5, "episode_index": number // 6}
    return TensorDict({"masks": {"all_attention_mask": attended}, **of_rows}, [len(lengths)])


def tokens(rows):
    return int(rows["masks", "all_attention_mask"].sum())


def numbers(parts):
    return [part["number"].tolist() for part in parts]


@given(LENGTHS, st.integers(1, 5), st.sampled_from([None, "group", "episode"]))
def test_parts_are_balanced_and_keep_what_they_must(lengths, num_parts, keep):
    rows = rows_of(lengths)
    parts = split_rows(rows, num_parts, keep=keep)
    assert len(parts) == num_parts
    assert sorted(chain(*numbers(parts))) == list(range(len(rows)))
    assert all(part == sorted(part) for part in numbers(parts))
    assert numbers(parts) == numbers(split_rows(rows, num_parts, keep=keep))
    item = rows["number"] if keep is None else rows["group"]
    item = read_episode(rows) if keep == "episode" else item
    where = {i: part for part, rows in enumerate(numbers(parts)) for i in rows}
    assert len({(int(item[i]), part) for i, part in where.items()}) == len(item.unique())
    largest = max((tokens(rows[item == i]) for i in item.unique()), default=0)
    assert max(map(tokens, parts)) <= tokens(rows) / num_parts + largest


@given(LENGTHS, st.none() | st.integers(1, 4), st.none() | st.integers(1, 20), st.booleans())
def test_micro_batches_stay_within_their_limits(lengths, size, most, packed):
    parts = micro_batches(
        rows_of(lengths),
        passes=Passes(micro_batch_size=size, micro_batch_tokens=most, packed=packed),
    )
    assert parts
    assert sorted(chain(*numbers(parts))) == list(range(len(lengths)))
    for part in parts:
        longest = int(part["masks", "all_attention_mask"].sum(-1).max()) if len(part) else 0
        assert len(part) <= (size or len(lengths))
        cost = tokens(part) if packed else len(part) * longest
        assert most is None or cost <= most or len(part) == 1
    if size is most is None:
        assert len([part for part in parts if tokens(part)]) <= 1


@given(
    seed=st.integers(0, 99), size=st.none() | st.integers(1, 4), most=st.sampled_from([None, 5, 20])
)
def test_micro_batches_of_trees_stay_within_their_limits(seed, size, most):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randint(1, 4, (9, 7), generator=generator)
    attended = torch.arange(7) < torch.randint(0, 8, (9, 1), generator=generator)
    masks = {"all_attention_mask": attended}
    rows = TensorDict({"tokens": {"full": full}, "masks": masks, "number": torch.arange(9)}, [9])
    passes = Passes(micro_batch_size=size, micro_batch_tokens=most, packed="tree")
    parts = micro_batches(rows, passes)
    assert sorted(chain(*numbers(parts))) == list(range(9))
    for part in parts:
        trees = row_trees(part["tokens", "full"], part["masks", "all_attention_mask"], math.inf)
        assert most is None or sum(tree.size for tree in trees) <= max(most, 7)


def test_images_follow_their_rows():
    rows, alone = rows_with_images("qwen2_vl", (1, 0, 3, 2))
    for parts in (split_rows(rows, 3), micro_batches(rows, passes=Passes(micro_batch_size=2))):
        assert sum(map(len, parts)) == len(rows)
        for part in filter(len, parts):
            for i, row in enumerate(part["episode"].tolist()):
                found = RowImages.of(part).inputs(torch.tensor([i]))
                for name, value in found.items():
                    assert torch.equal(value, alone[row].inputs[name])
                assert bool(found) == bool(alone[row].images)


def test_parts_without_rows_keep_columns_of_objects():
    rows, _ = rows_with_images("qwen2_vl", (1, 0))
    rows["text"] = NonTensorStack(["hi"], ["yes"])
    parts = split_rows(rows, 4)
    assert [len(part) for part in parts] == [1, 1, 0, 0]
    for part in (*parts[2:], *split_rows(parts[2], 2), *micro_batches(parts[2])):
        assert set(part.keys(True)) == set(rows.keys(True))
        assert part["text"] == []


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda rows: split_rows(rows, 0), ValueError, "num_parts"),
        (lambda rows: split_rows(rows, 2, keep="row"), ValueError, "keep"),
        (lambda rows: split_rows(rows.exclude("group"), 2, keep="group"), KeyError, "group"),
        (lambda rows: split_rows(rows.exclude("masks"), 2), KeyError, "all_attention_mask"),
        (lambda rows: split_rows(rows[0], 2), ValueError, r"batch size \[N\]"),
        (lambda rows: micro_batches(rows, process_group=2), TypeError, "process_group"),
    ],
)
def test_errors_name_what_is_wrong(call, error, said):
    with pytest.raises(error, match=said):
        call(rows_of([3, 4]))
