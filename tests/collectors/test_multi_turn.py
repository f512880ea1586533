from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.buffers import buffer_of
from tests.collectors.chats import Chat
from tests.collectors.runs import (
    balanced,
    beside,
    collecting,
    failed_run,
    first_batch,
    lists,
    played,
    run_of,
)
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import hang
from tests.tiers import first_fast
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, TextEnv, TextStep


@pytest.fixture
def guesser(tokenizer):
    """Guesses a number, sometimes without ending its turn."""
    rng = random.Random(0)
    numbers = [tokenizer.convert_tokens_to_ids(str(number)) for number in range(1, 17)]
    end = tokenizer.eos_token_id
    return ScriptedEngine(tokenizer, lambda prompt: [rng.choice(numbers), end])


def episodes_of(batch):
    """Cut a flat batch into episodes by their ids."""
    ids = batch["collector", "traj_ids"]
    return [batch[(ids == i).nonzero()[:, 0]] for i in ids.unique(sorted=True)]


class Talk(TextEnv):
    """Ends after as many turns as its data says; pays the turn's number."""

    inline = True

    def reset(self, data=None):
        self.left = data["turns"]
        return [{"role": "user", "content": "guess 1 to 16"}]

    def step(self, response):
        self.left -= 1
        return TextStep(
            [{"role": "user", "content": "higher"}], reward=float(self.left), done=self.left == 0
        )


def test_batches_are_ted(guesser):
    data = [{"turns": n} for n in (3, 1, 2, 5)]
    (batch,), stats = run_of(Talk, guesser, data, n=4, total_episodes=4)
    assert batch.batch_size == (11,)
    episodes = episodes_of(batch)
    assert [len(episode) for episode in episodes] == [3, 1, 2, 5]
    for episode, item in zip(episodes, data, strict=True):
        size = item["turns"]
        assert episode["next", "reward"].tolist() == [[float(k)] for k in reversed(range(size))]
        ends = [[False]] * (size - 1) + [[True]]
        assert episode["next", "done"].tolist() == episode["next", "terminated"].tolist() == ends
        assert not episode["next", "truncated"].any()
        assert list(episode["stop_reason"]) == [""] * (size - 1) + ["done"]
        assert list(episode["data"]) == [item] * size
        talk = [message["role"] for turn in episode["text"] for message in turn]
        assert talk == ["user", *["assistant", "user"] * size]
    assert (stats["accepted"], stats["turns"], stats["tokens"]) == (4, 11, 22)


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(max_turns=2), "max_turns", 2),
        (Limits(max_response_tokens=1), "max_response_tokens", 1),
        # 6 tokens of opening, then 2 sampled and 4 of hint a turn.
        (Limits(max_episode_tokens=9), "max_episode_tokens", 1),
        (Limits(max_episode_tokens=13), "max_episode_tokens", 1),
        (Limits(max_episode_tokens=14), "max_episode_tokens", 2),
    ],
)
def test_limits_end_an_episode_as_truncated(guesser, limits, reason, turns):
    (batch,), _ = run_of(Talk, guesser, [{"turns": 9}], n=2, total_episodes=2, limits=limits)
    for episode in episodes_of(batch):
        assert len(episode) == turns
        assert episode["stop_reason"][turns - 1] == reason
        assert episode["next", "truncated"].tolist() == [[False]] * (turns - 1) + [[True]]
        assert not episode["next", "terminated"].any()
        if limits.max_episode_tokens:
            prompt, response = (lists(episode, "tokens", n)[-1] for n in ("prompt", "response"))
            assert len(prompt) + len(response) <= limits.max_episode_tokens


def test_group_members_meet_the_same_secret(tokenizer):
    ones = ScriptedEngine(tokenizer, lambda _: [tokenizer.convert_tokens_to_ids("1"), 1])
    (batch,), _ = run_of(GuessNumber(16, 1), ones, n=240, group_size=3, total_episodes=240)
    rewards = batch["next", "reward"].reshape(80, 3)
    assert (rewards == rewards[:, :1]).all()
    assert 0 < rewards[:, 0].sum() < 80


class Flaky(Talk):
    """Fails in a way its data asks for."""

    def step(self, response):
        if self.data.get("fail") and self.left == 1:
            raise self.data["fail"]
        return super().step(response)

    def reset(self, data=None):
        self.data = data
        return super().reset(data)


@pytest.mark.parametrize("fast", [True, False])
def test_siblings_are_rejected_with_their_group_finished_or_not(guesser, fast):
    class SecondFails(Talk):
        made = finished = 0

        def __init__(self):
            SecondFails.made += 1
            self.number = self.made

        async def step(self, response):
            if self.number == 2:
                while fast and self.finished < 2:
                    await asyncio.sleep(0)
                raise OSError("no tool")
            if not fast and self.number <= 3:
                await hang()
            SecondFails.finished += 1
            return Talk.step(self, response)

    _, stats = run_of(SecondFails, guesser, [{"turns": 1}], n=3, group_size=3, total_episodes=3)
    assert stats["rejected/OSError"] == 1
    assert stats["rejected/incomplete_group"] == 2
    assert (stats["rejected"], stats["started"]) == (3, 6)


def test_a_slow_environment_delays_only_itself(guesser):
    class Slow(Talk):
        inline = False

        def step(self, response):
            if self.left == 3:
                wait_until(lambda: collector.stats()["queue"] == 19)
            return super().step(response)

    data = [{"turns": 3}, *[{"turns": 2}] * 19]
    with collecting(Slow, guesser, data, n=20) as collector:
        assert len(next(iter(collector))) == 3 + 2 * 19


def test_environments_are_closed_also_when_they_fail(guesser):
    closed = []

    class Closes(Flaky):
        def close(self):
            closed.append(self.data["turns"])

    data = [{"turns": 1}, {"turns": 2, "fail": OSError("x")}]
    run_of(Closes, guesser, data, n=2, total_episodes=2)
    assert sorted(closed)[:3] == [1, 1, 2]


def test_concurrency_is_bounded(guesser):
    run_of(Talk, guesser, [{"turns": 3}], n=30, total_episodes=30)
    assert guesser.most_running > 5
    guesser.most_running = 0
    run_of(Talk, guesser, [{"turns": 3}], n=30, total_episodes=30, max_concurrency=5)
    assert guesser.most_running == 5


def test_batches_go_to_a_replay_buffer(guesser):
    buffer = ReplayBuffer(storage=LazyStackStorage(1000))
    batches, _ = run_of(Talk, guesser, [{"turns": 2}], n=3, total_episodes=6, replay_buffer=buffer)
    assert batches == [None, None]
    assert len(buffer) == 12


def test_postproc_sees_every_batch(guesser):
    def double(batch):
        batch["next", "reward"] *= 2
        return batch

    batch, _ = first_batch(Talk, guesser, [{"turns": 2}], postproc=double)
    assert batch["next", "reward"].tolist() == [[2.0], [0.0]]


def test_data_is_gone_through_again_unless_it_is_an_iterator(guesser):
    data = [{"turns": 1}, {"turns": 2}, {"turns": 3}]
    batches, _ = run_of(Talk, guesser, data, n=2, total_episodes=6)
    assert [turns for batch in batches for turns in played(batch, "turns")] == [
        1,
        2,
        2,
        3,
        3,
        3,
    ] * 2
    batches, stats = run_of(Talk, guesser, iter(data), n=2)
    assert [len(b) for b in batches] == [3, 3]
    assert stats["accepted"] == 3


def test_shutdown_leaves_no_thread(guesser):
    before = set(threading.enumerate())

    class Slow(Talk):
        inline = False

    collector = collecting(Slow, guesser, [{"turns": 2}], n=4)
    next(iter(collector))
    assert set(threading.enumerate()) - before
    collector.shutdown()
    collector.shutdown()
    # Calls that are answered are about to end their threads.
    wait_until(lambda: not set(threading.enumerate()) - before)
    with pytest.raises(RuntimeError, match="shut down"):
        next(iter(collector))


def test_with_the_real_engine(model, tokenizer):
    engine, limits = (
        TransformersEngine(model, tokenizer),
        Limits(max_turns=5, max_response_tokens=3),
    )
    (batch,), stats = run_of(GuessNumber(16, 5), engine, n=40, total_episodes=40, limits=limits)
    engine.close()
    assert stats["accepted"] == 40
    keys = (("tokens", "prompt"), ("tokens", "response"), ("log_probs", "response"))
    columns = [batch.get(key, as_list=True) for key in keys]
    with torch.no_grad():
        for prompt, response, log_probs in zip(*columns, strict=True):
            row = torch.cat([prompt, response])[None]
            expected = model.eval()(row).logits.log_softmax(-1)[0, :-1]
            expected = expected.gather(-1, row[0, 1:, None])[-len(response) :, 0]
            torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_an_opening_without_room_for_a_response_is_refused(guesser):
    limits = Limits(max_episode_tokens=6)
    failed_run("raise the limit or shorten the prompt", GuessNumber, guesser, limits=limits)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StopIteration(), "RuntimeError"),
        (SystemExit(3), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_nothing_that_an_environment_raises_stops_the_others(guesser, inline, error, cause):
    env = type("Raises", (Flaky,), {"inline": inline})
    data = [{"turns": 1}, {"turns": 1, "fail": error}]
    (batch,), stats = run_of(env, guesser, data, n=2, total_episodes=2)
    assert batch.batch_size == (2,)
    assert stats[f"rejected/{cause}"] == stats["rejected"] == 1
    assert balanced(stats, running=0)


def test_a_cancellation_within_an_environment_is_its_failure(guesser):
    class Cancels(Flaky):
        async def step(self, response):
            if self.data["turns"] == 2:
                inner = asyncio.ensure_future(hang())
                inner.cancel()
                await inner
            return Talk.step(self, response)

    data = [{"turns": 1}, {"turns": 2}]
    (batch,), stats = run_of(Cancels, guesser, data, n=2, total_episodes=2)
    assert stats["rejected/CancelledError"] == stats["rejected"] == 1
    assert batch.batch_size == (2,)


def test_siblings_that_swallow_their_cancellation_are_rejected_all_the_same(guesser):
    class Swallows(Talk):
        made, hangs = 0, False

        def __init__(self):
            type(self).made += 1
            self.rank = self.made

        async def step(self, response):
            if self.rank == 1:
                while not self.hangs:
                    await asyncio.sleep(0)
                raise OSError("no tool")
            if self.rank == 2:
                type(self).hangs = True
                with contextlib.suppress(asyncio.CancelledError):
                    await hang()
            return TextStep(done=True)

    batch, stats = first_batch(Swallows, guesser, [{"turns": 1}], n=2, group_size=2)
    assert (stats["rejected/OSError"], stats["rejected/incomplete_group"]) == (1, 1)
    assert (batch["group"] % 1_000_000).tolist() == [1, 1]
    assert balanced(stats, running=0)


def test_episodes_before_a_run_gave_up_or_a_postproc_failed_are_not_accepted(guesser):
    def fails(batch):
        raise KeyError("mine")

    data = [{"turns": 1}, {"turns": 1, "fail": OSError("no tool")}]
    for kwargs in ({"postproc": fails}, {"max_consecutive_failures": 1}):
        with collecting(Flaky, guesser, data, n=2, **kwargs) as collector:
            with pytest.raises((KeyError, RuntimeError)):
                next(iter(collector))
            assert collector.stats()["accepted"] == 0
            assert balanced(collector.stats(), running=0)


def test_a_batch_that_the_replay_buffer_refuses_is_played_again(guesser):
    class Full(ReplayBuffer):
        def extend(self, data):
            if len(self) == 2 and not refused:
                refused.append(data)
                raise OSError("no space")
            return super().extend(data)

    refused, played = [], []

    class Noted(Talk):
        def reset(self, data=None):
            played.append(data["turns"])
            return super().reset({"turns": 1})

    buffer = Full(storage=LazyStackStorage(100))
    data = [{"turns": number} for number in range(6)]
    with collecting(Noted, guesser, data, n=2, cycle=False, replay_buffer=buffer) as collector:
        with pytest.raises(OSError, match="no space"):
            list(collector.iterator())
        stats = collector.stats()
        assert (stats["accepted"], stats["rejected/cancelled"]) == (2, 2)
        assert balanced(stats, running=0)
        assert len(list(collector)) == 2
        assert collector.stats()["accepted"] == 6
    assert sorted(played) == [0, 1, 2, 2, 3, 3, 4, 5]


def test_shutdown_waits_no_longer_than_it_is_told(guesser):
    class Stubborn(Talk):
        async def step(self, response):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await hang()

    collector = collecting(Stubborn, guesser, [{"turns": 1}])
    told = []

    def iterate():
        with pytest.raises(RuntimeError, match="shut down") as caught:
            next(iter(collector))
        told.append(caught.value)

    with beside(iterate):
        wait_until(lambda: guesser.calls)
        with pytest.raises(TimeoutError, match=r"within timeout=0.1 seconds"):
            collector.shutdown(timeout=0.1)
    assert told


def test_a_shutdown_from_elsewhere_tells_the_caller(guesser):
    collector = collecting(Chat, guesser, [{"hang_at": 1}], n=2)

    def shut_down():
        wait_until(lambda: len(guesser.calls) == 2)
        collector.shutdown()

    with beside(shut_down), pytest.raises(RuntimeError, match="the collector was shut down"):
        next(iter(collector))
    assert balanced(collector.stats(), running=0)


def test_what_an_environment_says_about_a_turn_is_kept(guesser):
    class Says(Talk):
        def step(self, response):
            step = super().step(response)
            return dataclasses.replace(step, info={"left": self.left} if self.left % 2 else None)

    batch, _ = first_batch(Says, guesser, [{"turns": 3}])
    assert list(batch["info"]) == [None, {"left": 1}, None]
    buffer = buffer_of(10)
    buffer.extend(batch)
    assert list(buffer.storage[:]["info"]) == [None, {"left": 1}, None]


MESSAGES = r"TextEnv.reset must return a list of messages .* got"
STEP = "TextEnv.step must return a TextStep, got"


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", "guess", rf"{MESSAGES} str \(guess\)"),
        ("reset", {"role": "user", "content": "x"}, rf"{MESSAGES} dict"),
        ("reset", None, rf"{MESSAGES} NoneType .* from Wrong.reset"),
        ("reset", ["guess"], rf"{MESSAGES} str \(guess\) among them"),
        ("reset", ([], {}), rf"{MESSAGES} list \(\[\]\) among them, from Wrong.reset"),
        ("step", {"reward": 1}, f"{STEP} dict"),
        ("step", None, f"{STEP} NoneType"),
        (
            *("step", ([], 1.0, True, False, {})),
            rf"{STEP} tuple \(\(.* from Wrong.step: return "
            r"torchrl_mt.envs.TextStep\(messages, reward=..., done=...\)",
        ),
        ("step", TextStep(["higher"]), r"TextStep.messages must be .* got str .* from Wrong.step"),
        ("step", TextStep(reward=None), r"TextStep.reward must be .* got NoneType .* Wrong.step"),
    ],
)
@pytest.mark.parametrize("kind", first_fast(["thread", "inline", "async"]))
def test_what_no_environment_may_return_is_named(guesser, method, value, message, kind):
    def answer(self, _):
        return value

    async def answer_later(self, _):
        return value

    answers = answer_later if kind == "async" else answer
    wrong = type("Wrong", (Talk,), {method: answers, "inline": kind == "inline"})
    cause, stats = failed_run(message, wrong, guesser, [{"turns": 1}])
    assert isinstance(cause, TypeError)
    assert stats["rejected/TypeError"] == stats["rejected"] > 0


def test_a_factory_of_something_else_is_named(guesser):
    match = r"env must be a TextEnv, .* a callable that makes object"
    failed_run(match, lambda: object(), guesser)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_episode_tokens=100)])
def test_a_conversation_ends_where_the_engine_does(guesser, limits):
    # 6 tokens of opening, then 2 sampled and 4 of hint a turn: no room for a third turn.
    guesser.max_total_tokens = 18
    batch, stats = first_batch(Talk, guesser, [{"turns": 9}], limits=limits)
    assert list(batch["stop_reason"]) == ["", "max_episode_tokens"]
    assert stats["rejected"] == 0


def test_the_engines_longest_answer_holds_also_where_the_conversation_is_limited(guesser):
    guesser.max_new_tokens = 1
    batch, _ = first_batch(Talk, guesser, [{"turns": 9}], limits=Limits(max_episode_tokens=100))
    assert list(batch["stop_reason"]) == ["max_response_tokens"]


def test_the_seed_is_restored(guesser):
    def seeds(collector):
        return played(next(iter(collector)), "seed")

    first, resumed = (collecting(GuessNumber(4, 1), guesser, n=3) for _ in range(2))
    with first, resumed:
        first.set_seed(7)
        seeds(first)
        state = first.state_dict()
        expected = seeds(first)
        for collector in (resumed, first):
            collector.load_state_dict(state)
            assert seeds(collector) == expected
        resumed.set_seed(7)
        again = seeds(resumed)
        first.set_seed(7)
        assert seeds(first) == again != expected


def test_a_seed_reaches_torch(guesser):
    with collecting(Talk, guesser, [{"turns": 1}]) as collector:
        assert collector.set_seed(3) == 4
        drawn = torch.rand(3)
        assert collector.set_seed(3, static_seed=True) == 3
        assert torch.equal(torch.rand(3), drawn)


def test_a_stop_iteration_keeps_its_place(guesser):
    env, data = type("Threaded", (Flaky,), {"inline": False}), {"fail": StopIteration("mine")}
    cause, _ = failed_run("StopIteration", env, guesser, [{"turns": 1, **data}])
    assert str(cause.__cause__) == "mine"
