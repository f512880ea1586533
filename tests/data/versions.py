"""Buffers whose every part is told by one number, to see whether a checkpoint is of one piece.

Run as a program, it has children save them and kills them: ``python versions.py SCENARIO FOLDER``.
"""

import json
import os
import random
import signal
import sys

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Transform

from torchrl_mt.data import ClipSampler, EpisodeStorage, EpisodeWriter


class Number(Transform):
    """Has a number for its state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, tensordict):
        return tensordict


def empty():
    """A buffer to load a version in."""
    return ReplayBuffer(
        storage=EpisodeStorage(100),
        writer=EpisodeWriter(),
        sampler=ClipSampler(slice_len=1),
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


def child(work):
    """Run ``work`` in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def after_calls(count, then):
    """Call ``then`` once this thread has made so many function calls."""
    left = iter(range(count))

    def called(frame, event, arg):
        if event in ("call", "c_call") and next(left, None) is None:
            sys.setprofile(None)
            then()

    sys.setprofile(called)


def calls_of_a_save(path):
    """How many function calls a save makes."""
    version(0).dumps(path)  # the first makes more
    made = iter(range(10**9))
    sys.setprofile(lambda *_: next(made))
    version(0).dumps(path)
    sys.setprofile(None)
    return next(made) // 2  # calls and returns


def kills(path, times=40):
    """Kill savers at random points of their work.

    Returns:
        for each, the last version that was said to be saved, the one that was found (None if there
        was no checkpoint), and how many unfinished ones there are.
    """
    draw, found, number = random.Random(0), [], 0
    calls = calls_of_a_save(path.parent / "trial")
    for attempt in range(times):
        told, tell = os.pipe()
        # The first is killed in its first save, so that there may be no checkpoint.
        saves = draw.uniform(0, 3.5) if attempt else draw.random()

        def save(first=number + 1, tell=tell, calls=int(saves * calls)):
            after_calls(calls, lambda: os.kill(os.getpid(), signal.SIGKILL))
            for k in range(first, first + 1000):
                version(k).dumps(path)
                os.write(tell, b".")

        pid = child(save)
        os.close(tell)
        os.waitpid(pid, 0)
        said = number
        while dots := os.read(told, 1000):
            said += len(dots)
        os.close(told)
        left = len(unfinished(path))
        try:
            number = loaded_version(path)
        except FileNotFoundError:
            found.append((said, None, left))
        else:
            found.append((said, number, left))
    return found


def together(path, times=15):
    """Several save to one folder and one loads, all at once; whether each got to its end."""
    version(1).dumps(path)

    def save(first):
        for k in range(first, first + times):
            version(k).dumps(path)

    def load():
        for _ in range(2 * times):
            loaded_version(path)

    pids = [child(lambda: save(10)), child(lambda: save(100)), child(load)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"ends": ends, "found": loaded_version(path)}


if __name__ == "__main__":
    from pathlib import Path

    torch.set_num_threads(1)
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(kills(folder) if scenario == "kills" else together(folder)))
