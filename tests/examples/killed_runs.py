"""Runs of the guess-number example, one undisturbed and one that is killed again and again.

``python killed_runs.py FOLDER KILLS`` prints which kills there were and the metrics of both, as JSON.
All runs are forked from one process, since importing everything takes longer than a short run.
"""

import importlib.util
import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path

import torch

from torchrl_mt.view.run_files import read_run

UPDATES = 45
"""More than twenty killed runs come to: none of them makes more than two saves."""
ARGS = ["--numbers", "4", "--turns", "2", "--warm-start-steps", "20", "--lr", "1e-4"]
ARGS += ["--episodes", "4", "--eval-episodes", "4", "--updates", str(UPDATES)]
METRICS = ["started", "accepted", "rejected", "turns", "tokens", "forks", "policy_version"]
METRICS += ["return", "success", "entropy", "clip_fraction", "data_order"]
"""What does not depend on the time; the last one only in the runs of this file."""
TO_THE_DISK = {os.mkdir, os.open, os.fsync, os.rename, os.unlink, os.rmdir}


def load_example():
    """The example in small batches, whose metrics also tell what was trained on, in which order."""
    path = Path(__file__).parents[2] / "examples" / "guess_number.py"
    spec = importlib.util.spec_from_file_location("guess_number", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.MAX_RESPONSE_TOKENS, example.plot_run = 4, lambda folder: None
    rows_of_update = []

    class Maker(example.ExperienceMaker):
        def forward(self, rows):
            rows_of_update[:] = rows["tokens", "full"].tolist()
            return super().forward(rows)

    class Log(example.RunLog):
        def log(self, step, *dicts):
            super().log(step, *dicts, data_order=zlib.crc32(json.dumps(rows_of_update).encode()))

    example.ExperienceMaker, example.RunLog = Maker, Log
    return example


class Runs:
    """Forks runs of the example, each into a folder of its own within ``folder``."""

    def __init__(self, folder):
        self.folder = folder
        self.example = load_example()

    def begin(self, name, *, checkpoints=True, before=lambda: None):
        """Start a run; return its process and a pipe that is closed once it collects."""
        collecting, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tell)
            return pid, collecting
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            collector = self.example.MultiTurnCollector
            batches = collector.iterator
            collector.iterator = lambda self: os.close(tell) or batches(self)
            before()
            out = self.folder / name
            more = ["--checkpoints", str(out / "checkpoints")] if checkpoints else []
            code = self.example.main([*ARGS, "--out", str(out), *more])
        except BaseException:
            (self.folder / "error").write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def end(self, name, **kwargs):
        """Start a run and wait for its end; return its exit status."""
        pid, collecting = self.begin(name, **kwargs)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(collecting)
        return status

    def instead_of_a_save(self, number, act):
        """Have ``act(save)`` done in place of the save of this number."""
        cls, saves = self.example.RunCheckpoint, iter(range(1, 10**6))
        save = cls.save

        def saved(*args, **kwargs):
            if next(saves) == number:
                act(lambda: save(*args, **kwargs))
            else:
                save(*args, **kwargs)

        cls.save = saved


def metrics(out):
    """What was logged in each update, of ``METRICS``."""
    rows = read_run(out).rows.values()
    return [{name: row[name] for name in METRICS if name in row} for row in rows]


def calls_of(act, which):
    """How many function calls ``act`` makes: all of this thread, or those of some functions."""
    made = []
    sys.setprofile(lambda _, event, arg: counts(event, arg, which) and made.append(None))
    act()
    sys.setprofile(None)
    return len(made)


def die_at(count, which):
    """Kill this process as it begins the call of this number."""
    left = iter(range(count))

    def called(frame, event, arg):
        if counts(event, arg, which) and next(left, None) is None:
            die()

    sys.setprofile(called)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def counts(event, arg, which):
    return (event == "c_call" and arg in which) if which else event in ("call", "c_call")


def main(folder, kills):
    torch.set_num_threads(1)
    runs, draw = Runs(folder), random.Random(0)
    began = time.monotonic()
    assert runs.end("undisturbed", checkpoints=False) == 0
    update = (time.monotonic() - began) / UPDATES

    def count(save):
        numbers = [calls_of(save, which) for which in (None, TO_THE_DISK)]
        (folder / "calls").write_text(json.dumps(numbers))
        os._exit(0)

    # The fifth save deletes old checkpoints, too; it is done twice.
    assert runs.end("counted", before=lambda: runs.instead_of_a_save(5, count)) == 0
    calls = json.loads((folder / "calls").read_text())

    log, checkpoints = [], folder / "killed" / "checkpoints"
    for attempt in range(kills):
        kind = attempt % 3
        if kind == 0:
            how = ["anywhere", draw.uniform(0, 1.5)]
            pid, collecting = runs.begin(
                "killed", before=lambda: runs.instead_of_a_save(3, lambda save: die())
            )
            os.read(collecting, 1)
            time.sleep(how[1] * update)
            os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(collecting)
        else:
            which = [None, TO_THE_DISK][kind - 1]
            how = ["saving", draw.randint(1, 2), draw.randrange(calls[kind - 1]), kind]

            def save_and_die(save, at=how[2], which=which):
                die_at(at, which)
                save()
                die()  # This save made fewer calls: it had less to delete.

            status = runs.end(
                "killed", before=lambda n=how[1], act=save_and_die: runs.instead_of_a_save(n, act)
            )
        found = [x.name for x in checkpoints.glob("checkpoint-*")]
        unfinished = sum(name.endswith(".tmp") for name in found)
        log.append({"how": how, "status": status, "unfinished": unfinished, "found": found})
    report = {"log": log, "end": runs.end("killed"), "calls": calls, "update": update}
    report["left"] = sorted(each.name for each in checkpoints.iterdir())
    return report | {name: metrics(folder / name) for name in ("undisturbed", "killed")}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
