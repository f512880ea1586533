"""Closing an environment: after its episode, beside the others, and in nobody's way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Transform

from tests.collectors.chats import Once
from tests.collectors.runs import balanced, beside, collecting, first_batch, run_of, said
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import LIMIT
from tests.tiers import first_fast
from tests.waiting import PATIENCE, ctrl_c, wait_until
from torchrl_mt.collectors import Limits, context
from torchrl_mt.collectors.event_loop import loop_thread
from torchrl_mt.collectors.event_loop.background_tasks import BackgroundTasks
from torchrl_mt.collectors.playing.env_factory import resolve


@pytest.fixture
def engine(tokenizer):
    return ScriptedEngine(
        tokenizer, lambda _: [tokenizer.convert_tokens_to_ids("8"), tokenizer.eos_token_id]
    )


@pytest.fixture
def hang():
    """What never returns, while the test lasts."""
    event = threading.Event()
    yield event.wait
    event.set()


@pytest.mark.parametrize("name", first_fast(["tool_timeout", "turn_timeout", "episode_timeout"]))
def test_a_hung_tool_of_a_chat_environment_costs_its_limit_and_no_more(
    engine, hang, name, idle_clock
):
    closed = threading.Event()

    class Hangs(Transform):
        def _step(self, tensordict, next_tensordict):
            with collector._thread.loop.hangs():
                hang()
            return next_tensordict

        def _reset(self, tensordict, tensordict_reset):
            return tensordict_reset

        def close(self):
            closed.set()

    env, limits = lambda: ChatEnv().append_transform(Hangs()), Limits(**{name: LIMIT}, max_turns=2)
    options = {"max_consecutive_failures": 1, "limits": limits}
    collector = collecting(env, engine, [{"query": "guess"}], **options)
    with pytest.raises(RuntimeError, match=name):
        next(iter(collector))
    assert collector.stats()[f"rejected/{name}"] == 1
    collector.shutdown()
    # Whoever made the collector wait is closed when it comes back.
    closed.clear()
    hang.__self__.set()
    assert closed.wait(PATIENCE)


NO_LIMIT = [Limits(), Limits(tool_timeout=LIMIT, turn_timeout=LIMIT), Limits(episode_timeout=LIMIT)]


@pytest.mark.parametrize("inner", ["thread", "async"])
@pytest.mark.parametrize("limits", first_fast(NO_LIMIT))
def test_a_close_that_hangs_holds_up_nothing(engine, hang, monkeypatch, caplog, limits, inner):
    class Hangs(Once):
        inline = False

        def close(self):
            if self.data["hangs"]:
                hang()

    class HangsAsync(Once):
        async def close(self):
            if self.data["hangs"]:
                await asyncio.Event().wait()

    env, data = Hangs if inner == "thread" else HangsAsync, [{"hangs": True}, {"hangs": False}]
    with collecting(env, engine, data, n=4, total_episodes=8, limits=limits) as collector:
        batches = list(collector)
        assert len(batches) == 2
        for batch in batches:
            assert set(batch["stop_reason"]) == {"done"}
            assert batch["next", "terminated"].all()
            assert (batch["next", "reward"] == 1).all()
        assert collector.stats()["rejected"] == 0
        background = BackgroundTasks.of(collector._thread.loop)
        wait_until(lambda: len(background.pending) == 4)  # the others have closed
        monkeypatch.setattr(loop_thread, "CLOSE_SECONDS", 0.2)
    assert said(caplog, "4 environments did not close within 0.2 seconds")


def test_shutdown_waits_for_a_close_as_long_as_it_is_told(engine, hang):
    class Hangs(Once):
        inline = False

        def close(self):
            hang()

    collector = collecting(Hangs, engine)
    next(iter(collector))
    with pytest.raises(TimeoutError, match=r"did not end within timeout=0\.1"):
        collector.shutdown(timeout=0.1)
    collector._thread._thread.join(PATIENCE)
    assert not collector._thread._thread.is_alive()


def test_a_close_is_waited_for_with_what_it_has_begun(engine):
    closed = []

    class Slow(Once):
        async def close(self):
            async def slowly():
                await asyncio.sleep(0.2)
                closed.append(context.get().task_id)

            await asyncio.gather(slowly(), asyncio.wait_for(slowly(), PATIENCE))

    data = [{"task_id": k} for k in range(3)]
    first_batch(Slow, engine, data, n=3)
    assert sorted(closed) == [0, 0, 1, 1, 2, 2]


def test_an_interrupt_lets_environments_close_with_what_they_have_begun(engine):
    hangs, closed = threading.Event(), []

    class Slow(Once):
        async def step(self, response):
            hangs.set()
            await asyncio.Event().wait()

        async def close(self):
            await asyncio.wait_for(asyncio.sleep(0.2), PATIENCE)
            closed.append(1)

    for kwargs in ({}, {"max_staleness": 1}):
        hangs.clear(), closed.clear()
        with collecting(Slow, engine, **kwargs) as collector:
            with ctrl_c(when=hangs.is_set), pytest.raises(KeyboardInterrupt):
                next(iter(collector))
            assert len(closed) == 1
            assert balanced(collector.stats(), running=0)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("error", [OSError("no sandbox"), SystemExit(3)])
def test_a_close_that_fails_is_logged_once_and_costs_nothing(engine, caplog, inline, error):
    class Fails(Once):
        def close(self):
            raise error

    Fails.inline = inline
    batches, stats = run_of(Fails, engine, n=4, total_episodes=8)
    assert sum(map(len, batches)) == stats["accepted"] == stats["started"] == 8
    (record,) = caplog.records
    assert "closing Fails failed" in record.message
    assert record.exc_info[1] is error


def test_an_environment_is_closed_where_the_tokenizer_cannot_talk(engine, hang):
    closed = threading.Event()

    class Closes(Once):
        def close(self):
            closed.set()

    def silent(*_, **__):
        raise OSError("no tokenizer")

    with collecting(lambda: Closes(), engine, max_consecutive_failures=1) as collector:
        collector._player._get_chat = silent
        with pytest.raises(RuntimeError, match="OSError: no tokenizer"):
            next(iter(collector))
    assert closed.is_set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("close", "said"),
    [
        (None, ["interrupted", "2", "down"]),
        ('print("closed ", end="")', ["closed", "closed", "interrupted", "2", "down"]),
        ("threading.Event().wait()", ["interrupted", "2"]),
    ],
)
def test_an_interrupt_gets_through_calls_that_never_return(close, said):
    """Also at the interpreter's end: in a process of its own, which must not hang either."""
    code = f"""
    import itertools, threading
    from tests.waiting import press_ctrl_c
    from torchrl_mt.collectors import MultiTurnCollector
    from torchrl_mt.collectors.event_loop import loop_thread
    from torchrl_mt.envs import TextEnv
    from torchrl_mt.testing import tiny_chat_tokenizer
    from tests.collectors.scripted import ScriptedEngine

    if {"down" not in said}:
        loop_thread.INTERRUPT_SECONDS = 0.5
    tokenizer = tiny_chat_tokenizer("guess 8")
    engine = ScriptedEngine(tokenizer, lambda _: [5, tokenizer.eos_token_id])
    calls = itertools.count(1)

    class Blocks(TextEnv):
        def reset(self, data=None):
            return [{{"role": "user", "content": "guess"}}]

        def step(self, response):
            if next(calls) == 2:
                threading.Thread(target=press_ctrl_c, daemon=True).start()
            threading.Event().wait()

    if {close is not None}:
        Blocks.close = lambda self: {close}
    collector = MultiTurnCollector(Blocks, engine, episodes_per_batch=2)
    try:
        next(iter(collector))
    except KeyboardInterrupt:
        print("interrupted", collector.stats()["rejected/cancelled"])
    if {"down" in said}:
        collector.shutdown()
        print("down")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == said


# Making


@pytest.mark.parametrize("how", ["factory", "copy", "slow copy", "class"])
def test_an_environment_is_made_beside_the_others(engine, how):
    """The loop goes on while one is made: another episode is played to its end meanwhile."""
    one, other = threading.Event(), threading.Event()
    made = []

    def make():
        if made:
            made.append(2)
            assert one.wait(PATIENCE)
        else:
            made.append(1)

    class Env(Once):
        inline = how == "slow copy"

        def __init__(self):
            if "copy" not in how:
                make()

        def __deepcopy__(self, memo):
            if other.is_set():
                make()
            else:
                time.sleep(0.02)
            return Env()

        def step(self, response):
            one.set()
            return super().step(response)

    env = {"factory": lambda: Env(), "class": Env}.get(how) or Env()
    with collecting(env, engine, n=2) as collector:
        other.set()
        assert len(next(iter(collector))) == 2
    assert len(made) == 2


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("down", [False, True])
def test_what_is_made_too_late_is_closed(engine, is_async, down, idle_clock):
    entered, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(Once):
        def close(self):
            closed.set()

    class LateAsync(Once):
        async def close(self):
            await asyncio.sleep(0)
            closed.set()

    def factory():
        if context.get().task_id == 0:
            entered.set()
            with collector._thread.loop.hangs():
                assert go_on.wait(PATIENCE)
            return LateAsync() if is_async else Late()
        return Once()

    data = [{"task_id": 0}, {"task_id": 1}]
    options = {"max_concurrency": 1, "max_consecutive_failures": 2}
    limits = Limits(episode_timeout=LIMIT)
    with collecting(factory, engine, data, limits=limits, **options) as collector:
        next(iter(collector))
        assert collector.stats()["rejected/episode_timeout"] == 1
        assert entered.is_set()
        if down:
            collector.shutdown()
        go_on.set()
        assert closed.wait(PATIENCE)


def test_many_chat_environments_of_a_factory_share_one_adapter(engine):
    """Also if they are made at once: what they draw of a data loader is theirs together."""

    def factory():
        time.sleep(0.05)
        return ChatEnv()

    make = resolve(factory)
    players = []
    with beside(*[lambda: players.append(make())] * 4):
        pass
    assert len({id(player._loader_items) for player in players}) == 1
    assert len({id(player) for player in players}) == 4
