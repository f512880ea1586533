import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import examples
from torchrl_mt.data._store.table import Choice, EpisodeTable, search

events = st.lists(
    st.one_of(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 9)), max_size=80
)


@examples()
@given(events=events, span=st.integers(1, 8), late=st.integers(1, 8))
def test_table_equals_a_plain_list(events, span, late):
    table, model, stored, steps = EpisodeTable(), [], 0, 0
    for event in events:
        if isinstance(event, int):
            episodes = min(event, len(model))
            table.evict(episodes)
            del model[:episodes]
        else:
            starts = range(stored, stored + len(event))
            table.extend(torch.tensor(event), torch.tensor(starts), 2 * torch.tensor(event))
            model += zip(event, starts, strict=True)
            stored += len(event)
            steps += sum(event)
        lengths = [n for n, _ in model]
        assert table.lengths.tolist() == lengths
        assert table.starts.tolist() == [s for _, s in model]
        assert table.num_steps == sum(lengths)
        assert table.end == steps
        assert table.first == steps - sum(lengths)
        assert table.next == stored
        assert table.oldest == stored - len(model)
        assert table.total(Choice(span)) == sum(max(0, n - span + 1) for n in lengths)
    for asked in (span, late):
        clips = [(e, k) for e, (n, _) in enumerate(model) for k in range(n - asked + 1)]
        found = search(table.before(Choice(asked)), np.arange(len(clips))) if clips else ([], [])
        assert list(zip(*(x.tolist() for x in found), strict=True)) == clips if clips else True
        holding = [e for e, (n, _) in enumerate(model) if n >= asked]
        assert table.total(Choice(asked, "episodes")) == len(holding)
        if holding:
            found, rest = search(table.before(Choice(asked, "episodes")), np.arange(len(holding)))
            assert found.tolist() == holding
            assert not rest.any()
    steps = [(e, k) for e, (n, _) in enumerate(model) for k in range(n)]
    if steps:
        found = table.find(np.arange(len(steps)))
        assert list(zip(*(x.tolist() for x in found), strict=True)) == steps
        ends = torch.tensor([n for n, _ in model]).cumsum(0).tolist()
        episodes, offsets = (np.array(column) for column in zip(*steps, strict=True))
        numbers, rows = table.places(episodes, offsets)
        assert numbers.tolist() == list(range(table.first, table.end))
        assert rows.tolist() == [model[e][1] + k for e, k in steps]
        for need in range(1, len(steps) + 1):
            assert table.episodes_holding(need) == 1 + next(
                i for i, e in enumerate(ends) if e >= need
            )
