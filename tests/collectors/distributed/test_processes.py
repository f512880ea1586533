"""Workers in processes and in Ray actors: what threads cannot show."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ListStorage, RayReplayBuffer

from tests.collectors.distributed.conftest import (
    in_processes,
    kill,
    pids_of,
    played_while_workers_die,
)
from tests.collectors.distributed.played import (
    SeededEngine,
    Talk,
    broken_engine,
    items,
    ledger,
    slow_engine,
    weights,
)
from tests.collectors.distributed.test_in_threads import versions_are_right
from tests.collectors.runs import balanced, beside, collecting, failed_run, run_of
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits, MultiProcessCollector, RayMultiTurnCollector
from torchrl_mt.collectors.distributed import workers

pytestmark = pytest.mark.slow

OPTIONS = {"n": 16, "group_size": 4, "cycle": False, "sampling": {"seed": 3}}


def pids_in(batches):
    return {info["pid"] for batch in batches for info in batch["info"]}


def are_gone(pids):
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids
    )


def test_two_workers_play_as_one_process_does(distributed):
    with distributed(Talk, SeededEngine, items(16), **OPTIONS) as collector:
        batches = list(collector)
        collector.update_policy_weights_(weights(2.0))
        assert collector.policy_version == 1
        stats = collector.stats()
    expected, _ = run_of(Talk, SeededEngine(), items(16), **OPTIONS)
    assert ledger(batches) == ledger(expected)
    ids = [set(batch["collector", "traj_ids"].tolist()) for batch in batches]
    assert len(set().union(*ids)) == sum(map(len, ids)) == stats["accepted"] == 64
    pids = pids_in(batches)
    assert len(pids) == 2
    assert os.getpid() not in pids
    for batch in batches:
        for group in batch["group"].unique():
            members = batch[batch["group"] == group]
            assert len({info["pid"] for info in members["info"]}) == 1
            assert len(members["collector", "traj_ids"].unique()) == 4
    wait_until(lambda: are_gone(pids))


def test_ten_deaths_lose_and_double_nothing(tmp_path):
    rng = random.Random(1)

    def die(collector):
        wait_until(lambda: pids_of(collector) and collector.stats()["running"])
        time.sleep(0.1)
        if pids := pids_of(collector):
            kill(rng.choice(pids))

    options = {**OPTIONS, "group_size": 2, "n": 8}
    played_while_workers_die(in_processes, die, tmp_path, sleep=0.02, **options)


def test_a_killed_actor_is_started_again_with_the_last_weights(distributed):
    options = {**OPTIONS, "cycle": True, "max_staleness": 1}
    with distributed(Talk, slow_engine, items(64, turns=3), **options) as collector:
        iterator = iter(collector)
        pids = set()
        for version in range(6):
            batch = next(iterator)
            versions_are_right(batch)
            if version == 2:
                kill(min(pids_in([batch])))
            pids |= pids_in([batch])
            collector.update_policy_weights_(weights(version + 1.0))
        while len(pids) < 3:
            batch = next(iterator)
            versions_are_right(batch)
            pids |= pids_in([batch])
            version += 1
            collector.update_policy_weights_(weights(version + 1.0))
        assert balanced(collector.stats())


def test_weights_of_models_arrive():
    model = torch.nn.Linear(1, 1, bias=False)
    named = {"w": model.weight.detach().view(())}
    with in_processes(Talk, SeededEngine, items(8), num_collectors=1, **OPTIONS) as collector:
        with torch.no_grad():
            model.weight.fill_(3.0)
        collector.update_policy_weights_(TensorDict(named))
        model.weight.data.fill_(-50.0)  # What was sent does not change.
        batch = next(iter(collector))
        for log_probs in batch.get(("log_probs", "response"), as_list=True):
            assert ((log_probs >= 2) & (log_probs <= 3)).all()


def test_what_an_engine_cannot_be_made_of_is_raised():
    with pytest.raises(FileNotFoundError, match="no weights here") as caught:
        in_processes(Talk, broken_engine, items(2), **OPTIONS)
    assert "in broken_engine" in str(caught.value.__cause__)
    with pytest.raises(ImportError, match=r"policy_factory 'no\.such\.thing'"):
        in_processes(Talk, "no.such.thing", items(2), num_collectors=1, **OPTIONS)


def test_errors_of_episodes_are_counted_with_their_traceback():
    name = "tests.collectors.distributed.played"
    options = {**OPTIONS, "num_collectors": 1, "max_consecutive_failures": 3}
    error, stats = failed_run(
        *("ValueError: no such world", f"{name}.Refuses", f"{name}.SeededEngine", items(9)),
        make=MultiProcessCollector,
        **options,
    )
    assert isinstance(error, ValueError)
    assert "played.py" in str(error.__cause__)
    assert stats["rejected/ValueError"] >= 3


def test_an_item_that_kills_whoever_plays_it_is_named():
    data = [{"k": 0, "turns": 1, "dies": True, "name": "poison"}, *items(200)]
    options = {**OPTIONS, "num_collectors": 1, "max_restarts": 2}
    named = pytest.raises(RuntimeError, match=r"died 3 times in a row|poison")
    with in_processes(Talk, SeededEngine, data, **options) as collector, named:
        list(collector)


def stop_one(collector, monkeypatch):
    """Stop a worker's process once episodes run."""
    monkeypatch.setattr(workers, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(workers, "SILENT_SECONDS", 2.0)
    wait_until(lambda: collector.stats()["running"] == 16)
    os.kill(pids_of(collector)[0], signal.SIGSTOP)
    return pids_of(collector)[0]


def test_time_runs_out_for_episodes_of_a_stopped_worker(monkeypatch):
    monkeypatch.setattr(workers, "_CLOSE_SECONDS", 0.5)
    data = items(8, turns=20, sleep=0.1)
    options = {**OPTIONS, "limits": Limits(episode_timeout=5.0), "max_retries": 99}
    with in_processes(Talk, SeededEngine, data, **options) as collector:
        with beside(lambda: stop_one(collector, monkeypatch)):
            batches = list(collector)
        stats = collector.stats()
    assert len(ledger(batches)) == stats["accepted"] == 32
    assert stats["rejected"] == stats["rejected/episode_timeout"] >= 1


def test_episodes_of_a_stopped_worker_wait_for_it(monkeypatch, caplog):
    data = items(4, turns=20, sleep=0.1)
    with in_processes(Talk, SeededEngine, data, **OPTIONS) as collector:

        def stop_and_go():
            pid = stop_one(collector, monkeypatch)
            wait_until(lambda: "has not answered for 2 s" in caplog.text)
            os.kill(pid, signal.SIGCONT)

        with beside(stop_and_go):
            batches = list(collector)
        stats = collector.stats()
    assert len(ledger(batches)) == stats["accepted"] == stats["started"] == 16
    assert "(pid " in caplog.text
    assert "answers again" in caplog.text


def test_functions_that_no_module_has_are_sent():
    reward = 0.0

    def accept(episode):
        return episode["next", "reward"].sum() > reward

    env, engine, options = lambda: Talk(), lambda: SeededEngine(), {**OPTIONS, "num_collectors": 1}
    with in_processes(env, engine, items(8), accept=accept, **options) as collector:
        batches = list(collector)
    assert all(step["next", "reward"] >= 0 for batch in batches for step in batch.unbind(0))


def test_shutting_down_in_the_middle_leaves_nothing():
    collector = in_processes(Talk, SeededEngine, items(64, sleep=1000.0), **OPTIONS)
    pids = pids_of(collector)

    def take():
        with pytest.raises(RuntimeError, match="was shut down"):
            next(iter(collector))

    with beside(take):
        wait_until(lambda: collector.stats()["running"] == 16)
        collector.shutdown()
    stats = collector.stats()
    assert stats["running"] == 0
    assert stats["rejected/cancelled"] == stats["started"] == 16
    assert are_gone(pids)
    collector.shutdown()


def test_a_forgotten_collector_ends_its_processes():
    collector = in_processes(Talk, SeededEngine, items(4), **OPTIONS)
    pids = pids_of(collector)
    assert len(pids) == 2
    del collector
    gc.collect()
    wait_until(lambda: are_gone(pids))


SCRIPT = """
import os, signal, sys, time
from tests.collectors.distributed.conftest import pids_of
from tests.collectors.distributed.played import SeededEngine, Talk, items
from torchrl_mt.collectors import MultiProcessCollector

if __name__ == "__main__":
    collector = MultiProcessCollector(
        Talk, SeededEngine, items(4), num_collectors=2, episodes_per_batch=2
    )
    print(*pids_of(collector), flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_processes_end_with_the_one_that_made_them(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, script, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    assert ended.returncode == (-signal.SIGKILL if how == "kill" else 0)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: are_gone(pids))


def test_actors_write_into_a_buffer_of_ray_and_give_back_what_they_reserve(ray_cluster):
    storage, remote = partial(ListStorage, 1000), {"num_cpus": 0}
    buffer = RayReplayBuffer(storage=storage, remote_config=remote, batch_size=4)
    options = {**OPTIONS, "make": RayMultiTurnCollector, "num_collectors": 2}
    options |= {"remote_configs": [{"num_cpus": 1}, {"num_cpus": 0.5}], "replay_buffer": buffer}
    with collecting(Talk, SeededEngine, items(16, sleep=0.01), **options) as collector:
        assert ray_cluster.available_resources().get("CPU", 0) == 0.5
        collector.start()
        wait_until(lambda: collector.stats()["accepted"] == 64 and not collector.is_running)
        assert len(buffer) == collector.stats()["turns"]
        assert buffer.sample()["group"].shape == (4,)
    wait_until(lambda: ray_cluster.available_resources().get("CPU", 0) == 2)
    buffer.shutdown()
