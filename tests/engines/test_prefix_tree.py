"""What is known of beginnings of texts, against a plain list of all of them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.tiers import few_or_many
from torchrl_mt.engines.transformers.prefix_tree import PrefixTree

from .helpers import check

texts = st.lists(st.integers(0, 1), max_size=8)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), texts, st.integers(-1, 8), st.booleans()),
        st.tuples(st.just("find"), texts, st.just(0), st.booleans()),
        st.tuples(st.just("evict"), st.just([]), st.integers(0, 9), st.just(False)),
    ),
    max_size=30,
)


def piece(text: list[int]) -> torch.Tensor:
    """What is kept of a text: of every token a number that tells all tokens up to it."""
    code, out = 0, []
    for token in text:
        code = 4 * code + token + 1
        out.append([code, -code])
    return torch.tensor(out, dtype=torch.int64).view(-1, 2)


def prefixes(text: list[int]) -> set[tuple[int, ...]]:
    return {tuple(text[:n]) for n in range(1, len(text) + 1)}


@few_or_many(60, 120)
def test_what_is_known_is_what_was_added_and_not_evicted(examples):
    check(known_is_what_was_added, examples, script=actions)


def known_is_what_was_added(script):
    tree, known = PrefixTree(), set()
    for action, text, number, copied in script:
        longest = max((len(p) for p in prefixes(text) & known), default=0)
        if action == "add":
            # Of the text's end only: as much as is new, or more, or (-1) too little.
            begin = min(max(0, longest - number), len(text))
            tree.add(text, piece(text)[begin:].clone(), copied=copied)
            if begin <= longest:
                known |= prefixes(text)
                longest = len(text)
        if action in ("add", "find"):
            length, pieces = tree.find(text, copied=copied)
            assert length == longest
            found = torch.cat(pieces) if pieces else piece([])
            assert torch.equal(found, piece(text[:length]))
            # No piece keeps the memory of what was given up.
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in pieces)
        else:
            before = len(tree)
            assert tree.evict(number) == min(number, before)
            gone = {p for p in known if tree.find(list(p))[0] < len(p)}
            assert len(gone) == before - len(tree)
            known -= gone
            # The end of a text leaves before its beginning.
            assert all(prefixes(list(p)) <= known for p in known)
        assert len(tree) == len(known)


def test_what_was_used_longest_ago_leaves_first():
    tree = PrefixTree()
    for text in ([1, 1], [2, 2], [3, 3]):
        tree.add(text)
    tree.find([1, 1])
    tree.find([2, 2], copied=True)
    tree.evict(2)
    assert [tree.find([token] * 2)[0] for token in (3, 2, 1)] == [2, 0, 2]
    tree.evict(3)  # 3 was looked for before 1
    assert [tree.find([token] * 2)[0] for token in (1, 3)] == [1, 0]
