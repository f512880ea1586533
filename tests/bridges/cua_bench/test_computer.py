"""The protocol of servers of computers: forms, faults, and what is left on a server."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from contextlib import closing

import pytest
from PIL import Image
from transformers.image_utils import load_image

from tests.bridges.cua_bench.fake_worker import FakeWorker, acting, png
from tests.bridges.cua_bench.held_servers import failing, taken
from tests.bridges.cua_bench.test_computer_env import env_on, executed, play
from tests.faulty_server import after, half, nothing, running, silent, status, success
from tests.idle_clock import LIMIT, Loop
from tests.waiting import wait_until
from torchrl_mt.bridges.cua_bench import ComputerError, leases, parse_actions
from torchrl_mt.bridges.cua_bench.computer import server_form

STEP = {"reward": 0.0, "done": False, "text": "screen"}


@pytest.fixture
def server():
    with running(FakeWorker()) as made:
        yield made
    assert taken() == set()
    leases._loads.clear()


def answered(handler):
    """No fault: the server's own answer."""
    handler.send(*handler.server.answer(handler.path, handler.server.seen[-1]))


async def step_and_close(env, response):
    """Play a step after a reset, and close the environment whatever happens."""
    try:
        await env.reset(0)
        return await env.step(response)
    finally:
        await env.close()


# ---- forms --------------------------------------------------------------------------------------


DRAG = {"type": "DragAction", "from_x": 0, "from_y": 50, "to_x": 100, "to_y": 99}
SCROLL = {"type": "ScrollAction", "direction": "up", "amount": 300, "x": 100, "y": 50}


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("click(0.5, 0.25)", {"type": "ClickAction", "x": 100, "y": 25}),
        ("left_double(1.0, 1.0)", {"type": "DoubleClickAction", "x": 199, "y": 99}),
        ("right_single(0, 999)", {"type": "RightClickAction", "x": 0, "y": 99}),
        ("drag(0, 0.5, 0.5, 1)", DRAG),
        ("hotkey(ctrl, c)", {"type": "HotkeyAction", "keys": ["ctrl", "c"]}),
        ("key(enter)", {"type": "KeyAction", "key": "enter"}),
        ("type('a, b')", {"type": "TypeAction", "text": "a, b"}),
        ("scroll(down)", {"type": "ScrollAction", "direction": "down", "amount": 100}),
        ("scroll(0.5, 0.5, up, 300)", SCROLL),
        ("wait()", {"type": "WaitAction", "seconds": 1.0}),
        ("wait(2.5)", {"type": "WaitAction", "seconds": 2.5}),
        ("done()", {"type": "DoneAction"}),
    ],
)
def test_forms_of_actions(written, form):
    (action,) = parse_actions(acting(written))
    assert server_form(action, (200, 100)) == form


# ---- observations -------------------------------------------------------------------------------


def screenshot(kind):
    """A screenshot that is no PNG of grey values."""
    file = io.BytesIO()
    Image.new("RGB", (321, 123), "red").save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({"screenshot": png(321, 123)}, (321, 123)),
        ({"screenshot": screenshot("PNG")}, (321, 123)),
        ({"screenshot": screenshot("JPEG")}, (321, 123)),
        ({"screenshot": "data:image/png;base64," + png(321, 123)}, (321, 123)),
        ({"screenshot": png(321, 123), "text": "tree", "width": 7, "height": 7}, (321, 123)),
        ({"screenshot": None, "text": "tree", "width": 321, "height": 123}, (321, 123)),
        ({"observation": {"role": "window"}}, (1920, 1080)),
        ({"text": ""}, (1920, 1080)),
    ],
)
def test_sizes_of_screens(said, size):
    with running(FakeWorker(lambda steps: said)) as server:
        opening, _ = play(env_on(server), [acting("click(0.999999, 0.999999)")])
    (form,) = executed(server)
    assert (form["x"] + 1, form["y"] + 1) == size
    content = opening[0]["content"]
    if said.get("screenshot"):
        encoded = said["screenshot"].rpartition(",")[2]
        kind = "jpeg" if encoded == screenshot("JPEG") else "png"
        assert content[-1]["image"] == f"data:image/{kind};base64,{encoded}"
        assert load_image(content[-1]["image"]).size == size
        assert ("tree" in content[0]["text"]) == ("text" in said)
    else:
        shown = '{"role": "window"}' if "observation" in said else said["text"]
        assert content.endswith(f"\n\n{shown}")


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (nothing, "RemoteProtocolError"),
        (half, "RemoteProtocolError"),
        (status(500, "no display"), "status 500: no display"),
        (status(503), "status 503"),
        (status(404), "status 404"),
        (success(b"{"), "the reply is no JSON"),
        (success([]), "the reply lacks what is read"),
        (success({**STEP, "text": None}), "no screenshot, text or observation"),
        (success({**STEP, "reward": float("nan")}), "reward must be a finite number, got nan"),
        (success({**STEP, "reward": True}), "reward must be a finite number, got True"),
        (success({**STEP, "done": "no"}), "done must be true or false, got 'no'"),
        (success({"done": False, "text": "a"}), "the reply lacks what is read: KeyError"),
        (success({**STEP, "screenshot": 3}), "screenshot must be a string in base64"),
        (success({**STEP, "screenshot": "a!"}), "screenshot must be in base64"),
        (success({**STEP, "screenshot": "aaaa"}), "screenshot must be a PNG or JPEG image"),
        (success({**STEP, "screenshot": png(1, 1)[:20]}), "screenshot must be a PNG or JPEG image"),
        (success({**STEP, "width": "3"}), "width and height must be positive, got 3 x None"),
    ],
)
def test_a_step_that_fails_is_sent_once_and_the_computer_is_released(server, fault, reason):
    server.faults = [answered, fault]
    with pytest.raises(ComputerError, match=r"POST http.*/step failed after 1 attempt: ") as caught:
        asyncio.run(step_and_close(env_on(server), acting("key(a)", "done()")))
    assert reason in str(caught.value)
    assert [sorted(body) for body in server.seen[1:]] == [["action", "env_id"], ["env_id"]]
    assert server.active == {}
    wait_until(lambda: server.open == 0)


def test_a_server_that_ignores_done_is_an_error(server):
    server.faults = [answered, success(STEP)]
    with pytest.raises(ComputerError, match="says that it is not done"):
        asyncio.run(step_and_close(env_on(server), acting("done()")))
    assert [path for path, _ in server.asked] == ["/reset", "/shutdown"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(500, "no such task"), "status 500: no such task"),
        (success({"text": "a", "env_id": 0}), "the reply lacks what is read: KeyError"),
        (success({"text": "a", "instruction": "a", "env_id": None}), "env_id must be a number"),
        (success({"text": "a", "instruction": 3, "env_id": 0}), "instruction must be a string"),
    ],
)
def test_a_reset_that_fails_leaves_nothing(server, fault, reason):
    server.faults = [fault]
    with pytest.raises(ComputerError, match="/reset failed after 1 attempt") as caught:
        asyncio.run(step_and_close(env_on(server), ""))
    assert reason in str(caught.value)
    assert [path for path, _ in server.asked] == ["/shutdown"]


def test_a_reset_waits_for_a_server_that_is_away(server, monkeypatch):
    monkeypatch.setattr("torchrl_mt.http_client._AWAY_PAUSE", 0.01)
    server.faults = [status(503), nothing, status(502)]
    play(env_on(server), [acting("done()")])
    assert len(server.played) == 1


@pytest.mark.parametrize(
    ("written", "seconds"), [("key(a)", LIMIT), ("wait()", LIMIT + 60), ("wait(60)", LIMIT + 60)]
)
def test_a_call_has_a_limit_besides_a_wait(server, written, seconds):
    with closing(Loop()) as loop:
        server.faults = [answered, after(lambda: loop.jump(LIMIT + 60), silent)]
        with pytest.raises(ComputerError, match=f"no reply within {seconds} seconds"):
            loop.run_until_complete(step_and_close(env_on(server, timeout=LIMIT), acting(written)))
    assert server.seen[0]["timeout"] == LIMIT
    assert server.active == {}


@pytest.mark.parametrize(
    "faults",
    [
        *([status(500)], [success([])]),
        *([answered, status(500)], [answered, nothing], [answered, answered, status(500)]),
    ],
)
def test_a_server_that_failed_is_set_aside_until_an_episode_has_no_fault(server, faults):
    server.faults = list(faults)
    with pytest.raises(ComputerError):
        asyncio.run(step_and_close(env_on(server), acting("key(a)")))
    assert server.url in failing()
    asyncio.run(step_and_close(env_on(server), acting("what is no action")))
    assert server.url not in failing()


@pytest.mark.parametrize("at", ["/reset", "/step"])
async def test_a_server_is_free_only_after_the_answer_to_a_cancelled_call(server, at):
    """What a server still does would otherwise hit the next episode."""
    gate = threading.Event()
    slow = after(gate.wait, answered)
    server.faults = [slow] if at == "/reset" else [answered, slow]

    async def seen(number):
        while len(server.seen) < number:
            await asyncio.sleep(0.001)

    async def step_and_wait(env):
        await env.reset(0)
        await env.step(acting("key(a)"))

    first, second = env_on(server), env_on(server)
    playing = asyncio.ensure_future(step_and_wait(first))
    await seen(1 if at == "/reset" else 2)
    following = asyncio.ensure_future(second.reset(1))
    playing.cancel()
    await asyncio.wait([playing])
    closing = asyncio.ensure_future(first.close())
    await asyncio.sleep(0.02)
    assert len(server.seen) == (1 if at == "/reset" else 2)
    gate.set()
    await closing
    await following
    await second.step(acting("done()"))
    await second.close()
    first_paths = ["/reset"] if at == "/reset" else ["/reset", "/step"]
    following_paths = ["/shutdown", "/reset", "/step"]
    assert [path for path, _ in server.asked] == first_paths + following_paths
    assert server.ended_by_reset == 0
    assert [task for task, _ in server.played] == [("./task", 1, "train")]


def test_a_close_that_is_cancelled_frees_the_server(server):
    server.faults = [answered, silent]

    async def main():
        env = env_on(server)
        await env.reset(0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step(acting("key(a)")), 0.02)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.close(), 0.02)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=None) if others else None

    asyncio.run(main())
    assert failing() == {server.url}  # It may still hang.
    wait_until(lambda: server.open == 0)
