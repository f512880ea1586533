"""Of a private ring: rows that it places for nothing cost memory, which no storage tells of."""

from torchrl_mt.data._store.ring import Ring


def test_several_blocks_are_placed_or_none():
    ring = Ring(6)
    assert ring.push_all([2, 3]) == [0, 2]
    before = vars(ring).copy()
    assert ring.push_all([1, 1]) is None
    assert vars(ring) == before
