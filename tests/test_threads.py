"""Blocking calls beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from functools import partial

import pytest

from tests.waiting import until
from torchrl_mt.threads import call_in_thread

seen: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


async def test_a_call_sees_the_context_it_was_made_in():
    async def call(k):
        seen.set(k)
        return await call_in_thread(seen.get)

    assert await asyncio.gather(*map(call, range(20))) == list(range(20))
    assert seen.get() == 0


async def test_hung_calls_hold_up_no_other():
    go_on = threading.Event()
    hung = [asyncio.ensure_future(call_in_thread(go_on.wait)) for _ in range(50)]
    results = await asyncio.gather(*(call_in_thread(lambda k=k: k) for k in range(200)))
    assert not any(task.done() for task in hung)
    go_on.set()
    await asyncio.gather(*hung)
    assert results == list(range(200))


async def test_what_nobody_waits_for_any_more_is_handed_to_somebody():
    go_on, late = threading.Event(), []
    wait = partial(call_in_thread, lambda: go_on.wait() and 5, unclaimed=late.append)
    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not late
    go_on.set()
    await until(lambda: late)
    assert late == [5]


async def test_what_arrives_together_with_the_cancellation_is_not_lost():
    late = []
    task = asyncio.ensure_future(call_in_thread(lambda: 5, unclaimed=late.append))
    await asyncio.sleep(0)
    # Cancelled in the very iteration in which the result has been set.
    while not (waits_for := task._fut_waiter).done():
        await asyncio.sleep(0)
    assert waits_for is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: late)
    assert late == [5]
