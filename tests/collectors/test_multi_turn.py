from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter

import pytest
import torch
from torchrl.collectors import BaseCollector
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber, TextEnv, TextStep

from .scripted import ScriptedEngine


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
    assert Counter(batch["group"].tolist()) == {1: 6, 2: 6}
    assert stats["rejected/OSError"] == 1
    assert stats["rejected"] == 1 + stats["rejected/incomplete_group"]
    assert stats["accepted"] == 6
    assert stats["accepted"] + stats["rejected"] == stats["started"]


@pytest.mark.parametrize("fast", [True, False])
def test_siblings_are_rejected_with_their_group_finished_or_not(guesser, fast):
    class SecondFails(Talk):
        made = 0

        def __init__(self):
            type(self).made += 1
            self.rank = (type(self).made - 1) % 3

        async def step(self, response):
            if self.rank == 1 and self.made <= 3:
                await asyncio.sleep(0.05)  # time enough for fast siblings to finish
                raise OSError("no tool")
            await asyncio.sleep(0 if fast or self.made > 3 else 3600)
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
        MultiTurnCollector(Flaky, guesser, data, episodes_per_batch=8) as collector,
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
                time.sleep(0.5)
            return super().step(response)

    data = [{"turns": 3}, *[{"turns": 2}] * 19]
    with MultiTurnCollector(Slow, guesser, data, episodes_per_batch=20) as collector:
        done_before_the_slow_one = []
        play = collector._play

        async def watched(episode):
            await play(episode)
            done_before_the_slow_one.append(episode.data["turns"])

        collector._play = watched
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
    assert torch.equal(batch["collector", "traj_ids"], expected["collector", "traj_ids"])


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
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError, match="shut down"):
        next(iter(collector))


def test_an_interrupt_cancels_what_runs(tokenizer):
    class Hangs(Talk):
        async def step(self, response):
            await asyncio.sleep(3600)

    engine = ScriptedEngine(tokenizer, lambda _: [8, tokenizer.eos_token_id])
    collector = MultiTurnCollector(Hangs, engine, [{"turns": 2}], episodes_per_batch=4)
    timer = threading.Timer(0.3, lambda: signal_main(engine))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(collector))
    stats = collector.stats()
    assert stats["rejected/cancelled"] == stats["started"] == 4
    collector.shutdown()


def signal_main(engine):
    """Press Ctrl-C once every episode waits for its environment."""
    import os
    import signal

    deadline = time.monotonic() + 10
    while len(engine.calls) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_with_the_real_engine(model, tokenizer):
    engine = TransformersEngine(model, tokenizer, page_size=8)
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
    with pytest.raises(TypeError, match=r"policy must be an engine .* got Qwen2ForCausalLM"):
        MultiTurnCollector(GuessNumber, model, episodes_per_batch=1)
    with pytest.raises(TypeError, match=r"env must be a TextEnv, .* got str"):
        MultiTurnCollector("GuessNumber", guesser, episodes_per_batch=1)


def test_an_opening_without_room_for_a_response_is_refused(guesser):
    with (
        MultiTurnCollector(
            GuessNumber, guesser, episodes_per_batch=1, limits=Limits(max_episode_tokens=6)
        ) as collector,
        pytest.raises(RuntimeError, match="raise the limit or shorten the prompt"),
    ):
        next(iter(collector))
