"""Who plays when: failures and groups, staleness, limits of time, the background, evaluation."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from tests.buffers import buffer_of
from tests.collectors.chats import Chat, failing
from tests.collectors.runs import (
    balanced,
    collecting,
    failed_run,
    first_batch,
    lists,
    played,
    played_to_the_end,
)
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import LIMIT, hang
from tests.tiers import examples
from tests.waiting import wait_until
from torchrl_mt.collectors import Limits, context
from torchrl_mt.data import EpisodeSampler

PHASES = [Phase.explicit, Phase.generate]
"""To shorten what fails by chance of time takes long and leads nowhere."""


class Flaky(Chat):
    """Fails the first ``failures`` times that it is played for an item."""

    lock = threading.Lock()
    played: ClassVar[Counter] = Counter()

    async def step(self, response):
        key = self.data["key"]
        with self.lock:
            self.played[key] += 1
            failing = self.played[key] <= self.data["failures"]
        if failing:
            raise ConnectionError("no answer")
        return await super().step(response)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_failures_are_retried(engine, retries):
    Flaky.played = Counter()
    data = [{"key": k, "failures": k % 3} for k in range(6)]
    options = {"max_retries": retries, "max_consecutive_failures": 50}
    batch, stats = first_batch(Flaky, engine, data, n=3, **options)
    assert balanced(stats)
    assert stats["accepted"] == len(batch) == 3
    assert stats["rejected"] == stats.get("rejected/ConnectionError", 0)
    # Item k fails k % 3 times: it comes to its end if it is played once more often.
    ended = sorted(played(batch, "key"))
    assert all(key % 3 <= retries for key in ended)
    if retries == 3:
        assert ended == [0, 1, 2]
        assert stats["rejected"] == 0 + 1 + 2


@pytest.mark.parametrize(
    ("policy", "options", "sizes", "rejected"),
    [
        ("drop", {"n": 6}, {1: 3, 2: 3}, {"incomplete_group"}),
        ("keep", {"n": 3}, {0: 2, 1: 3}, set()),
        ("keep", {"n": 6, "yield_groups": True}, {1: 3, 2: 3}, {"incomplete_group"}),
        ("refill", {"n": 9}, {0: 3, 1: 3, 2: 3}, set()),
    ],
)
def test_groups_short_of_members(engine, policy, options, sizes, rejected):
    Flaky.played = Counter()
    data = [{"key": 0, "failures": 1}, {"key": 1, "failures": 0}, {"key": 2, "failures": 0}]
    more = {"group_size": 3, "incomplete_groups": policy, "max_consecutive_failures": 50}
    batch, stats = first_batch(Flaky, engine, data, **options, **more)
    assert balanced(stats)
    assert Counter((batch["group"] % 1_000_000).tolist()) == sizes
    causes = {key.split("/")[1] for key in stats if key.startswith("rejected/") and stats[key]}
    assert causes - {"ConnectionError"} == rejected


def test_a_run_of_groups_that_are_never_complete_stops(engine):
    class OneFails(Chat):
        async def step(self, response):
            if context.get().sample_idx == 1:
                raise OSError("gone")
            return await super().step(response)

    match = "32 groups in a row were dropped, .* for OSError: gone. .* incomplete_groups='keep'"
    cause, stats = failed_run(match, OneFails, engine, n=4, group_size=4, max_concurrency=4)
    assert isinstance(cause, OSError)
    assert balanced(stats)
    assert not stats["accepted"]


@pytest.mark.parametrize(("cause", "times"), [("all", 1 + 16), ("one", 1 + 64)])
def test_an_item_that_can_only_fail_is_given_up(engine, cause, times):
    ended = Counter()

    class Fails(Chat):
        async def step(self, response):
            me = context.get()
            if self.data["k"] == 0 and (cause == "all" or me.sample_idx == 1):
                while cause == "one" and not ended[me.group]:
                    await asyncio.sleep(0)
                raise OSError("gone")
            ended[me.group] += 1
            return await super().step(response)

    data = [{"k": k, "turns": 1} for k in range(3)]
    options = {"incomplete_groups": "requeue", "cycle": False, "max_consecutive_failures": 2}
    with collecting(Fails, engine, data, n=2, group_size=2, **options) as collector:
        assert sorted(played_to_the_end(collector)) == [1, 1, 2, 2]
        assert collector.state_dict()["items"]["open"] == []
        assert collector.stats()["rejected/OSError"] in range(times, 2 * times + 1)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_run_that_can_only_fail_stops_though_items_are_played_again(engine, group_size):
    data = [{"fail_at": 1, "error": OSError()}] * 3
    options = {"n": 4, "group_size": group_size, "incomplete_groups": "requeue"}
    failed_run(r"3[2-4] episodes in a row", Chat, engine, data, **options)


def test_a_run_that_accepts_nothing_stops(engine):
    match = r"32 episodes in a row were rejected.*not_accepted"
    failed_run(match, Chat, engine, n=4, accept=lambda td: False)


@pytest.mark.parametrize("reason", ["turn_timeout", "tool_timeout", "episode_timeout"])
def test_limits_of_time_cut_the_turn_that_was_not_answered(engine, reason, idle_clock):
    data = [{"turns": 5, "hang_at": 3}, {"turns": 2}]
    limits = Limits(**{reason: LIMIT}, on_timeout="mask")
    batch, _ = first_batch(Chat, engine, data, n=2, limits=limits)
    assert batch["valid"].tolist() == [False, False, True, True]
    assert (batch["group"] % 1_000_000).tolist() == [0, 0, 1, 1]
    assert batch["stop_reason"] == ["", reason, "", "done"]
    assert batch["next", "truncated"].flatten().tolist() == [False, True, False, False]
    assert batch["next", "terminated"].flatten().tolist() == [False, False, False, True]
    assert batch["next", "reward"].flatten().tolist() == [1.0] * 4


def test_an_episode_without_an_answer_in_time_is_rejected_and_retried(engine, idle_clock):
    options = {"limits": Limits(turn_timeout=LIMIT), "max_retries": 1}
    data = [{"hang_at": 1}, {"turns": 1}]
    batch, stats = first_batch(Chat, engine, data, max_consecutive_failures=9, **options)
    assert (batch["group"] % 1_000_000).tolist() == [1]
    assert stats["rejected/turn_timeout"] == stats["rejected"] == 2


def test_a_hung_engine_is_cut_by_the_turn(tokenizer, idle_clock):
    class Hung(ScriptedEngine):
        async def generate(self, prompt_ids, **kwargs):
            if len(self.calls) == 2:
                await hang()
            return await super().generate(prompt_ids, **kwargs)

    engine = Hung(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    limits = Limits(turn_timeout=LIMIT, on_timeout="mask")
    batch, _ = first_batch(Chat, engine, [{"turns": 9}], limits=limits)
    assert batch["stop_reason"] == ["", "turn_timeout"]


def test_episodes_go_on_while_the_policy_is_trained(engine):
    data = [{"turns": 2, "sleep": 0.02}] * 100
    options = {"max_staleness": 1, "staleness": "admission", "max_concurrency": 8}
    with collecting(Chat, engine, data, n=4, **options) as collector:
        stream = iter(collector)
        next(stream)
        wait_until(lambda: collector.stats()["queue"] == 4)  # while it is trained
        time.sleep(0.1)
        assert collector.stats()["started"] == 8  # no third batch was begun
        collector.update_policy_weights_(None)
        wait_until(lambda: collector.stats()["queue"] == 8)
        with collector.pause():
            collector.update_policy_weights_(None)
            time.sleep(0.2)
            assert collector.stats()["queue"] == 8
        next(stream)
        assert collector.stats()["staleness/max"] == 2


def buffer():
    return buffer_of(1000, EpisodeSampler, batch_size=4)


def test_collecting_in_the_background(engine):
    rb = buffer()
    collector = collecting(Chat, engine, n=4, replay_buffer=rb, total_episodes=40)
    collector.start()
    with pytest.raises(RuntimeError, match="started already"):
        collector.start()
    while collector.is_running:
        time.sleep(0.01)
        if len(rb):
            rb.sample()
    assert not collector.is_running
    collector.async_shutdown()
    assert rb.storage.num_episodes == collector.stats()["accepted"] == 40


def test_the_background_can_be_ended_and_needs_a_buffer(engine):
    rb = buffer()
    endless = collecting(Chat, engine, n=4, replay_buffer=rb)
    endless.start()
    wait_until(lambda: len(rb))
    endless.async_shutdown()
    assert not endless.is_running
    assert balanced(endless.stats())
    with (
        collecting(Chat, engine, n=2) as collector,
        pytest.raises(RuntimeError, match="give the collector a replay_buffer"),
    ):
        collector.start()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchrl_mt")]


def test_evaluation_is_apart_from_training(tokenizer):
    asked = []

    class Notes(ScriptedEngine):
        async def generate(self, prompt_ids, *, max_new_tokens=None, **sampling):
            asked.append(sampling)
            return await super().generate(prompt_ids, max_new_tokens=max_new_tokens)

    def of_training(stats):
        return {k: v for k, v in stats.items() if not k.startswith(("eval/", "tokens_per"))}

    engine = Notes(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    data, sampling = [{"turns": 1, "k": k} for k in range(10)], {"temperature": 1.0, "top_k": 9}
    with collecting(Chat, engine, data, n=2, sampling=sampling) as collector:
        stream = iter(collector)
        first = next(stream)
        before = collector.stats()
        result = collector.evaluate([{"turns": 2}, {"turns": 3}], n=2, temperature=0.0)
        assert (result["group"] % 1_000_000).tolist() == [0] * 4 + [1] * 6
        assert result["next", "reward"].sum() == 10
        after = collector.stats()
        assert after["eval/accepted"] == after["eval/started"] == 4
        assert of_training(after) == of_training(before)
        second = next(stream)
    assert played(first) + played(second) == [0, 1, 2, 3]
    assert [a["temperature"] for a in asked] == [1.0] * 2 + [0.0] * 10 + [1.0] * 2
    assert {a["top_k"] for a in asked} == {9}  # an evaluation sets only what it is given
    with pytest.raises(RuntimeError, match="shut down"):
        collector.evaluate(data)


def test_an_evaluation_that_can_only_fail_says_so(engine):
    broken = [{"fail_at": 1, "error": OSError("gone")}] * 3
    with collecting(Chat, engine, n=2, max_consecutive_failures=3) as collector:
        with pytest.raises(RuntimeError, match=r"no episode of the evaluation.*OSError: gone"):
            collector.evaluate(broken[:2])
        with pytest.raises(RuntimeError, match=r"3 episodes in a row were rejected.*gone"):
            collector.evaluate(broken)
        kept = collector.evaluate([*broken[:1], {"turns": 1}])
        assert kept["data"] == [{"turns": 1}]
        assert collector.stats()["eval/rejected/OSError"] == 6


def test_degenerate_behaviour_shows_in_the_statistics(tokenizer):
    """Why accepted episodes ended, since the beginning; how long they are, in the last batch."""
    answers = itertools.cycle([[5, tokenizer.eos_token_id], [5] * 8])
    engine = ScriptedEngine(tokenizer, lambda prompt: next(answers))
    data = [{"turns": 3}, {"turns": 1}, {"turns": 1, "fail_at": 1, "error": OSError()}]
    limits = Limits(max_response_tokens=4, max_turns=2)
    with collecting(Chat, engine, data, n=2, max_concurrency=1, limits=limits) as collector:
        assert collector.stats()["turns_per_episode"] == collector.stats()["tokens_per_turn"] == 0
        stop, turns, tokens = Counter(), [], []
        for _, batch in zip(range(3), collector, strict=False):
            stop.update(reason for reason in batch["stop_reason"] if reason)
            turns.append(len(batch) / 2)
            tokens.append(sum(map(len, lists(batch, "tokens", "response"))) / len(batch))
            stats = collector.stats()
            assert {k[5:]: v for k, v in stats.items() if k.startswith("stop/")} == dict(stop)
            assert stats["turns_per_episode"] == pytest.approx(turns[-1])
            assert stats["tokens_per_turn"] == pytest.approx(tokens[-1])
        assert len(set(turns)) > 1 or len(set(tokens)) > 1
        collector.evaluate([{"turns": 1}], max_new_tokens=4)
        assert sum(v for k, v in collector.stats().items() if k.startswith("eval/stop/")) == 1
        state = collector.state_dict()
    with collecting(Chat, engine, data, n=2) as collector:
        collector.load_state_dict(state)
        assert collector.stats()["stop/max_response_tokens"] == stop["max_response_tokens"] > 0


@examples(20, few=6, phases=PHASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    items=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["", "", "fail", "hang"]), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
    group_size=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["drop", "keep"]),
    staleness=st.sampled_from([None, 1]),
    retries=st.integers(0, 1),
    on_timeout=st.sampled_from(["reject", "mask"]),
)
def test_no_episode_is_lost_or_counted_twice(
    tokenizer, idle_clock, items, group_size, policy, staleness, retries, on_timeout
):
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    data = [
        {"turns": turns, "k": k}
        | ({"fail_at": at, "error": OSError()} if how == "fail" else {})
        | ({"hang_at": at} if how == "hang" else {})
        for k, (turns, how, at) in enumerate(items)
    ]
    limits = Limits(turn_timeout=LIMIT, on_timeout=on_timeout)
    options = {"n": 2 * group_size, "group_size": group_size, "incomplete_groups": policy}
    options |= {"cycle": False, "max_staleness": staleness, "max_consecutive_failures": 10_000}
    with collecting(Chat, engine, data, limits=limits, max_retries=retries, **options) as collector:
        items_played = Counter()
        for batch in collector.iterator():
            if staleness is not None:
                engine.update_weights(None)
            ends = batch["next", "done"].flatten()
            assert int(ends.sum()) == len(batch["collector", "traj_ids"].unique())
            ended = [k for k, last in zip(played(batch), ends, strict=True) if last]
            assert not items_played.keys() & set(ended)
            items_played.update(ended)
    stats = collector.stats()
    assert balanced(stats, running=0)
    assert stats["accepted"] == sum(items_played.values())
    expected = {}
    for k, (turns, how, at) in enumerate(items):
        # A turn that hangs is cut, and masked, unless it is the first.
        masks = on_timeout == "mask" and at > 1
        lost = at <= turns and (how == "fail" or (how == "hang" and not masks))
        if not lost:
            expected[k] = group_size
    assert dict(items_played) == expected


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("staleness", [None, 1])
def test_a_restarted_run_neither_repeats_nor_skips_items(engine, shuffle, staleness):
    data = [{"turns": 1, "k": k, "sleep": 0.001 * (k % 3)} for k in range(12)]
    options = {"shuffle": shuffle, "cycle": False, "max_staleness": staleness}
    with collecting(Chat, engine, data, n=3, **options) as first:
        stream = iter(first)
        seen = played(next(stream)) + played(next(stream))
        state = first.state_dict()
    with collecting(Chat, engine, data, n=3, **options) as second:
        second.load_state_dict(state)
        assert sorted(played_to_the_end(second, seen)) == list(range(12))
        assert second.stats()["accepted"] == 12


def test_batches_of_a_few_more_episodes_do_not_use_up_the_next(engine):
    """Two groups of which one is short, then a third: five episodes in place of four."""
    options = {"group_size": 2, "max_staleness": 0, "incomplete_groups": "keep"}
    env = failing(lambda k, _: k % 4 == 0)
    with collecting(env, engine, n=4, max_concurrency=1, **options) as collector:
        batches = collector.iterator()
        for _ in range(12):
            assert len(next(batches)) >= 4
            engine.update_weights(None)
        assert balanced(collector.stats())


def test_the_ledger_is_linear_in_the_conversation(tokenizer):
    """Counted in tokens that a line holds, not in time."""
    engine = ScriptedEngine(tokenizer, lambda prompt: [5, tokenizer.eos_token_id])
    for turns in (8, 64):
        batch, _ = first_batch(Chat, engine, [{"turns": turns}])
        prompts = batch.get(("tokens", "prompt"), as_list=True)
        assert len({prompt.untyped_storage().data_ptr() for prompt in prompts}) == 1
        assert prompts[0].untyped_storage().nbytes() == 8 * len(prompts[-1])
