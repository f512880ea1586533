"""``sys.exit()`` and ``KeyboardInterrupt`` from within: each is a failure of one episode."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import pytest

from tests.collectors.runs import collecting, failed_run, first_batch, played_to_the_end
from tests.tiers import first_fast
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits
from torchrl_mt.collectors.event_loop import loop_thread
from torchrl_mt.envs import TextEnv, TextStep

LONG = 3600.0
LIMITS = {
    "all": Limits(tool_timeout=LONG, turn_timeout=LONG, episode_timeout=LONG),
    "none": None,
    "tool_timeout": Limits(tool_timeout=LONG),
    "turn_timeout": Limits(turn_timeout=LONG),
    "episode_timeout": Limits(episode_timeout=LONG),
}


@pytest.fixture(autouse=True, scope="module")
def quick_collection():
    """Of this module's garbage alone: there is a lot else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def errors_are_looked_at(caplog):
    yield
    gc.collect()
    assert "never retrieved" not in caplog.text
    caplog.clear()
    gc.collect()


def leave(error):
    if error == "SystemExit":
        sys.exit(3)
    raise KeyboardInterrupt


async def tool(error):
    await asyncio.sleep(0)
    if error:
        leave(error)


async def tools(error):
    """Several at once, one of which leaves."""
    await asyncio.gather(*(tool(error if k == 1 else None) for k in range(3)))


class Plain(TextEnv):
    """Leaves in the method that its item names; plain methods."""

    def reset(self, data=None):
        self.data = data
        self.leave_in("reset")
        return [{"role": "user", "content": "1"}]

    def step(self, response):
        self.leave_in("step")
        return TextStep(reward=1.0, done=True)

    def close(self):
        self.leave_in("close")

    def leave_in(self, where):
        if self.data["where"] == where:
            leave(self.data["error"])


class Inline(Plain):
    inline = True


class Async(TextEnv):
    """The same with methods that are awaited."""

    async def reset(self, data=None):
        self.data = data
        await self.leave_in("reset")
        return [{"role": "user", "content": "1"}]

    async def step(self, response):
        await self.leave_in("step")
        return TextStep(reward=1.0, done=True)

    async def close(self):
        await self.leave_in("close")

    async def leave_in(self, where):
        await tool(self.data["error"] if self.data["where"] == where else None)


class Gathers(Async):
    async def leave_in(self, where):
        await tools(self.data["error"] if self.data["where"] == where else None)


class Workflow:
    """Leaves before a call of the engine (``reset``) or after (``step``)."""

    async def arun_episode(self, engine, data):
        await self.leave_in("reset", data)
        await engine.generate([1, 2])
        await self.leave_in("step", data)
        return 1.0

    async def leave_in(self, where, data):
        await tool(data["error"] if data["where"] == where else None)


class GatheringWorkflow(Workflow):
    async def leave_in(self, where, data):
        await tools(data["error"] if data["where"] == where else None)


class TaskGroupWorkflow(Workflow):
    async def leave_in(self, where, data):
        task = asyncio.create_task(tool(data["error"] if data["where"] == where else None))
        await asyncio.wait_for(task, LONG)


CHATS = [Plain, Inline, Async, Gathers]
WORKFLOWS = [Workflow, GatheringWorkflow, TaskGroupWorkflow]
CASES = [(env, where) for env in CHATS for where in ("reset", "step", "close")]
CASES += [(env, where) for env in WORKFLOWS for where in ("reset", "step")]
ERRORS = [("SystemExit", None), ("KeyboardInterrupt", 1)]
"""And ``max_staleness``: the one and the other way to play, in turn."""


def items(where, error):
    return [{"k": k, "where": where if k % 3 == 1 else None, "error": error} for k in range(9)]


@pytest.mark.parametrize(("env", "where"), CASES)
@pytest.mark.parametrize("limits", first_fast(LIMITS))
def test_who_leaves_fails_its_own_episode(engine, limits, env, where, caplog):
    error, staleness = ERRORS[(CASES.index((env, where)) + list(LIMITS).index(limits)) % 2]
    options = {"cycle": False, "limits": LIMITS[limits], "max_staleness": staleness}
    with collecting(env, engine, items(where, error), n=3, **options) as collector:
        played = played_to_the_end(collector)
        stats = collector.stats()
    lost = 0 if where == "close" else 3
    assert sorted(played) == [k for k in range(9) if not lost or k % 3 != 1]
    assert (stats["started"], stats["accepted"], stats["running"]) == (9, 9 - lost, 0)
    assert stats.get(f"rejected/{error}", 0) == stats["rejected"] == lost
    names = [record.exc_info[0].__name__ for record in caplog.records if record.exc_info]
    assert names == [error]  # said once


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("limits", ["none", "all"])
@pytest.mark.parametrize("env", first_fast([Gathers, Plain, GatheringWorkflow]))
def test_an_evaluation_and_a_group_go_on_without_it(engine, env, limits, error):
    data, options = items("step", error), {"max_retries": 1, "limits": LIMITS[limits]}
    with collecting(env, engine, data, n=4, group_size=2, **options) as collector:
        batch = next(iter(collector))
        evaluated = collector.evaluate(data, n=2)
        stats = collector.stats()
    assert (len(batch), len(evaluated)) == (4, 12)
    assert stats["eval/rejected"] == stats[f"eval/rejected/{error}"] == 12  # each tried twice


@pytest.mark.parametrize("limits", ["none", "all"])
def test_a_run_that_can_only_leave_stops(engine, limits):
    data = [{"where": "step", "error": "SystemExit"}]
    options = {"n": 4, "limits": LIMITS[limits], "max_consecutive_failures": 8}
    cause, _ = failed_run("8 episodes in a row", Async, engine, data, **options)
    assert isinstance(cause, SystemExit)


@pytest.mark.parametrize("staleness", [None, 1])
def test_data_that_leaves_is_heard_of(engine, staleness):
    def data():
        yield {"where": None}
        sys.exit(3)

    with pytest.raises(SystemExit):
        first_batch(Inline, engine, data(), n=2, max_staleness=staleness)


def test_a_loop_goes_on_whatever_its_tasks_raise():
    thread = loop_thread.LoopThread("test")

    async def leaves(how):
        await asyncio.sleep(0)
        if how == "stop":
            asyncio.get_running_loop().stop()
            return
        asyncio.get_running_loop().call_soon(leave, how)  # in nobody's task

    for how in ["SystemExit", "KeyboardInterrupt", "stop"] * 20:
        thread.run(leaves(how))
        for error in (SystemExit, KeyboardInterrupt):
            with pytest.raises(error):
                thread.run(tools(error.__name__))
    assert thread.run(asyncio.sleep(0, result=5)) == 5
    assert thread.close()
    wait_until(lambda: "test" not in {each.name for each in threading.enumerate()})


torn = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""What a loop that ends by itself was doing is torn down with it."""


class Broken(BaseException):
    """What nothing that plays an episode catches."""


@torn
def test_who_waits_for_a_loop_that_has_ended_gets_an_error(caplog):
    thread = loop_thread.LoopThread("test")
    loop = thread.loop

    async def waits():
        loop.call_soon(fail)
        await asyncio.Event().wait()

    def fail():
        def select(timeout=None):
            raise Broken("selector")

        loop._selector.select = select

    for coroutine in (waits(), asyncio.sleep(0)):
        with pytest.raises(loop_thread.LoopClosedError, match="Broken: selector") as caught:
            thread.run(coroutine)
        assert isinstance(caught.value.__cause__, Broken)
    assert thread.close()
    assert "the event loop's thread has ended" in caplog.text


def test_a_collector_whose_loop_has_ended_says_so(engine, monkeypatch):
    error = loop_thread.LoopClosedError("the loop has ended")
    error.__cause__ = Broken("selector")
    with collecting(Inline, engine, [{"where": None}], n=2) as collector:
        with monkeypatch.context() as broken:
            broken.setattr(collector._thread._served, "refusal", error)
            for call in (
                lambda: next(collector.iterator()),
                lambda: collector.evaluate([{"where": None}]),
                lambda: collector.set_seed(3) and collector.load_state_dict(collector.state_dict()),
            ):
                with pytest.raises(RuntimeError, match="has ended: make a new collector") as caught:
                    call()
                assert isinstance(caught.value.__cause__, Broken)
        assert len(next(collector.iterator())) == 2
