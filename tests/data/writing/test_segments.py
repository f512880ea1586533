import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from torchrl_mt.data._writing.segments import group_steps, segments


@examples()
@given(
    ids=st.lists(st.integers(-2, 3), min_size=1, max_size=60),
    rows=st.integers(1, 3),
)
def test_steps_of_an_id_are_grouped_in_time(ids, rows):
    ids = np.concatenate([np.array(ids) + 10 * row for row in range(rows)])
    row = np.repeat(np.arange(rows), len(ids) // rows) if rows > 1 else None
    order = group_steps(ids, row)
    if order is None:
        order = np.arange(len(ids))
    assert sorted(order.tolist()) == list(range(len(ids)))
    grouped = ids[order]
    parts = segments(grouped, grouped[1:] == grouped[:-1])
    assert len(set(parts.keys)) == len(parts.keys)
    for key, start, stop in zip(parts.keys, parts.starts, parts.stops, strict=True):
        assert order[start:stop].tolist() == np.flatnonzero(ids == key).tolist()
    assert parts.sizes.sum() == len(ids)


def test_one_id_in_two_rows_is_refused():
    row = np.array([0, 0, 1, 1])
    for ids in ([1, 1, 2, 1], [1, 2, 2, 3], [1, 1, 1, 1]):
        with pytest.raises(ValueError, match=r"id \d is in more than one row"):
            group_steps(np.array(ids), row)
    assert group_steps(np.array([5, 5, 1, 1]), row) is None
    assert group_steps(np.array([5, 6, 1, 1]), row) is None
