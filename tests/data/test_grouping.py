import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_mt.data.grouping import group_steps


@given(
    steps=st.lists(
        st.tuples(st.integers(-2, 3), st.booleans(), st.booleans()), min_size=1, max_size=60
    ),
    padded=st.booleans(),
)
def test_steps_of_an_id_are_grouped_in_time(steps, padded):
    ids, ended = torch.tensor([s[0] for s in steps]), torch.tensor([s[1] for s in steps])
    valid = torch.tensor([s[2] for s in steps]) if padded else None
    order, segments = group_steps(ids[None], ended[None], None if valid is None else valid[None])
    order = torch.arange(len(steps)) if order is None else order
    expected, pieces = {}, []
    for at, (key, end, is_valid) in enumerate(steps):
        if padded and not is_valid:
            continue
        expected.setdefault(key, []).append(at)
        if end:
            pieces.append((key, expected.pop(key), True))
    pieces += [(key, piece, False) for key, piece in expected.items()]
    pieces.sort(key=lambda piece: piece[1][-1])
    got = [(s.key, order[s.start : s.stop].tolist(), s.ended) for s in segments]
    assert got == pieces


def test_padding_may_have_any_id():
    ids, ended = torch.tensor([[1, 0], [0, 1]]), torch.zeros(2, 2, dtype=torch.bool)
    order, segments = group_steps(ids, ended, torch.tensor([[True, False], [True, False]]))
    assert [order[s.start : s.stop].tolist() for s in segments] == [[0], [2]]
    assert group_steps(ids, ended, torch.zeros_like(ended))[1] == []


def test_one_id_in_two_rows_is_refused():
    ids = torch.tensor([[1, 1], [2, 1]])
    with pytest.raises(ValueError, match="id 1 is in more than one row"):
        group_steps(ids, torch.zeros(2, 2, dtype=torch.bool))
