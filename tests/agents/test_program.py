"""A program is an episode: it is given all it needs, and nothing of it is left."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.waiting import PATIENCE, wait_until
from torchrl_mt.agents import AgentProgram
from torchrl_mt.agents import program as module
from torchrl_mt.agents.program import ProgramTimeoutError
from torchrl_mt.collectors.event_loop.loop_thread import LoopThread
from torchrl_mt.collectors.workflow import Rejected

GIVEN = {"base_url": "http://127.0.0.1:9/v1", "api_key": "key-7", "http_client": None}
SESSION = SimpleNamespace(transcript=[{"request": {"n": 1}, "response": {"id": "c"}}])


def python(code):
    return [sys.executable, "-S", "-c", code]


def everything(*args):
    return args


async def play(agent, data=None):
    return await agent.run(data, session=SESSION, **GIVEN)


def run(agent, data=None):
    return asyncio.run(play(agent, data))


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # Where nobody reaps orphans, they stay as zombies.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def pid_in(file):
    """The number that a program has written to a file."""
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def file_descriptors(at_most=None):
    count = len(os.listdir("/dev/fd"))
    if at_most is not None and count > at_most:
        gc.collect()  # slow here, and hardly ever needed
        count = len(os.listdir("/dev/fd"))
    return count


@pytest.fixture(autouse=True)
def nothing_is_left():
    def calls():
        return [thread for thread in threading.enumerate() if thread.name == "torchrl_mt-call"]

    def children():
        return {child.pid for child in psutil.Process().children()}

    before, others = file_descriptors(), children()
    yield
    wait_until(lambda: not calls())
    assert not module._running
    wait_until(lambda: file_descriptors(before) <= before)
    assert children() <= others, "a child is left, dead or alive"


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.05)


# What it is given and gives


@pytest.mark.parametrize("is_async", [False, True])
def test_a_program_finds_its_episode_and_is_judged(tmp_path, monkeypatch, is_async):
    async def judge(*args):
        return args

    monkeypatch.setenv("FROM_HERE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    script = 'pwd; cat; echo " $OPENAI_BASE_URL $OPENAI_API_KEY $FROM_HERE $OWN"; exit 3'
    agent = AgentProgram(
        ["sh", "-c", script],
        reward=judge if is_async else everything,
        env={"OWN": "x", "OPENAI_BASE_URL": "elsewhere"},
        env_inherit=["FROM_HERE", "OPENAI_API_KEY"],
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    data = {"question": "é?", "n": [1, None]}
    got, transcript, returncode, stdout = run(agent, data)
    assert got is data
    assert transcript == SESSION.transcript
    assert returncode == 3
    where, said = stdout.strip().split("\n")
    assert os.path.samefile(where, tmp_path)
    item, rest = said[: said.rindex("}") + 1], said[said.rindex("}") + 1 :]
    assert json.loads(item) == data
    assert rest.split() == ["http://127.0.0.1:9/v1", "key-7", "1", "x"]


@pytest.mark.parametrize(
    ("inherit", "told"),
    [((), []), (["A_TOKEN", "NOT_SET"], ["A_TOKEN"]), (True, ["A_TOKEN", "B_TOKEN"])],
)
def test_secrets_of_this_process_stay_here_unless_asked_for(monkeypatch, inherit, told):
    for name in ("A_TOKEN", "B_TOKEN"):
        monkeypatch.setenv(name, "secret")
    agent = AgentProgram(["env"], reward=everything, env={"OWN": "x"}, env_inherit=inherit)
    lines = run(agent)[-1].splitlines()
    secrets = [line.partition("=")[0] for line in lines if line.endswith("=secret")]
    assert sorted(secrets) == told
    assert f"PATH={os.environ['PATH']}" in lines
    assert "OWN=x" in lines


@pytest.mark.parametrize("result", [None, 0.5, [1.0], {"c": 1.0}])
def test_the_reward_is_handed_on(result):
    assert run(AgentProgram(["true"], reward=lambda *_: result)) == result


def test_a_program_that_fails_is_told_of_once(caplog):
    agent = AgentProgram(
        ["sh", "-c", "echo 'no such task' >&2; kill -9 $$"], reward=lambda *args: args[2]
    )
    assert [run(agent), run(agent)] == [-9, -9]
    (record,) = caplog.records
    assert "has ended with status -9" in record.getMessage()
    assert "no such task" in record.getMessage()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"command": "python solve.py"}, TypeError, "command must be a list .* shlex.split"),
        ({"command": []}, ValueError, "command must name a program, got an empty list"),
        ({"command": ["a", 1]}, TypeError, "command must be a list of strings, got 1 in it"),
        ({"reward": 1.0}, TypeError, "reward must be a function, got 1.0"),
        ({"env": {"A": 1}}, TypeError, "env must map strings to strings, got 'A': 1"),
        (
            {"env_inherit": "PATH"},
            TypeError,
            "env_inherit must be True or a list of names, got 'PATH'",
        ),
        ({"env_inherit": [1]}, TypeError, "env_inherit must be True or a list of names, got .1."),
        ({"timeout": 0}, ValueError, "timeout must be positive, got 0"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        AgentProgram(**{"command": ["true"], "reward": everything, **kwargs})


@pytest.mark.parametrize(
    ("command", "cwd", "data", "error", "message"),
    [
        (["no-such-program"], None, 1, FileNotFoundError, "command must be .*'no-such-program'"),
        (["true"], "/no/such/folder", 1, FileNotFoundError, "cwd='/no/such/folder'"),
        (["/"], None, 1, PermissionError, "command must be a program that can be started"),
        (["true"], None, {1, 2}, TypeError, "data must hold items that are fit for JSON, .*set"),
        (["true"], None, float("nan"), ValueError, "data must hold items that are fit for JSON"),
    ],
)
def test_what_cannot_be_run_is_named(command, cwd, data, error, message):
    agent = AgentProgram(command, reward=everything, cwd=cwd)
    with pytest.raises(error, match=message):
        run(agent, data)


def test_of_a_long_output_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(module, "_STDOUT_BYTES", 1000)
    code = "for i in range(100000): print(i)"
    (*_, stdout) = run(AgentProgram(python(code), reward=everything))
    assert stdout == "".join(f"{i}\n" for i in range(100000))[-1000:]


# How it ends


def test_time_that_runs_out_rejects_the_episode():
    agent = AgentProgram(["sleep", "1000"], reward=lambda *_: pytest.fail("judged"), timeout=0.05)
    with pytest.raises(ProgramTimeoutError, match=r"longer than timeout=0\.05 sec") as caught:
        run(agent)
    assert isinstance(caught.value, Rejected)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.cause == "program_timeout"


LEAVES = """
import os, signal, subprocess, sys
{ignore}
child = subprocess.Popen(["sleep", "1000"])
with open({file!r}, "w") as file:
    file.write(f"{{child.pid}}\\n")
{then}
"""


def leaves(file, then="", ignore=""):
    """A program that has a child, which holds its output open."""
    return python(LEAVES.format(file=str(file), then=then, ignore=ignore))


IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.slow
@pytest.mark.parametrize("ignore", ["", IGNORE])
@pytest.mark.parametrize("how", ["ends", "times out", "is cancelled", "is judged wrongly"])
async def test_a_program_ends_with_all_its_processes(tmp_path, short_grace, how, ignore):
    file = tmp_path / "pid"
    hangs = how in ("times out", "is cancelled")

    def judge(*args):
        if how == "is judged wrongly":
            raise ZeroDivisionError
        return "judged"

    agent = AgentProgram(
        leaves(file, "print(7); child.wait()" if hangs else "print(7)", ignore),
        reward=judge,
        timeout=3.0 if how == "times out" else None,
    )

    task = asyncio.ensure_future(play(agent))
    if how == "is cancelled":
        await asyncio.to_thread(pid_in, file)
        task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1
    errors = {"times out": ProgramTimeoutError, "is judged wrongly": ZeroDivisionError}
    errors["is cancelled"] = asyncio.CancelledError
    assert result == "judged" if how == "ends" else type(result) is errors[how]
    pid = pid_in(file)
    wait_until(lambda: not lives(pid))


OUTSIDE = """
import subprocess
child = subprocess.Popen(["sh", "-c", {script!r}], start_new_session=True)
with open({file!r}, "w") as file:
    file.write(f"{{child.pid}}\\n")
print(7, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "seconds", "said"),
    [("exec sleep 1000", 0.05, "7\n"), ("sleep 0.2; echo late", PATIENCE, "7\nlate\n")],
)
async def test_output_that_a_process_outside_holds_open_is_waited_for_a_while(
    monkeypatch, tmp_path, script, seconds, said
):
    monkeypatch.setattr(module, "_OUTPUT_SECONDS", seconds)
    file = tmp_path / "pid"
    code = OUTSIDE.format(script=script, file=str(file))

    before = file_descriptors()
    (*_, stdout) = await play(AgentProgram(python(code), reward=everything))
    assert stdout == said
    await asyncio.sleep(0)
    assert file_descriptors() == before
    if lives(pid_in(file)):
        os.kill(pid_in(file), signal.SIGKILL)


@pytest.mark.slow
def test_a_closed_loop_leaves_no_program(tmp_path, short_grace):
    """Not even if it closes while the program is being ended."""
    file = tmp_path / "pid"
    thread = LoopThread("test")
    agent = AgentProgram(leaves(file, "child.wait()", IGNORE), reward=everything)
    asyncio.run_coroutine_threadsafe(play(agent), thread.loop)
    pid = pid_in(file)
    thread.close(0.0)
    wait_until(lambda: not lives(pid))
    wait_until(lambda: not module._running)


ENDS = """
import asyncio, sys, threading
from tests.agents.test_program import AgentProgram, everything, leaves, pid_in, play
agent = AgentProgram(leaves({file!r}, "child.wait()", {ignore!r}), reward=everything)
threading.Thread(target=asyncio.run, args=[play(agent)], daemon=True).start()
print(pid_in({path}))
sys.exit(0)
"""


@pytest.mark.slow
def test_a_program_ends_with_the_interpreter(tmp_path):
    file, root = tmp_path / "pid", Path(__file__).parents[2]
    path = f"__import__('pathlib').Path({str(file)!r})"
    command = [sys.executable, "-c", ENDS.format(file=str(file), ignore=IGNORE, path=path)]
    pid = int(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout)
    wait_until(lambda: not lives(pid))


@pytest.mark.slow
def test_many_programs_at_once_that_misbehave(tmp_path, short_grace):
    kinds = {
        "hangs": python("import time; time.sleep(1000)"),
        "hangs on": python(f"import signal, time; {IGNORE}; time.sleep(1000)"),
        "crashes": python("import os; os.abort()"),
        "leaves": None,
        "shouts": python("import sys; [sys.stdout.write('x' * 1000) for _ in range(10_000)]"),
        "is deaf": python("import os, time; os.close(0); time.sleep(0.05)"),
        "is closed": python("import os; [os.close(k) for k in (0, 1, 2)]"),
        "is fine": ["cat"],
        "is fine, too": ["true"],
        "is unknown": ["no-such-program"],
    }
    agents, files = [], []
    for k in range(30):
        name, command = list(kinds.items())[k % len(kinds)]
        if command is None:
            files.append(tmp_path / f"{k}")
            command = leaves(files[-1])
        timeout = 5.0 if "hangs" in name else PATIENCE
        agents.append((name, AgentProgram(command, reward=everything, timeout=timeout)))
    data = {"text": "y" * 1_000_000}

    async def main():
        results = await asyncio.gather(
            *(play(agent, data) for _, agent in agents), return_exceptions=True
        )
        assert len(asyncio.all_tasks()) == 1
        return results

    for (name, _), result in zip(agents, asyncio.run(main()), strict=True):
        if "hangs" in name:
            assert isinstance(result, ProgramTimeoutError)
        elif name == "is unknown":
            assert isinstance(result, FileNotFoundError)
        else:
            _, _, returncode, stdout = result
            assert returncode == (-6 if name == "crashes" else 0)
            if name == "shouts":
                assert stdout == "x" * module._STDOUT_BYTES
            if name == "is fine":
                assert json.loads(stdout) == data
    for file in files:
        pid = pid_in(file)
        wait_until(lambda pid=pid: not lives(pid))
