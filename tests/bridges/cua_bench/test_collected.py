"""Collectors play on several servers: one episode each at a time, and nothing is left on any."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

from tests.bridges.cua_bench.fake_worker import FakeWorker
from tests.bridges.cua_bench.held_servers import taken
from tests.bridges.cua_bench.test_computer import answered
from tests.bridges.cua_bench.test_computer_env import TASKS, env_on
from tests.collectors.scripted import ScriptedEngine
from tests.faulty_server import nothing, running, status, success
from tests.waiting import wait_until
from torchrl_mt.bridges.cua_bench import leases
from torchrl_mt.bridges.cua_bench.actions import describe_actions
from torchrl_mt.collectors import MultiTurnCollector
from torchrl_mt.testing import tiny_chat_tokenizer

KEY = "<|action_start|>key(a)<|action_end|>"
DONE = "<|action_start|>done()<|action_end|>"
MAX_STEP, MAX_HIST = 7, 2
TURNS = [2, 5, MAX_STEP]
"""Responses in an episode of each task; the last one never says that it is done."""


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(running(FakeWorker())) for _ in TASKS]


@pytest.fixture
def tokenizer():
    numbers = range(2 * MAX_STEP)
    lines = [f'{i}. key("a") screen{i} task{i}' for i in numbers]
    words = [describe_actions(), "Your first steps were:", KEY, DONE, *lines]
    return tiny_chat_tokenizer(" ".join(words))


def engine_of(tokenizer):
    """Press a key until the task is done, as the newest prompt says."""

    def rule(prompt):
        text = tokenizer.decode(prompt)
        task = int(re.search(r"task(\d+)", text)[1])
        presses = int(re.findall(r"screen(\d+)", text)[-1])
        is_last = task < 2 and presses == TURNS[task] - 1
        return tokenizer(f"{DONE if is_last else KEY} <end>")["input_ids"]

    return ScriptedEngine(tokenizer, rule)


def collect(servers, tokenizer, episodes, **kwargs):
    env = env_on(*servers, max_step=MAX_STEP, max_hist=MAX_HIST)
    data = [{"task": i % 3} for i in range(episodes)]
    engine = engine_of(tokenizer)
    settings = {"episodes_per_batch": 5, "max_concurrency": 6, **kwargs}
    with MultiTurnCollector(env, engine, data, total_episodes=episodes, **settings) as made:
        batches = list(made)
        stats = made.stats()
    assert taken() == set()
    for server in servers:
        assert server.active == {}
        assert server.ended_by_reset == 0
        wait_until(lambda server=server: server.open == 0)
    return batches, stats


def test_twenty_episodes_on_three_servers(servers, tokenizer):
    batches, stats = collect(servers, tokenizer, 20)
    turns = [TURNS[i % 3] for i in range(20)]
    assert (stats["accepted"], stats["rejected"], stats["turns"]) == (20, 0, sum(turns))
    # After every other response there is a new row, but not after the first two nor the last.
    assert stats["forks"] == sum(max(0, (number - 1) // MAX_HIST - 1) for number in turns)
    played = [(task[1], actions) for server in servers for task, actions in server.played]
    assert sorted(task for task, _ in played) == sorted(i % 3 for i in range(20))
    for task, actions in played:
        presses = TURNS[task] if task == 2 else TURNS[task] - 1
        assert actions == [{"type": "KeyAction", "key": "a"}] * presses + [{"type": "DoneAction"}]
    assert all(server.played for server in servers)
    for batch in batches:
        ends = batch["next", "done"].flatten()
        rewards = batch["next", "reward"].flatten()
        assert (rewards[~ends] == 0).all()
        long = batch["next", "truncated"].flatten()
        assert rewards[long].tolist() == [MAX_STEP + 1.0] * int(long.sum())
    assert sum(int(batch["next", "truncated"].sum()) for batch in batches) == 6


def test_faults_reject_episodes_by_cause_and_leave_nothing(servers, tokenizer, monkeypatch):
    monkeypatch.setattr("torchrl_mt.http_client._AWAY_PAUSE", 0.01)
    for pause in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(leases, pause, 0.01)
    faults = [status(500), nothing, success(b"["), success({"reward": 0.0, "done": False})]
    for k, server in enumerate(servers):
        server.faults = [answered] * (3 + k)
        for fault in faults:
            server.faults += [fault, *[answered] * 4]
    _, stats = collect(servers, tokenizer, 12, max_consecutive_failures=None)
    assert stats["accepted"] + stats["rejected"] == stats["started"]
    assert stats["rejected"] == stats["rejected/ComputerError"] > 0
    presses = [a["key"] for server in servers for _, played in server.played for a in played[:-1]]
    assert set(presses) == {"a"}


@pytest.mark.parametrize("broken_at", ["/reset", "/step"])
def test_a_broken_server_among_several_takes_few_episodes(
    servers, tokenizer, monkeypatch, broken_at
):
    """It fails fast, so it would be free whenever an episode begins."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE", 3600.0)
    broken = servers[0]

    def answer(path, body):
        failure = (500, {"detail": "broken"})
        return failure if path == broken_at else FakeWorker.answer(broken, path, body)

    monkeypatch.setattr(broken, "answer", answer)
    _, stats = collect(servers, tokenizer, 12)
    assert (stats["accepted"], stats["rejected"]) == (12, 1)


def test_episodes_without_data_choose_a_task_by_seed(servers, tokenizer):
    env = env_on(*servers, max_step=MAX_STEP)
    settings = {"episodes_per_batch": 6, "group_size": 2, "total_episodes": 6}
    with MultiTurnCollector(env, engine_of(tokenizer), **settings) as made:
        (batch,) = made
    begins = {}
    for group, text in zip(batch["group"].flatten().tolist(), batch["text"], strict=True):
        found = re.search(r"task(\d)", str(text))
        if found:
            begins.setdefault(group, set()).add(found[1])
    assert sorted(map(tuple, begins.values())) == [("0",), ("1",), ("2",)]
