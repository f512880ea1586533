from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torchrl.collectors import BaseCollector
from torchrl.data import LazyStackStorage, ReplayBuffer

from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import hang
from tests.tiers import first_fast
from tests.waiting import PATIENCE, ctrl_c, wait_until
from torchrl_mt.collectors import CollectorOptions, Limits, MultiTurnCollector
from torchrl_mt.data import EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, TextEnv, TextStep


@pytest.fixture
def guesser(tokenizer):
    """Guesses a number, sometimes without ending its turn."""
    rng = random.Random(0)
    numbers = [tokenizer.convert_tokens_to_ids(str(number)) for number in range(1, 17)]
    end = tokenizer.eos_token_id
    return ScriptedEngine(tokenizer, lambda prompt: [rng.choice(numbers), end])


def collect(*args, **kwargs):
    with MultiTurnCollector(*args, **kwargs) as collector:
        return list(collector), collector.stats()


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


def test_is_a_torchrl_collector(guesser):
    with MultiTurnCollector(GuessNumber, guesser, episodes_per_batch=1) as collector:
        assert isinstance(collector, BaseCollector)


def test_the_ledger_is_what_the_engine_saw_and_returned(guesser):
    (batch,), _ = collect(
        GuessNumber(16, 5), guesser, episodes_per_batch=50, total_episodes=50, max_concurrency=7
    )
    columns = [
        batch.get(key, as_list=True)
        for key in [
            ("tokens", "prompt"),
            ("tokens", "response"),
            ("log_probs", "response"),
            ("versions", "response"),
        ]
    ]
    written = [tuple(tuple(c.tolist()) for c in turn) for turn in zip(*columns, strict=True)]
    seen = [
        (
            tuple(prompt),
            tuple(answer.token_ids),
            tuple(torch.tensor(answer.log_probs).tolist()),
            tuple(answer.versions),
        )
        for prompt, answer in guesser.calls
    ]
    assert Counter(written) == Counter(seen)


def test_every_prompt_extends_the_turn_before(guesser, tokenizer):
    (batch,), stats = collect(GuessNumber(16, 5), guesser, episodes_per_batch=20, total_episodes=20)
    for episode in episodes_of(batch):
        prompts = episode.get(("tokens", "prompt"), as_list=True)
        responses = episode.get(("tokens", "response"), as_list=True)
        for k in range(1, len(prompts)):
            before = torch.cat([prompts[k - 1], responses[k - 1]])
            assert torch.equal(prompts[k][: len(before)], before)
            between = tokenizer.decode(prompts[k][len(before) :])
            assert between.split() in (["<user>", w, "<end>", "<assistant>"] for w in HINTS)
    assert stats["forks"] == 0


HINTS = ("higher", "lower", "invalid")


def test_batches_are_ted(guesser):
    data = [{"turns": n} for n in (3, 1, 2, 5)]
    (batch,), stats = collect(Talk, guesser, data, episodes_per_batch=4, total_episodes=4)
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
    (batch,), _ = collect(
        Talk, guesser, [{"turns": 9}], episodes_per_batch=2, total_episodes=2, limits=limits
    )
    for episode in episodes_of(batch):
        assert len(episode) == turns
        assert episode["stop_reason"][turns - 1] == reason
        assert episode["next", "truncated"].tolist() == [[False]] * (turns - 1) + [[True]]
        assert not episode["next", "terminated"].any()
        prompts = episode.get(("tokens", "prompt"), as_list=True)
        responses = episode.get(("tokens", "response"), as_list=True)
        if limits.max_episode_tokens:
            longest = len(prompts[-1]) + len(responses[-1])
            assert longest <= limits.max_episode_tokens


def test_groups_share_their_item_and_arrive_whole(guesser):
    batches, _ = collect(
        GuessNumber(16, 5), guesser, episodes_per_batch=12, group_size=4, total_episodes=24
    )
    assert len(batches) == 2
    for batch in batches:
        members = Counter()
        for episode in episodes_of(batch):
            assert len(set(episode["group"].tolist())) == 1
            members[int(episode["group"][0]), str(episode["data"][0])] += 1
        assert list(members.values()) == [4, 4, 4]


def test_group_members_meet_the_same_secret(tokenizer):
    ones = ScriptedEngine(tokenizer, lambda _: [tokenizer.convert_tokens_to_ids("1"), 1])
    (batch,), _ = collect(
        GuessNumber(16, 1), ones, episodes_per_batch=240, group_size=3, total_episodes=240
    )
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


def test_a_failing_episode_is_replaced_counted_and_logged_once_per_cause(guesser, caplog):
    data = [
        {"turns": 2},
        {"turns": 2, "fail": OSError("no tool")},
        {"turns": 3},
        {"turns": 1, "fail": OSError("no tool")},
        {"turns": 1, "fail": KeyError("x")},
        {"turns": 4},
    ]
    with caplog.at_level(logging.WARNING, logger="torchrl_mt"):
        batches, stats = collect(
            Flaky, guesser, data, episodes_per_batch=3, total_episodes=6, max_concurrency=2
        )
    for batch in batches:
        assert sorted(len(e) for e in episodes_of(batch)) == [2, 3, 4]
        assert not any(item.get("fail") for item in batch["data"])
    assert stats["rejected/OSError"] == 4
    assert stats["rejected/KeyError"] == 2
    assert stats["accepted"] + stats["rejected"] == stats["started"]
    assert stats["running"] == 0
    assert [r.exc_info is not None for r in caplog.records] == [True, True]


def test_a_failing_member_takes_its_group_along_and_no_other(guesser):
    failures = iter([False, True, False] + [False] * 100)

    class OneFails(Talk):
        def reset(self, data=None):
            if next(failures):
                raise OSError("no tool")
            return super().reset(data)

    (batch,), stats = collect(
        OneFails, guesser, [{"turns": 2}], episodes_per_batch=6, group_size=3, total_episodes=6
    )
    assert Counter((batch["group"] % 1_000_000).tolist()) == {1: 6, 2: 6}
    assert stats["rejected/OSError"] == 1
    assert stats["rejected"] == 1 + stats["rejected/incomplete_group"]
    assert stats["accepted"] == 6
    assert stats["accepted"] + stats["rejected"] == stats["started"]


@pytest.mark.parametrize("fast", [True, False])
def test_siblings_are_rejected_with_their_group_finished_or_not(guesser, fast):
    class SecondFails(Talk):
        made = finished = 0

        def __init__(self):
            type(self).made += 1
            self.rank = (type(self).made - 1) % 3

        async def step(self, response):
            if self.rank == 1 and self.made <= 3:
                while fast and self.finished < 2:
                    await asyncio.sleep(0)
                raise OSError("no tool")
            if not fast and self.made <= 3:
                await hang()
            type(self).finished += 1
            return Talk.step(self, response)

    _, stats = collect(
        SecondFails, guesser, [{"turns": 1}], episodes_per_batch=3, group_size=3, total_episodes=3
    )
    assert stats["rejected/OSError"] == 1
    assert stats["rejected/incomplete_group"] == 2
    assert stats["rejected"] == 3
    assert stats["started"] == 6


def test_an_environment_that_exits_is_rejected_like_any_other(guesser):
    class Exits(Flaky):
        pass

    data = [{"turns": 1}, {"turns": 1, "fail": SystemExit(3)}]
    (batch,), stats = collect(Exits, guesser, data, episodes_per_batch=2, total_episodes=2)
    assert stats["rejected/SystemExit"] == 1
    assert batch.batch_size == (2,)


def test_a_run_that_can_only_fail_stops_with_the_cause(guesser):
    data = [{"turns": 1, "fail": OSError("no tool")}]
    with (
        MultiTurnCollector(
            Flaky, guesser, data, episodes_per_batch=8, max_consecutive_failures=8
        ) as collector,
        pytest.raises(RuntimeError, match=r"8 episodes in a row .* OSError: no tool") as caught,
    ):
        next(iter(collector))
    assert isinstance(caught.value.__cause__, OSError)
    assert collector.stats()["running"] == 0


def test_a_slow_environment_delays_only_itself(guesser):
    class Slow(Talk):
        inline = False

        def step(self, response):
            if self.left == 3:
                wait_until(lambda: len(done_before_the_slow_one) == 19)
            return super().step(response)

    data = [{"turns": 3}, *[{"turns": 2}] * 19]
    done_before_the_slow_one = []
    with MultiTurnCollector(Slow, guesser, data, episodes_per_batch=20) as collector:
        play = collector._player.failure_of

        async def watched(episode, *rest):
            failure = await play(episode, *rest)
            done_before_the_slow_one.append(episode.data["turns"])
            return failure

        collector._player.failure_of = watched
        next(iter(collector))
    assert done_before_the_slow_one == [2] * 19 + [3]


def test_async_environments_are_awaited(guesser):
    class Later(Talk):
        async def reset(self, data=None):
            await asyncio.sleep(0.001)
            return Talk.reset(self, data)

        async def step(self, response):
            await asyncio.sleep(0.001)
            return Talk.step(self, response)

    (batch,), _ = collect(Later, guesser, [{"turns": 3}], episodes_per_batch=5, total_episodes=5)
    assert batch.batch_size == (15,)


def test_environments_are_closed_also_when_they_fail(guesser):
    closed = []

    class Closes(Flaky):
        def close(self):
            closed.append(self.data["turns"])

    data = [{"turns": 1}, {"turns": 2, "fail": OSError("x")}]
    collect(Closes, guesser, data, episodes_per_batch=2, total_episodes=2)
    assert sorted(closed)[:3] == [1, 1, 2]


def test_concurrency_is_bounded(guesser):
    collect(Talk, guesser, [{"turns": 3}], episodes_per_batch=30, total_episodes=30)
    assert guesser.most_running > 5
    guesser.most_running = 0
    collect(
        Talk,
        guesser,
        [{"turns": 3}],
        episodes_per_batch=30,
        total_episodes=30,
        max_concurrency=5,
    )
    assert guesser.most_running == 5


def test_batches_go_to_a_replay_buffer(guesser):
    buffer = ReplayBuffer(storage=LazyStackStorage(1000))
    batches, _ = collect(
        Talk,
        guesser,
        [{"turns": 2}],
        episodes_per_batch=3,
        total_episodes=6,
        replay_buffer=buffer,
    )
    assert batches == [None, None]
    assert len(buffer) == 12


def test_postproc_sees_every_batch(guesser):
    def double(batch):
        batch["next", "reward"] *= 2
        return batch

    (batch,), _ = collect(
        Talk, guesser, [{"turns": 2}], episodes_per_batch=1, total_episodes=1, postproc=double
    )
    assert batch["next", "reward"].tolist() == [[2.0], [0.0]]


def test_data_is_gone_through_again_unless_it_is_an_iterator(guesser):
    data = [{"turns": 1}, {"turns": 2}, {"turns": 3}]
    batches, _ = collect(Talk, guesser, data, episodes_per_batch=2, total_episodes=6)
    assert [item["turns"] for b in batches for item in b["data"]] == [1, 2, 2, 3, 3, 3] * 2
    batches, stats = collect(Talk, guesser, iter(data), episodes_per_batch=2)
    assert [len(b) for b in batches] == [3, 3]
    assert stats["accepted"] == 3


def test_state_is_restored(guesser):
    data = [{"turns": n} for n in (1, 2, 3, 4, 5)]
    with MultiTurnCollector(Talk, guesser, data, episodes_per_batch=3) as collector:
        batches = iter(collector)
        next(batches)
        state = collector.state_dict()
        expected = next(batches)
    with MultiTurnCollector(Talk, guesser, data, episodes_per_batch=3) as resumed:
        resumed.load_state_dict(state)
        batch = next(iter(resumed))
    assert list(batch["data"]) == list(expected["data"])
    # Of what was delivered after the state was taken, the first collector's ids are taken.
    for key in (("collector", "traj_ids"), "group"):
        assert not torch.isin(batch[key], expected[key]).any()


def test_weights_reach_the_engine(guesser):
    with MultiTurnCollector(GuessNumber, guesser, episodes_per_batch=2) as collector:
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_(policy=object())
        assert collector.policy_version == 1
        versions = next(batches).get(("versions", "response"), as_list=True)
    assert {v for turn in versions for v in turn.tolist()} == {1}


def test_shutdown_leaves_no_thread(guesser):
    before = set(threading.enumerate())

    class Slow(Talk):
        inline = False

    collector = MultiTurnCollector(Slow, guesser, [{"turns": 2}], episodes_per_batch=4)
    next(iter(collector))
    assert set(threading.enumerate()) - before
    collector.shutdown()
    collector.shutdown()
    # Calls that are answered are about to end their threads.
    wait_until(lambda: not set(threading.enumerate()) - before)
    with pytest.raises(RuntimeError, match="shut down"):
        next(iter(collector))


def test_an_interrupt_cancels_what_runs(tokenizer):
    class Hangs(Talk):
        async def step(self, response):
            await hang()

    engine = ScriptedEngine(tokenizer, lambda _: [8, tokenizer.eos_token_id])
    collector = MultiTurnCollector(Hangs, engine, [{"turns": 2}], episodes_per_batch=4)
    with ctrl_c(when=lambda: len(engine.calls) == 4), pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    stats = collector.stats()
    assert stats["rejected/cancelled"] == stats["started"] == 4
    collector.shutdown()


def test_with_the_real_engine(model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    (batch,), stats = collect(
        GuessNumber(16, 5),
        engine,
        episodes_per_batch=40,
        total_episodes=40,
        limits=Limits(max_turns=5, max_response_tokens=3),
    )
    engine.close()
    assert stats["accepted"] == 40
    with torch.no_grad():
        for prompt, response, log_probs in zip(
            *(
                batch.get(key, as_list=True)
                for key in [("tokens", "prompt"), ("tokens", "response"), ("log_probs", "response")]
            ),
            strict=True,
        ):
            row = torch.cat([prompt, response])[None]
            expected = model.eval()(row).logits.log_softmax(-1)[0, :-1]
            expected = expected.gather(-1, row[0, 1:, None])[-len(response) :, 0]
            torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"data": []}, "data must hold at least one item, got none"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"episodes_per_batch": 0}, "episodes_per_batch must be at least 1, got 0"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1, got 0"),
        ({"max_consecutive_failures": 0}, "max_consecutive_failures must be at least 1, got 0"),
        ({"group_size": 3}, "episodes_per_batch must be a multiple of group_size=3, got 4"),
        ({"group_size": 2, "total_episodes": 5}, "total_episodes must be a multiple"),
    ],
)
def test_bad_arguments_are_refused(guesser, kwargs, message):
    threads = threading.active_count()
    with pytest.raises(ValueError, match=message):
        MultiTurnCollector(GuessNumber, guesser, **{"episodes_per_batch": 4, **kwargs})
    assert threading.active_count() == threads


def test_what_is_no_engine_or_environment_is_refused(guesser, model):
    with pytest.raises(TypeError, match=r"policy must be an engine .* got LlamaForCausalLM"):
        MultiTurnCollector(GuessNumber, model, episodes_per_batch=1)
    with pytest.raises(
        TypeError, match=r"policy must be .* got the class ScriptedEngine: it needs arguments"
    ):
        MultiTurnCollector(GuessNumber, ScriptedEngine, episodes_per_batch=1)
    with pytest.raises(ImportError, match=r'named as "package.module.Class", got \'GuessNumber\''):
        MultiTurnCollector("GuessNumber", guesser, episodes_per_batch=1)
    with pytest.raises(TypeError, match=r"env must be a TextEnv, .* got the class object"):
        MultiTurnCollector(object, guesser, episodes_per_batch=1)


def test_an_opening_without_room_for_a_response_is_refused(guesser):
    with (
        MultiTurnCollector(
            GuessNumber, guesser, episodes_per_batch=1, limits=Limits(max_episode_tokens=6)
        ) as collector,
        pytest.raises(RuntimeError, match="raise the limit or shorten the prompt"),
    ):
        next(iter(collector))


def in_time(function):
    """What the function returns or raises, or a failure if it does neither."""
    outcome = Future()

    def call():
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome.result(PATIENCE)


def settled(stats):
    """Whether every episode that started is accepted or rejected."""
    return stats["accepted"] + stats["rejected"] == stats["started"] and stats["running"] == 0


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
    class Raises(Flaky):
        pass

    Raises.inline = inline
    data = [{"turns": 1}, {"turns": 1, "fail": error}]
    (batch,), stats = in_time(
        lambda: collect(Raises, guesser, data, episodes_per_batch=2, total_episodes=2)
    )
    assert batch.batch_size == (2,)
    assert stats[f"rejected/{cause}"] == stats["rejected"] == 1
    assert settled(stats)


def test_a_cancellation_within_an_environment_is_its_failure(guesser):
    class Cancels(Talk):
        async def step(self, response):
            if self.data["turns"] == 2:
                inner = asyncio.ensure_future(hang())
                inner.cancel()
                await inner
            return Talk.step(self, response)

        def reset(self, data=None):
            self.data = data
            return super().reset(data)

    data = [{"turns": 1}, {"turns": 2}]
    (batch,), stats = in_time(
        lambda: collect(Cancels, guesser, data, episodes_per_batch=2, total_episodes=2)
    )
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

    (batch,), stats = in_time(
        lambda: collect(
            Swallows,
            guesser,
            [{"turns": 1}],
            episodes_per_batch=2,
            group_size=2,
            total_episodes=2,
        )
    )
    assert (stats["rejected/OSError"], stats["rejected/incomplete_group"]) == (1, 1)
    assert (batch["group"] % 1_000_000).tolist() == [1, 1]
    assert settled(stats)


class Waits(Talk):
    """Waits for ever where its data says so."""

    def reset(self, data=None):
        self.waits = data.get("waits") and data["waits"][0]
        return super().reset(data)

    async def step(self, response):
        if self.waits:
            await hang()
        return Talk.step(self, response)


@pytest.mark.parametrize("group_size", [1, 2])
def test_episodes_of_a_batch_that_was_cut_short_are_not_accepted(guesser, group_size):
    waits = [True]
    data = [*[{"turns": 1}] * 3, {"turns": 1, "waits": waits}]
    with MultiTurnCollector(
        Waits,
        guesser,
        data,
        episodes_per_batch=4 * group_size,
        group_size=group_size,
        total_episodes=8 * group_size,
    ) as collector:
        all_began = ctrl_c(when=lambda: len(guesser.calls) == 4 * group_size)
        with all_began, pytest.raises(KeyboardInterrupt):
            next(iter(collector))
        stats = collector.stats()
        assert stats["rejected/cancelled"] == stats["started"] == 4 * group_size
        assert settled(stats)
        waits[0] = False
        delivered = in_time(lambda: sum(int(b["next", "done"].sum()) for b in collector))
        assert delivered == 8 * group_size == collector.stats()["accepted"]


def test_episodes_before_a_run_gave_up_or_a_postproc_failed_are_not_accepted(guesser):
    def fails(batch):
        raise KeyError("mine")

    data = [{"turns": 1}, {"turns": 1, "fail": OSError("no tool")}]
    for kwargs in ({"postproc": fails}, {"max_consecutive_failures": 1}):
        with MultiTurnCollector(Flaky, guesser, data, episodes_per_batch=2, **kwargs) as collector:
            with pytest.raises((KeyError, RuntimeError)):
                in_time(lambda: next(iter(collector)))
            assert collector.stats()["accepted"] == 0
            assert settled(collector.stats())


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
    with MultiTurnCollector(
        Noted,
        guesser,
        data,
        options=CollectorOptions(cycle=False),
        episodes_per_batch=2,
        replay_buffer=buffer,
    ) as collector:
        with pytest.raises(OSError, match="no space"):
            list(collector.iterator())
        stats = collector.stats()
        assert (stats["accepted"], stats["rejected/cancelled"]) == (2, 2)
        assert settled(stats)
        assert len(list(collector)) == 2
        assert collector.stats()["accepted"] == 6
    assert sorted(played) == [0, 1, 2, 2, 3, 3, 4, 5]


def test_the_statistics_add_up_at_any_moment(guesser):
    class Seen(Flaky):
        async def step(self, response):
            while not any(stats["running"] for stats in seen):
                await asyncio.sleep(0)
            return super().step(response)

    data = [{"turns": 3}, {"turns": 2, "fail": OSError("no tool")}]
    seen = []
    with MultiTurnCollector(
        Seen, guesser, data, episodes_per_batch=20, max_concurrency=7, total_episodes=100
    ) as collector:
        run = threading.Thread(target=lambda: list(collector), daemon=True)
        run.start()
        while run.is_alive():
            seen.append(collector.stats())
    assert all(s["accepted"] + s["rejected"] + s["running"] == s["started"] for s in seen)


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True])
def test_an_interrupt_gets_through_a_call_that_never_returns(closes):
    """Also at the interpreter's end: in a process of its own, which must not hang either."""
    code = f"""
    import itertools, threading
    from tests.waiting import press_ctrl_c
    from torchrl_mt.collectors import MultiTurnCollector
    from torchrl_mt.envs import TextEnv, TextStep
    from torchrl_mt.testing import tiny_chat_tokenizer
    from tests.collectors.scripted import ScriptedEngine

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

        if {closes}:
            def close(self):
                print("closed ", end="")

    collector = MultiTurnCollector(Blocks, engine, episodes_per_batch=2)
    try:
        next(iter(collector))
    except KeyboardInterrupt:
        print("interrupted", collector.stats()["rejected/cancelled"])
    collector.shutdown()
    print("down")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["closed"] * 2 * closes + ["interrupted", "2", "down"]


def test_environments_close_in_peace_after_an_interrupt(guesser):
    closed = []

    class ClosesSlowly(Waits):
        async def close(self):
            await asyncio.sleep(0.05)
            closed.append(1)

    data = [{"turns": 1, "waits": [True]}]
    with MultiTurnCollector(ClosesSlowly, guesser, data, episodes_per_batch=4) as collector:
        with ctrl_c(when=lambda: len(guesser.calls) == 4), pytest.raises(KeyboardInterrupt):
            next(iter(collector))
        # Nothing is left over when the interrupt is through: its tasks were waited for.
        assert len(closed) == 4
        assert settled(collector.stats())


def test_shutdown_waits_no_longer_than_it_is_told(guesser):
    class Stubborn(Waits):
        async def step(self, response):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await hang()

    collector = MultiTurnCollector(Stubborn, guesser, [{"turns": 1}], episodes_per_batch=1)
    caller = Future()

    def iterate():
        try:
            next(iter(collector))
        except RuntimeError as error:
            caller.set_result(str(error))

    threading.Thread(target=iterate, daemon=True).start()
    wait_until(lambda: guesser.calls)
    with pytest.raises(TimeoutError, match=r"within timeout=0.1 seconds"):
        in_time(lambda: collector.shutdown(timeout=0.1))
    assert "shut down" in caller.result(PATIENCE)


def test_a_shutdown_from_elsewhere_tells_the_caller(guesser):
    data = [{"turns": 1, "waits": [True]}]
    collector = MultiTurnCollector(Waits, guesser, data, episodes_per_batch=2)

    def shut_down():
        wait_until(lambda: len(guesser.calls) == 2)
        collector.shutdown()

    threading.Thread(target=shut_down, daemon=True).start()
    with pytest.raises(RuntimeError, match="the collector was shut down"):
        in_time(lambda: next(iter(collector)))
    assert settled(collector.stats())


def test_what_an_environment_says_about_a_turn_is_kept(guesser):
    class Says(Talk):
        def step(self, response):
            step = super().step(response)
            return dataclasses.replace(step, info={"left": self.left} if self.left % 2 else None)

    (batch,), _ = collect(Says, guesser, [{"turns": 3}], episodes_per_batch=1, total_episodes=1)
    assert list(batch["info"]) == [None, {"left": 1}, None]
    buffer = ReplayBuffer(storage=EpisodeStorage(10), writer=EpisodeWriter())
    buffer.extend(batch)
    assert list(buffer.storage[:]["info"]) == [None, {"left": 1}, None]


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", "guess", r"TextEnv.reset must return a list of messages .* got str \(guess\)"),
        ("reset", {"role": "user", "content": "x"}, r"reset must return a list .* got dict"),
        (
            "reset",
            None,
            r"reset must return a list of messages .* got NoneType .* from Wrong.reset",
        ),
        ("reset", ["guess"], r"reset must return .* got str \(guess\) among them"),
        ("reset", ([], {}), r"reset must return .* got list \(\[\]\) among them, from Wrong.reset"),
        ("step", {"reward": 1}, r"TextEnv.step must return a TextStep, got dict"),
        ("step", None, r"TextEnv.step must return a TextStep, got NoneType"),
        (
            "step",
            ([], 1.0, True, False, {}),
            r"TextEnv.step must return a TextStep, got tuple \(\(.* from Wrong.step: return "
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
    with (
        MultiTurnCollector(wrong, guesser, [{"turns": 1}], episodes_per_batch=1) as collector,
        pytest.raises(RuntimeError, match=message) as caught,
    ):
        next(iter(collector))
    assert isinstance(caught.value.__cause__, TypeError)
    assert collector.stats()["rejected/TypeError"] == collector.stats()["rejected"] > 0


def test_a_factory_of_something_else_is_named(guesser):
    with (
        MultiTurnCollector(lambda: object(), guesser, episodes_per_batch=1) as collector,
        pytest.raises(
            RuntimeError, match=r"env must be a TextEnv, .* a callable that makes object"
        ),
    ):
        next(iter(collector))


@pytest.mark.parametrize("limits", [Limits(), Limits(max_episode_tokens=100)])
def test_a_conversation_ends_where_the_engine_does(guesser, limits):
    # 6 tokens of opening, then 2 sampled and 4 of hint a turn: no room for a third turn.
    guesser.max_total_tokens = 18
    (batch,), stats = collect(
        Talk, guesser, [{"turns": 9}], episodes_per_batch=1, total_episodes=1, limits=limits
    )
    assert list(batch["stop_reason"]) == ["", "max_episode_tokens"]
    assert stats["rejected"] == 0


def test_the_engines_longest_answer_holds_also_where_the_conversation_is_limited(guesser):
    guesser.max_new_tokens = 1
    (batch,), _ = collect(
        Talk,
        guesser,
        [{"turns": 9}],
        episodes_per_batch=1,
        total_episodes=1,
        limits=Limits(max_episode_tokens=100),
    )
    assert list(batch["stop_reason"]) == ["max_response_tokens"]


def test_the_seed_is_restored(guesser):
    def seeds(collector):
        return [item["seed"] for item in next(iter(collector))["data"]]

    def collector():
        return MultiTurnCollector(GuessNumber(4, 1), guesser, episodes_per_batch=3)

    with collector() as first, collector() as resumed:
        first.set_seed(7)
        seeds(first)
        state = first.state_dict()
        expected = seeds(first)
        resumed.load_state_dict(state)
        assert seeds(resumed) == expected
        first.load_state_dict(state)
        assert seeds(first) == expected
        resumed.set_seed(7)
        again = seeds(resumed)
        first.set_seed(7)
        assert seeds(first) == again != expected


def test_the_position_in_an_iterator_is_restored(guesser):
    def collector():
        items = iter([{"turns": 1, "i": i} for i in range(9)])
        return MultiTurnCollector(Talk, guesser, items, episodes_per_batch=3)

    def numbers(collector):
        return [item["i"] for item in next(iter(collector))["data"]]

    with collector() as first, collector() as resumed:
        numbers(first)
        state = first.state_dict()
        resumed.load_state_dict(state)
        assert numbers(resumed) == numbers(first) == [3, 4, 5]
        with pytest.raises(ValueError, match=r"got 3 where 6 items were taken"):
            first.load_state_dict(state)


def test_a_seed_reaches_torch(guesser):
    with MultiTurnCollector(Talk, guesser, [{"turns": 1}], episodes_per_batch=1) as collector:
        assert collector.set_seed(3) == 4
        drawn = torch.rand(3)
        assert collector.set_seed(3, static_seed=True) == 3
        assert torch.equal(torch.rand(3), drawn)


def test_a_stop_iteration_keeps_its_place(guesser):
    data = [{"turns": 1, "fail": StopIteration("mine")}]
    with (
        MultiTurnCollector(
            type("Threaded", (Flaky,), {"inline": False}), guesser, data, episodes_per_batch=1
        ) as collector,
        pytest.raises(RuntimeError) as caught,
    ):
        next(iter(collector))
    assert str(caught.value.__cause__.__cause__) == "mine"
