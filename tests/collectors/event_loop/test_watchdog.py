"""What blocks the event loop of the episodes is said, wherever it is."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from urllib.parse import urlsplit

import pytest

from tests.collectors.chats import Once
from tests.collectors.runs import collecting
from tests.waiting import wait_until
from torchrl_mt.collectors.event_loop import watchdog
from torchrl_mt.collectors.event_loop.loop_thread import LoopThread


@pytest.fixture
def gate(monkeypatch):
    """What blocks waits until this is set. The watchdog looks often."""
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    gate = threading.Event()
    yield gate
    gate.set()


ASK = {"messages": [{"role": "user", "content": "1"}]}


def blocks_in_agent(gate):
    class Agent:
        async def run(self, data, *, base_url, api_key, http_client):
            gate.wait()
            (await http_client.post("/chat/completions", json=ASK)).raise_for_status()
            return 1.0

    return {"env": Agent()}


def blocks_in_workflow(gate):
    class Workflow:
        async def arun_episode(self, engine, data):
            gate.wait()
            await engine.generate([5])
            return 1.0

    return {"env": Workflow()}


def blocks_in_environment(gate):
    class Blocks(Once):
        inline = False

        async def step(self, response):
            gate.wait()
            return super().step(response)

    return {"env": Blocks}


def blocks_in_callable(gate):
    async def accept(episode):
        gate.wait()
        return True

    return {"env": Once, "accept": accept}


def then(said, caplog, act):
    """Act in a thread once the log says it; return the thread."""

    def wait():
        wait_until(lambda: said in caplog.text)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "block", [blocks_in_agent, blocks_in_workflow, blocks_in_environment, blocks_in_callable]
)
def test_it_is_said_with_the_stack(block, gate, engine, caplog):
    with collecting(engine=engine, **block(gate)) as made:
        waiting = then("gate.wait()", caplog, gate.set)
        next(iter(made))
        waiting.join()
    assert "something blocks the event loop of the thread torchrl_mt-rollout" in caplog.text


def test_a_blocking_client_that_asks_the_collectors_own_server_is_said(gate, engine, caplog):
    opened = []

    class Agent:
        async def run(self, data, *, base_url, api_key, http_client):
            client = http.client.HTTPConnection(urlsplit(base_url).netloc)
            client.connect()
            opened.append(client.sock)
            client.request("GET", "/health")
            client.getresponse()  # For ever: the server is in this thread.

    with collecting(Agent(), engine, max_consecutive_failures=1) as made:
        then("client.getresponse()", caplog, lambda: opened[0].shutdown(socket.SHUT_RDWR))
        with pytest.raises(RuntimeError, match="RemoteDisconnected"):
            next(iter(made))
    assert "asks the collector's own server from here waits for itself for ever" in caplog.text


def test_once_per_block(caplog):
    caplog.set_level(logging.WARNING)
    thread, gate, entered = LoopThread("watched"), threading.Event(), threading.Event()
    dog = watchdog.Watchdog(thread.loop, thread._thread)

    async def nothing():
        pass

    for number in range(1, 3):
        entered.clear(), gate.clear()
        thread.loop.call_soon_threadsafe(lambda: (entered.set(), gate.wait()))
        entered.wait()
        for _ in range(watchdog._MOST_LOOKS):
            dog.look()
        assert caplog.text.count("blocks the event loop") == number - 1
        for _ in range(20):
            dog.look()
        assert caplog.text.count("blocks the event loop") == number
        gate.set()
        thread.run(nothing())
    for _ in range(20):  # A loop that answers is not blocked.
        dog.look()
        thread.run(nothing())
    assert caplog.text.count("blocks the event loop") == 2
    thread.close()
