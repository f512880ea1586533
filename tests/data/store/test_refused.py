"""Writes that fail half-way, or are interrupted, leave the storage as it was.

They are made to by private memory and columns: no storage can be asked to fail at a certain moment.
"""

import os
import signal

import pytest
import torch

from tests.buffers import buffer_of
from tests.tiers import slow
from torchrl_mt.data import EpisodeSampler, EpisodeStorage
from torchrl_mt.data._store.columns.columns import DenseColumn, NextColumn, RaggedColumn
from torchrl_mt.data._store.columns.memory import Memory
from torchrl_mt.data._store.columns.records import Record


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
    return (
        make.steps(storage[:]) if len(storage) else [],
        storage.lengths.tolist(),
        storage.schema,
        storage.num_tokens,
        storage.revision,
        storage.table.first,
        storage.table.end,
        storage.table.oldest,
    )


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
            failing = Failing(patch, at)
            try:
                rb.extend(data)
            except MemoryError:
                failed = True
            else:
                failed = False
        if failing.left > 0:
            break
        if failed:
            assert everything(make, rb.storage) == held
            if before:
                rb.sample()
            rb.extend(data)
        expected = EpisodeStorage(12)
        for episode in make.split(maker(before)) if before else []:
            expected.append(episode)
        for episode in make.split(data):
            expected.append(episode)
        assert make.steps(rb[:]) == make.steps(expected[:])
    # More dense episodes may need no memory at all.
    assert at > 1 or kind == "vectors"


@pytest.mark.parametrize("column", [Record, NextColumn, DenseColumn, RaggedColumn])
def test_an_interrupt_waits_until_the_write_is_whole(make, monkeypatch, column):
    """By private columns: it must come while rows of evicted episodes are written over."""
    storage = EpisodeStorage(9)
    maker = make.turns if column is RaggedColumn else make.vectors

    def episode(length, seed=0):
        data = maker([length], seed=seed, first_id=seed)
        if column is DenseColumn:  # too large for a record
            data["image"] = torch.randn(length, 300)
        return data

    storage.append(episode(4))
    plan = column.plan

    def interrupted(self, change, values):
        commit = plan(self, change, values)

        def pressed():
            os.kill(os.getpid(), signal.SIGINT)
            commit()

        return pressed

    monkeypatch.setattr(column, "plan", interrupted)
    new = episode(6, seed=1)
    with pytest.raises(KeyboardInterrupt):
        storage.append(new)
    assert make.steps(storage[:]) == make.steps(new)
