"""Ctrl-C at any moment of a write: it has happened or it has not, and the writer goes on as if."""

from __future__ import annotations

import pickle
import signal
import sys

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer

from tests.tiers import in_fast_tier, some_fast
from torchrl_mt.data import EpisodeStorage, EpisodeWriter

POINTS = in_fast_tier(4, 40)
"""Moments of a write that are tried, evenly spread over its bytecodes."""


class Interrupt:
    """A trace function that raises SIGINT at one bytecode of the package."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        if "torchrl_mt" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


def batch(number, t, *, done=(), as_list=False):
    """One step of environments ``0`` to ``number``; those in ``done`` end."""
    ids = torch.arange(number)[:, None]
    step = ids * 1000.0 + t
    ended = torch.tensor([i in done for i in range(number)])[:, None, None]
    entries = {
        "observation": torch.stack([step, ids], -1),
        "large": step[..., None].expand(-1, -1, 200).clone(),
        "collector": {"traj_ids": ids.clone()},
        "next": {"observation": torch.stack([step + 1, ids], -1), "done": ended},
    }
    data = TensorDict(entries, [number, 1])
    if as_list:
        return lazy_stack([lazy_stack([data[i, 0].clone()]) for i in range(number)])
    return data


def after(batches):
    rb = ReplayBuffer(storage=EpisodeStorage(60), writer=EpisodeWriter(max_open_steps=400))
    for t in range(batches):
        rb.extend(batch(3, t, done=(0, 2) if t % 7 == 6 else ()))
    return rb


def state(rb):
    """All that can be seen of a buffer."""
    storage, writer = rb.storage, rb.writer
    episodes = [*storage.episodes(), *writer.open_episodes.values()]
    values = [[(str(key), e[key].tolist()) for key in e.keys(True, True)] for e in episodes]
    values = [*map(sorted, values)]
    return values, storage.lengths.tolist(), writer.open_lengths, writer.stats()


def append(rb):
    """Write to the storage alone, where others leave for it."""
    steps = [batch(1, t, done=(0,) if t == 49 else ())[0] for t in range(10, 50)]
    rb.storage.append(torch.cat(steps))


OPERATIONS = {
    "the first": (0, lambda rb: rb.extend(batch(3, 0))),
    "steps go on": (5, lambda rb: rb.extend(batch(3, 5))),
    "some end": (6, lambda rb: rb.extend(batch(3, 6, done=(0, 2)))),
    "old ones leave": (34, lambda rb: rb.extend(batch(3, 34, done=(0, 1, 2)))),
    "the log is laid out": (21, lambda rb: rb.extend(batch(30, 21))),
    "lists come": (5, lambda rb: rb.extend(batch(3, 5, as_list=True))),
    "the storage alone": (34, append),
    "flush": (5, lambda rb: rb.writer.flush()),
    "discard": (5, lambda rb: rb.writer.discard(1)),
}


FAST = ["old ones leave", "flush"]


@pytest.mark.parametrize("name", some_fast(FAST, OPERATIONS))
def test_an_interrupted_write_has_happened_or_has_not(name):
    batches, operate = OPERATIONS[name]
    saved = pickle.dumps(after(batches))
    rb = pickle.loads(saved)
    states, counting = [state(rb)], Interrupt(-1)
    sys.settrace(counting)
    try:
        operate(rb)
    finally:
        sys.settrace(None)
    states.append(state(rb))
    follow_up = batch(3, batches + 1)
    rb.extend(follow_up)
    finally_ = state(rb)
    interrupted = 0
    for point in range(1, counting.count, max(1, counting.count // POINTS)):
        rb = pickle.loads(saved)
        sys.settrace(Interrupt(point))
        try:
            operate(rb)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert state(rb) in states, f"torn at bytecode {point} of {counting.count}"
        if state(rb) == states[0]:
            operate(rb)
        rb.extend(follow_up)
        assert state(rb) == finally_
    assert interrupted > POINTS // 2
