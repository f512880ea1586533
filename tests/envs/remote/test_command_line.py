"""``python -m torchrl_mt.envs.serve``: what a shell sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_mt.envs import OpenEnvEnv, serve
from torchrl_mt.envs.serve.__main__ import TOKEN_VARIABLE, main

pytest.importorskip("websockets")
HERE = "tests.envs.remote.served_envs:"
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_and_ends_with_its_environments_closed(stop, tmp_path):
    command = [sys.executable, "-m", "torchrl_mt.envs.serve", HERE + "Marked"]
    command += ["--max-sessions", "1"]
    environment = {**os.environ, TOKEN_VARIABLE: "secret", "MARK": str(tmp_path / "closed")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    url = process.stdout.readline().strip()

    async def play():
        with pytest.raises(Exception, match="status 401"):
            await OpenEnvEnv(url).reset()
        env = OpenEnvEnv(url, headers={"Authorization": "Bearer secret"})
        await env.reset()
        assert not (await env.step("a")).done
        process.send_signal(stop)
        await env._session._connection.wait_closed()

    asyncio.run(play())
    _, errors = process.communicate()
    assert process.returncode == 0
    assert errors == ""
    assert (tmp_path / "closed").exists()


@pytest.fixture
def signals():
    """What the command line does with signals is undone."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["Echo"], "make_env must be named as package.module:make_env"),
        ([HERE + "Nothing"], "was imported but has no 'Nothing'"),
        (["no.such.module:Echo"], "No module named 'no'"),
        ([HERE + "END"], "make_env must be the class of a TextEnv"),
        ([HERE + "Echo", "--host", "0.0.0.0"], "token must be given"),
        ([HERE + "Echo", "--token", ""], "token must have ASCII characters"),
        ([HERE + "Echo", "--allowed-ip", "home"], "allowed_ips must be a list"),
        ([HERE + "Echo", "--port", "x"], "invalid int value"),
        ([HERE + "Echo", "--max-sessions", "0"], "max_sessions must be"),
        ([], "make_env"),
    ],
)
def test_what_cannot_be_served_is_named(arguments, why, capsys, signals):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_the_function_is_not_hidden_by_the_program():
    import torchrl_mt.envs.serve  # noqa: F401 - it has the same name
    from torchrl_mt.envs import serve as imported

    assert imported is serve
    assert callable(imported)
