"""Runs of the guess-number example, one undisturbed and one killed again and again.

``python killed_runs.py FOLDER KILLS`` prints what was killed when, and the metrics of both as JSON.
Children are forked, since importing everything takes longer than a run.
"""

import csv
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

UPDATES = 30
ARGS = "--numbers 4 --turns 2 --warm-start-steps 5 --eval-episodes 4".split()
COUNTERS = ["started", "accepted", "rejected", "turns", "tokens", "forks", "policy_version"]


def load_example():
    """The example, with small batches, whose metrics also tell what was trained on, in which order."""
    path = Path(__file__).parents[2] / "examples" / "guess_number.py"
    spec = importlib.util.spec_from_file_location("guess_number", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.EPISODES_PER_UPDATE, example.CONCURRENCY, example.plt = 4, 4, None
    order = []

    class Maker(example.ExperienceMaker):
        def forward(self, rows):
            order.append(rows["tokens", "full"].tolist())
            return super().forward(rows)

    class Report(example.Report):
        def updated(self, storage, losses, stats):
            shown = super().updated(storage, losses, stats)
            data = json.dumps([order[-1], [p.tolist() for p in storage[:].get(("tokens", "prompt"), as_list=True)]])
            self.metrics[-1]["data_order"] = zlib.crc32(data.encode())
            self.metrics[-1] |= {f"collector/{name}": stats[name] for name in COUNTERS}
            return shown

    example.ExperienceMaker, example.Report = Maker, Report
    return example


def child(work):
    """Run ``work`` in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                if "-v" not in sys.argv:
                    os.dup2(nothing.fileno(), 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def after_calls(count, then):
    """Call ``then`` once this thread has made so many function calls."""
    left = iter(range(count))

    def called(frame, event, arg):
        if event in ("call", "c_call") and next(left, None) is None:
            sys.setprofile(None)
            then()

    sys.setprofile(called)


def metrics_of(out):
    with (out / "metrics.csv").open() as file:
        return [
            {k: float(v) for k, v in row.items() if not k.endswith("seconds")}
            for row in csv.DictReader(file)
        ]


def main(folder, kills):
    torch.set_num_threads(1)
    example = load_example()
    args = [*ARGS, "--updates", str(UPDATES)]
    checkpoints, told = folder / "checkpoints", folder / "told"

    def run(out, *more):
        return example.main([*args, "--out", str(folder / out), *more])

    began = time.monotonic()
    undisturbed = child(lambda: run("undisturbed"))
    assert end_of(undisturbed) == 0
    update = (time.monotonic() - began) / UPDATES

    def counted():
        save, counts = example.RunCheckpoint.save, []

        def count(self, *args, **kwargs):
            made = iter(range(10**9))
            sys.setprofile(lambda *_: next(made))
            save(self, *args, **kwargs)
            sys.setprofile(None)
            counts.append(next(made) // 2)  # calls and returns
            told.write_text(str(counts[-1]))
            if len(counts) == 5:
                os._exit(0)

        example.RunCheckpoint.save = count
        return run("counted", "--checkpoints", str(folder / "counted"))

    assert end_of(child(counted)) == 0
    calls = int(told.read_text())

    def killed_saving(number, at):
        """Die in the save of this number, after so many of its calls."""
        save, saves = example.RunCheckpoint.save, iter(range(1, 10**6))

        def die(self, *args, **kwargs):
            if next(saves) == number:
                after_calls(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(self, *args, **kwargs)
            sys.setprofile(None)

        example.RunCheckpoint.save = die
        return run("killed", "--checkpoints", str(checkpoints))

    draw, log = random.Random(0), []
    for attempt in range(kills):
        if attempt % 3:
            number, at = draw.randint(1, 2), draw.randrange(calls)
            pid = child(lambda number=number, at=at: killed_saving(number, at))
            how = ["saving", number, at]
        else:
            began, tell = os.pipe()

            def started(tell=tell):
                batches = example.MultiTurnCollector.iterator

                def begin(self):
                    os.write(tell, b".")
                    return batches(self)

                example.MultiTurnCollector.iterator = begin
                return run("killed", "--checkpoints", str(checkpoints))

            pid = child(started)
            os.close(tell)
            os.read(began, 1)
            os.close(began)
            how = ["anywhere", draw.uniform(0, 2.5)]
            time.sleep(how[1] * update)
            os.kill(pid, signal.SIGKILL)
        end = end_of(pid)
        left = len(list(checkpoints.glob("*.tmp")))
        newest = max((int(x.name[11:]) for x in checkpoints.glob("checkpoint-*[0-9]")), default=0)
        log.append({"how": how, "end": end, "unfinished": left, "newest": newest})
    resumed = end_of(child(lambda: run("killed", "--checkpoints", str(checkpoints))))
    names = sorted(x.name for x in checkpoints.iterdir())
    found = {name: metrics_of(folder / name) for name in ("undisturbed", "killed")}
    return {"log": log, "end": resumed, "calls": calls, "update": update, "left": names} | found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
