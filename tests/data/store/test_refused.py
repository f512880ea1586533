"""Writes that fail half-way leave the storage as it was.

They are made to by private memory: no storage can be asked to fail at a certain moment.
"""

import pytest
import torch

from tests.buffers import buffer_of
from tests.tiers import slow
from torchrl_mt.data import EpisodeSampler, EpisodeStorage
from torchrl_mt.data._store.columns.memory import Memory


class Failing:
    """Has some functions raise ``MemoryError`` at their ``at``-th call, all counted together."""

    def __init__(self, monkeypatch, at):
        self.left = at
        for owner, name in ((Memory, "empty"), (torch, "cat"), (torch, "stack")):
            monkeypatch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, function):
        def call(*args, **kwargs):
            if "out" in kwargs:  # It takes no memory.
                return function(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no memory left")
            return function(*args, **kwargs)

        return call


def everything(make, storage):
    table = storage.table
    counts = storage.num_tokens, storage.revision, table.first, table.end, table.oldest
    steps = make.steps(storage[:]) if len(storage) else []
    return steps, storage.lengths.tolist(), storage.schema, counts


@pytest.mark.parametrize("kind", ["vectors", "turns"])
@pytest.mark.parametrize("lengths", [slow([5]), [2, 9, 1], slow([1] * 12)])
@pytest.mark.parametrize("before", [slow([]), slow([3, 4]), [4, 4, 4]])
def test_running_out_of_memory_changes_nothing(make, monkeypatch, kind, lengths, before):
    maker = getattr(make, kind)
    data, at = maker(lengths, seed=9, first_id=50), 0
    while True:
        at += 1
        rb = buffer_of(12, EpisodeSampler(), batch_size=2)
        if before:
            rb.extend(maker(before))
        held = everything(make, rb.storage)
        with monkeypatch.context() as patch:
            failing, failed = Failing(patch, at), False
            try:
                rb.extend(data)
            except MemoryError:
                failed = True
        if failing.left > 0:
            break
        if failed:
            assert everything(make, rb.storage) == held
            if before:
                rb.sample()
            rb.extend(data)
        expected = EpisodeStorage(12)
        for written in ([maker(before)] if before else []) + [data]:
            for episode in make.split(written):
                expected.append(episode)
        assert make.steps(rb[:]) == make.steps(expected[:])
    # More dense episodes may need no memory at all.
    assert at > 1 or kind == "vectors"
