"""cua-bench's own server: what its environments are told, and what they answer."""

from __future__ import annotations

import asyncio
import base64
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bridges.cua_bench.fake_worker import acting, png
from tests.bridges.cua_bench.test_actions import actions
from tests.served_app import served_app
from tests.tiers import examples
from tests.waiting import wait_until
from torchrl_mt.bridges.cua_bench import ComputerEnv
from torchrl_mt.bridges.cua_bench.computer import server_form

worker_server = pytest.importorskip(
    "cua_bench.workers.worker_server", reason="cua-bench is not installed"
)
pytest.importorskip("uvicorn")


@given(actions, st.integers(1, 4000), st.integers(1, 4000))
@examples(250, few=20)
def test_its_actions_are_ours(action, width, height):
    """The reference reads the arguments one by one."""
    if action.name == "call_user":
        return
    read = worker_server.deserialize_action(server_form(action, (width, height)))
    given = action.arguments

    def pixel(name, size):
        return min(int(given[name] * size), size - 1)

    at = {"x": pixel("x", width), "y": pixel("y", height)} if "x" in given else {}
    expected = {
        "click": ("ClickAction", at),
        "left_double": ("DoubleClickAction", at),
        "right_single": ("RightClickAction", at),
        "hotkey": ("HotkeyAction", {"keys": given.get("keys")}),
        "key": ("KeyAction", {"key": given.get("key")}),
        "type": ("TypeAction", {"text": given.get("text")}),
        "scroll": (
            "ScrollAction",
            {"direction": given.get("direction"), "amount": given.get("amount", 100)},
        ),
        "wait": ("WaitAction", {"seconds": given.get("seconds", 1.0)}),
        "done": ("DoneAction", {}),
    }
    if action.name == "drag":
        to = {"to_x": pixel("x2", width), "to_y": pixel("y2", height)}
        expected["drag"] = (
            "DragAction",
            {"from_x": at["x"], "from_y": at["y"], **to, "duration": 1.0},
        )
    assert (type(read).__name__, dataclasses.asdict(read)) == expected[action.name]


class Desktop:
    """What cua-bench's server plays with: it remembers its actions."""

    def __init__(self):
        self.actions, self.closed = [], False

    async def reset(self, task_id):
        self.task = task_id
        return self.screen(), {"description": f"task{task_id}"}

    async def step(self, action):
        self.actions.append(action)
        return self.screen()

    def screen(self):
        return base64.b64decode(png(200, 100, len(self.actions)))

    async def evaluate(self):
        return [0.25 * len(self.actions)]

    async def close(self):
        self.closed = True


@pytest.fixture
def served(monkeypatch):
    """The address of a server, and the desktops that it made."""
    made = []

    def make(env_path, split):
        made.append(Desktop())
        return made[-1]

    monkeypatch.setattr(worker_server, "make", make)
    with served_app(worker_server.app, timeout_graceful_shutdown=5) as url:
        yield url, made


def test_an_episode_on_its_server(served):
    url, made = served
    written = acting("click(500, 250)", "type('a, b')", "scroll(0.5, 0.5, down)")

    async def main():
        env = ComputerEnv(url, [{"env_path": "./task", "task_index": 2}], max_step=2)
        (opening,) = await env.reset(0)
        assert opening["content"][0]["text"].startswith("task2\n\n")
        assert opening["content"][1]["image"].endswith(png(200, 100, 0))
        step = await env.step(written)
        assert step.messages[0]["content"][0]["image"].endswith(png(200, 100, 3))
        last = await env.step("oh")
        assert (last.reward, last.truncated) == (1.0, True)
        await env.reset(0)  # The next one is given up.
        await env.close()

    asyncio.run(main())
    first, second = made
    shown = [repr(action) for action in first.actions]
    assert shown == [
        "ClickAction(x=100, y=25)",
        "TypeAction(text='a, b')",
        "ScrollAction(direction='down', amount=100)",
        "DoneAction()",
    ]
    assert second.actions == []
    wait_until(lambda: first.closed and second.closed)
    assert worker_server.active_envs == []
