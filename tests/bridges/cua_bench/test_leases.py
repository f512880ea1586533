"""A server has one holder at a time, whoever asks on whatever loop, and however holders end."""

from __future__ import annotations

import asyncio
import random
from uuid import uuid4

import pytest

from tests.bridges.cua_bench.held_servers import taken
from tests.tiers import few_or_many
from tests.waiting import in_thread
from torchrl_mt import server_load
from torchrl_mt.bridges.cua_bench import leases
from torchrl_mt.bridges.cua_bench.leases import lease


@pytest.fixture
def servers():
    return [f"http://{uuid4()}" for _ in range(3)]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert taken() == set()
    assert leases._waiting == []
    leases._loads.clear()


async def failing(servers, failed=True):
    """Take a server and end its lease as a failure."""
    held = await lease(servers)
    held.failed = failed
    held.end()
    return held.server


async def holds(servers, held, counts, seed):
    """Hold a server a few times; cancelled, dropped or ended, as the seed says."""
    rng = random.Random(seed)
    for _ in range(5):
        some = rng.sample(servers, rng.randint(1, len(servers)))
        task = asyncio.ensure_future(lease(some))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.002)
            task.cancel()
        try:
            got = await task
        except asyncio.CancelledError:
            continue
        assert got.server in some
        assert got.server not in held
        held.add(got.server)
        counts.append(got.server)
        await asyncio.sleep(rng.random() * 0.001)
        held.discard(got.server)
        got.failed = rng.choice([None, False, True])
        if rng.random() < 0.7:
            got.end()
            got.end()
        del got, task


@few_or_many(4, 10)
def test_a_server_has_one_holder_in_all_threads(servers, examples, monkeypatch):
    monkeypatch.setattr(leases, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(leases, "_LONGEST_PAUSE", 0.002)
    held, counts = set(), []

    async def many(seed):
        await asyncio.gather(
            *(holds(servers, held, counts, seed * 100 + i) for i in range(examples))
        )

    ended = [in_thread(lambda seed: asyncio.run(many(seed)), seed) for seed in range(3)]
    assert [outcome() for outcome in ended] == [None] * 3
    assert set(counts) == set(servers)


async def test_who_comes_first_is_served_first_and_servers_take_turns(servers):
    held = [await lease(servers) for _ in servers]
    assert [one.server for one in held] == servers
    waiting = [asyncio.ensure_future(lease(servers)) for _ in range(4)]
    await asyncio.sleep(0)
    picky = asyncio.ensure_future(lease(servers[2:]))
    await asyncio.sleep(0)
    waiting[1].cancel()
    held[1].end()
    held[0].end()
    got = [await waiting[0], await waiting[2]]
    assert [one.server for one in got] == servers[:2]
    held[2].end()
    last = await waiting[3]
    assert last.server == servers[2]
    assert not picky.done()
    last.end()
    (await picky).end()
    got[1].end()
    got[0].end()
    taken_first = await lease(servers)
    assert taken_first.server == servers[0]
    taken_first.end()


def test_a_waiter_whose_loop_is_closed_keeps_no_server(servers):
    loop = asyncio.new_event_loop()

    async def main():
        held = await lease(servers[:1])
        waiting = loop.create_task(lease(servers[:1]))
        return held, waiting

    held, waiting = loop.run_until_complete(main())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    held.end()
    assert asyncio.run(lease(servers)).server == servers[1]
    assert asyncio.run(lease(servers[:1])).server == servers[0]
    waiting._log_destroy_pending = False
    with pytest.raises(GeneratorExit):
        waiting.get_coro().throw(GeneratorExit)


# ---- servers that failed ------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The clock of pauses, which stands still."""
    now = [1000.0]
    monkeypatch.setattr(server_load, "monotonic", lambda: now[0])
    return now


async def test_a_server_that_failed_comes_last_and_not_before_its_pause_is_over(servers, clock):
    assert await failing(servers) == servers[0]
    held = [await lease(servers) for _ in servers[1:]]
    assert [one.server for one in held] == servers[1:]
    waiting = asyncio.ensure_future(lease(servers))
    await asyncio.sleep(0)
    assert not waiting.done()
    held[0].end()
    assert (await waiting).server == servers[1]
    clock[0] += 1.0
    held[1].end()
    first, second = await lease(servers), await lease(servers)
    assert (first.server, second.server) == (servers[2], servers[0])
    for one in (waiting.result(), first, second):
        one.end()


async def test_pauses_double_to_a_minute_and_a_success_ends_them(servers, clock):
    seconds = []
    for _ in range(8):
        await failing(servers[:1])
        load = leases._loads[servers[0]]
        seconds.append(load.away_until - clock[0])
        clock[0] += 100.0
    assert seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    await failing(servers[:1], failed=None)
    assert load.pause == 60.0
    await failing(servers[:1], failed=False)
    assert load.away_until == 0.0
    await failing(servers[:1])
    assert load.away_until == clock[0] + 1.0


async def test_if_all_failed_the_one_whose_pause_ends_first_is_tried_at_once(servers, clock):
    assert [await failing(servers) for _ in servers] == servers
    assert await failing(servers) == servers[0]
    assert [await failing(servers) for _ in servers[1:]] == servers[1:]
    # A waiter whose last sound server fails gets the other at once.
    clock[0] += 100.0
    await failing(servers[:1])
    held = await lease(servers[1:2])
    waiting = asyncio.ensure_future(lease(servers[:2]))
    await asyncio.sleep(0)
    held.failed = True
    held.end()
    got = await waiting
    assert got.server == servers[0]
    got.end()


@pytest.mark.parametrize("fails_later", [False, True])
async def test_a_waiter_gets_a_server_when_its_pause_is_over(servers, monkeypatch, fails_later):
    monkeypatch.setattr(leases, "_FIRST_PAUSE", 0.01)
    held = [await lease(servers[:1]), await lease(servers[1:2])]
    held[0].failed = True
    if not fails_later:
        held[0].end()
    waiting = [asyncio.ensure_future(lease(servers[:2])) for _ in range(2)]
    await asyncio.sleep(0)
    held[0].end()
    first = await waiting[0]
    assert first.server == servers[0]
    assert not waiting[1].done()
    first.end()
    for one in (await waiting[1], held[1]):
        one.end()
