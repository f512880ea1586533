"""``sys.exit()`` and ``KeyboardInterrupt`` from within: each is a failure of one episode."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading

import pytest

from tests.tiers import first_fast
from tests.waiting import wait_until
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.collectors.event_loop import loop_thread
from torchrl_mt.envs import TextEnv, TextStep

BOUND = 300.0
"""Seconds after which a collector that hangs is left behind, so that it fails its test alone."""
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


def bounded(function):
    """What the function returns, in a thread that the suite does not wait for should it hang."""
    outcome = []

    def work():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(BOUND)
    assert not thread.is_alive(), "it hangs"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


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


def items(where, error):
    return [{"k": k, "where": where if k % 3 == 1 else None, "error": error} for k in range(9)]


@pytest.mark.parametrize(("error", "staleness"), [("SystemExit", None), ("KeyboardInterrupt", 1)])
@pytest.mark.parametrize(("env", "where"), CASES)
@pytest.mark.parametrize("limits", first_fast(LIMITS))
def test_who_leaves_fails_its_own_episode(engine, limits, env, where, error, staleness, caplog):
    def play():
        with MultiTurnCollector(
            *(env, engine, items(where, error)),
            episodes_per_batch=3,
            options=CollectorOptions(cycle=False),
            limits=LIMITS[limits],
            max_staleness=staleness,
        ) as collector:
            played = []
            for batch in collector:
                played += [item["k"] for item in batch["data"]]
                engine.update_weights(None)
            return sorted(played), collector.stats()

    played, stats = bounded(play)
    lost = 0 if where == "close" else 3
    assert played == [k for k in range(9) if not lost or k % 3 != 1]
    assert (stats["started"], stats["accepted"], stats["running"]) == (9, 9 - lost, 0)
    assert stats.get(f"rejected/{error}", 0) == stats["rejected"] == lost
    names = [record.exc_info[0].__name__ for record in caplog.records if record.exc_info]
    assert names == [error]  # said once


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
@pytest.mark.parametrize("limits", ["none", "all"])
@pytest.mark.parametrize("env", first_fast([Gathers, Plain, GatheringWorkflow]))
def test_an_evaluation_and_a_group_go_on_without_it(engine, env, limits, error):
    def play():
        with MultiTurnCollector(
            *(env, engine, items("step", error)),
            episodes_per_batch=4,
            group_size=2,
            max_retries=1,
            limits=LIMITS[limits],
        ) as collector:
            batch = next(iter(collector))
            evaluated = collector.evaluate(items("step", error), n=2)
            return batch, evaluated, collector.stats()

    batch, evaluated, stats = bounded(play)
    assert (len(batch), len(evaluated)) == (4, 12)
    assert stats["eval/rejected"] == stats[f"eval/rejected/{error}"] == 12  # each tried twice


@pytest.mark.parametrize("limits", ["none", "all"])
def test_a_run_that_can_only_leave_stops(engine, limits):
    def play():
        with MultiTurnCollector(
            *(Async, engine, [{"where": "step", "error": "SystemExit"}]),
            episodes_per_batch=4,
            limits=LIMITS[limits],
            max_consecutive_failures=8,
        ) as collector:
            next(iter(collector))

    with pytest.raises(RuntimeError, match="8 episodes in a row") as caught:
        bounded(play)
    assert isinstance(caught.value.__cause__, SystemExit)


@pytest.mark.parametrize("staleness", [None, 1])
def test_data_that_leaves_is_heard_of(engine, staleness):
    def data():
        yield {"where": None}
        sys.exit(3)

    def play():
        with MultiTurnCollector(
            Inline, engine, data(), episodes_per_batch=2, max_staleness=staleness
        ) as collector:
            next(iter(collector))

    with pytest.raises(SystemExit):
        bounded(play)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_accept_that_leaves_rejects_its_episode(engine, is_async):
    def accept(episode):
        if episode["data"][0]["k"] % 3 == 1:
            sys.exit(3)
        return True

    async def accept_later(episode):
        return accept(episode)

    def play():
        with MultiTurnCollector(
            *(Inline, engine, items(None, None)),
            episodes_per_batch=3,
            options=CollectorOptions(cycle=False),
            accept=accept_later if is_async else accept,
        ) as collector:
            return sum(map(len, collector)), collector.stats()

    played, stats = bounded(play)
    assert (played, stats["rejected/SystemExit"]) == (6, 3)


def test_a_loop_goes_on_whatever_its_tasks_raise():
    thread = loop_thread.LoopThread("test")

    async def leaves(how):
        await asyncio.sleep(0)
        if how == "stop":
            asyncio.get_running_loop().stop()
            return
        asyncio.get_running_loop().call_soon(leave, how)  # in nobody's task

    def play():
        for how in ["SystemExit", "KeyboardInterrupt", "stop"] * 20:
            thread.run(leaves(how))
            for error, name in ((SystemExit, "SystemExit"), (KeyboardInterrupt,) * 2):
                with pytest.raises(error):
                    thread.run(tools(name if isinstance(name, str) else name.__name__))
        assert thread.run(asyncio.sleep(0, result=5)) == 5
        return thread.close()

    assert bounded(play)
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

    def play():
        for coroutine in (waits(), asyncio.sleep(0)):
            with pytest.raises(loop_thread.LoopClosedError, match="Broken: selector") as caught:
                thread.run(coroutine)
            assert isinstance(caught.value.__cause__, Broken)
        return thread.close()

    assert bounded(play)
    assert "the event loop's thread has ended" in caplog.text


def test_a_collector_whose_loop_has_ended_says_so(engine, monkeypatch):
    error = loop_thread.LoopClosedError("the loop has ended")
    error.__cause__ = Broken("selector")
    with MultiTurnCollector(Inline, engine, [{"where": None}], episodes_per_batch=2) as collector:
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
