"""Buffers whose every part is told by one number, to see whether a checkpoint is of one piece.

Run as a program, it has several processes save and load them: ``python versions.py FOLDER``.
"""

import multiprocessing
import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Transform

from tests.buffers import buffer_of
from torchrl_mt.data import ClipSampler


class Number(Transform):
    """Has a number for its state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, tensordict):
        return tensordict


def empty():
    """A buffer to load a version in."""
    return buffer_of(
        100,
        ClipSampler(slice_len=1),
        transform=Number(),
        generator=torch.Generator(),
        batch_size=1,
        prefetch=1,
    )


def version(number):
    """A buffer all of whose parts are made of ``number``."""
    rb = empty()
    rb._batch_size = 1 + number
    rb.sampler.load_state_dict({"step": number})
    rb.transform[0].number.fill_(number)
    rb.set_rng(torch.Generator().manual_seed(number))
    stored, still_open = 2 + number % 5, 1 + number % 3
    done = torch.zeros(stored + still_open, dtype=torch.bool)
    done[stored - 1] = True
    steps = {"observation": torch.full(done.shape, number), "next": {"done": done}}
    rb.extend(TensorDict(steps, done.shape))
    rb.sample()  # Another batch is prefetched.
    rb.synchronize()
    return rb


def parts(rb):
    """What every part of a buffer holds."""
    rb.synchronize()
    return {
        "batch_size": rb.batch_size,
        "sampler": rb.sampler.state_dict(),
        "transform": rb.transform[0].number.item(),
        "generator": rb._rng.get_state().tolist(),
        "stored": rb.storage[:]["observation"].tolist() if len(rb) else None,
        "open": [steps["observation"].tolist() for steps in rb.writer.open_episodes.values()],
        "written": rb.write_count,
        "prefetched": [batch.result()[0]["observation"].tolist() for batch in rb._prefetch_queue],
    }


def loaded_version(path, **kwargs):
    """The number of the version in ``path``; AssertionError if it is not of one piece."""
    rb = empty()
    rb.loads(path, **kwargs)
    number = int(rb.storage[0]["observation"])
    assert parts(rb) == parts(version(number))
    return number


def folders(path):
    """The versions in ``path``, those that do not count included."""
    return [each for each in path.iterdir() if each.is_dir() and each.name.startswith("checkpoint")]


def unfinished(path):
    """The versions in ``path`` whose writers did not get to their end."""
    return list(path.glob("checkpoint-*.tmp"))


def together(path, times=15):
    """One saves to a folder, and two load from it."""
    version(1).dumps(path)

    def save(first):
        for k in range(first, first + times):
            version(k).dumps(path)

    def load(_):
        for _ in range(2 * times):
            loaded_version(path)

    fork = multiprocessing.get_context("fork")
    works = [(save, 10), (load, 0), (load, 0)]
    workers = [fork.Process(target=work, args=[first]) for work, first in works]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
        assert each.exitcode == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    together(Path(sys.argv[1]))
