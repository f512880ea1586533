"""What an episode's engine allows, remembers and asks for."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting, failed_run, first_batch
from tests.collectors.scripted import ScriptedEngine
from tests.idle_clock import LIMIT, hang
from tests.tiers import few_or_many
from torchrl_mt.collectors import LimitReached, Limits
from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.recorder import Recorder

ONE = {"max_consecutive_failures": 1}
TWO_TURNS = [{"turns": 2}]


class Asked(ScriptedEngine):
    """Remembers the arguments of every call; slow from call ``slow_from`` on."""

    slow_from = 10**9

    def __init__(self, tokenizer, rule):
        super().__init__(tokenizer, rule)
        self.asked = []

    async def generate(self, prompt_ids, *, max_new_tokens=None, **sampling):
        self.asked.append({"max_new_tokens": max_new_tokens, **sampling})
        if len(self.asked) > self.slow_from:
            await hang()
        return await super().generate(prompt_ids, max_new_tokens=max_new_tokens, **sampling)


@pytest.fixture
def engine(tokenizer):
    return Asked(tokenizer, lambda prompt: [prompt[-1] + 1, tokenizer.eos_token_id])


class Play:
    """Three calls; a limit is dealt with by ``caught``."""

    def __init__(self, caught):
        self.caught = caught

    async def arun_episode(self, engine, data):
        prompt = [5, 6]
        try:
            for _ in range(3):
                answer = await engine.generate(prompt)
                prompt = [*prompt, *answer.token_ids, 7]
        except LimitReached as limit:
            self.limit = limit
            return await self.caught(engine)
        return 1.0


async def give_up(engine):
    return 0.25


async def give_up_late(engine):
    try:
        await hang()
    except asyncio.CancelledError:
        return 0.25


@pytest.mark.parametrize("first", [0, 1])
def test_a_time_limit_that_a_workflow_caught_is_no_reward(engine, first, idle_clock):
    engine.slow_from = first
    limits = Limits(turn_timeout=LIMIT)
    _, stats = failed_run("turn_timeout", Play(give_up), engine, **ONE, limits=limits)
    assert stats["rejected/turn_timeout"] == 1


def test_a_time_limit_counts_even_if_a_later_call_is_answered(engine, idle_clock):
    class Retries:
        async def arun_episode(self, recorder, data):
            engine.slow_from = 0
            try:
                await recorder.generate([5, 6])
            except LimitReached:
                engine.slow_from = 10**9
            await recorder.generate([5, 6])
            return 1.0

    failed_run("turn_timeout", Retries(), engine, **ONE, limits=Limits(turn_timeout=LIMIT))


def test_a_workflow_that_swallows_its_cancellation_is_out_of_time_all_the_same(engine, idle_clock):
    class Swallows:
        async def arun_episode(self, engine, data):
            await engine.generate([5, 6])
            return await give_up_late(engine)

    failed_run("episode_timeout", Swallows(), engine, **ONE, limits=Limits(episode_timeout=LIMIT))


def test_an_environment_that_swallows_its_cancellation_has_answered_too_late(engine, idle_clock):
    class Swallows(Chat):
        async def step(self, response):
            if self.turn == 1:
                with contextlib.suppress(asyncio.CancelledError):
                    await hang()
            return await super().step(response)

    limits = Limits(episode_timeout=LIMIT, on_timeout="mask")
    batch, _ = first_batch(Swallows, engine, TWO_TURNS, **ONE, limits=limits)
    assert batch["stop_reason"] == ["episode_timeout"]
    assert batch["next", "truncated"].all()
    assert not batch["valid"].any()


@pytest.mark.parametrize(
    ("reason", "most", "turns"), [("max_turns", 1, 1), ("max_episode_tokens", 6, 2)]
)
def test_a_limit_that_a_workflow_caught_is_why_it_ended_and_its_reward_stands(
    engine, reason, most, turns
):
    player = Play(give_up)
    batch, _ = first_batch(player, engine, **ONE, limits=Limits(**{reason: most}))
    assert player.limit.reason.value == reason
    assert batch["stop_reason"] == [*[""] * (turns - 1), reason]
    assert batch["next", "reward"].flatten().tolist() == [*[0.0] * (turns - 1), 0.25]
    assert batch["next", "truncated"].flatten().tolist() == [*[False] * (turns - 1), True]
    assert not batch["next", "terminated"].any()


def test_a_limit_that_a_workflow_found_a_way_around_is_not_why_it_ended(engine):
    class Shortens:
        async def arun_episode(self, engine, data):
            with pytest.raises(LimitReached):
                await engine.generate([5] * 8)
            await engine.generate([5] * 4)
            return 1.0

    batch, _ = first_batch(Shortens(), engine, **ONE, limits=Limits(max_episode_tokens=8))
    assert batch["stop_reason"] == ["done"]
    assert batch["next", "terminated"].all()


def test_a_call_that_was_under_way_is_no_way_around_a_limit(engine):
    class AtOnce:
        async def arun_episode(self, engine, data):
            first = asyncio.ensure_future(engine.generate([5]))
            await asyncio.sleep(0)
            with pytest.raises(LimitReached):
                await engine.generate([6])
            await first
            return 1.0

    batch, _ = first_batch(AtOnce(), engine, **ONE, limits=Limits(max_turns=1))
    assert batch["stop_reason"] == ["max_turns"]


# Sampling


@pytest.mark.parametrize(
    ("limits", "asked", "budget"),
    [
        (Limits(), 8, 8),
        (Limits(max_response_tokens=4), 8, 4),
        (Limits(max_response_tokens=9), 8, 8),
        (Limits(max_response_tokens=9), None, 9),
    ],
)
def test_max_new_tokens_among_the_sampling_params_is_a_budget(engine, limits, asked, budget):
    options = {"limits": limits, "sampling": {"max_new_tokens": asked}}
    with collecting(Chat, engine, TWO_TURNS, **ONE, **options) as collector:
        next(iter(collector))
        assert {call["max_new_tokens"] for call in engine.asked} == {budget}
        engine.asked.clear()
        collector.evaluate(TWO_TURNS, max_new_tokens=3)
        assert {call["max_new_tokens"] for call in engine.asked} == {3}


def test_an_answer_cut_by_max_new_tokens_has_reached_the_limit_of_a_response(engine):
    options = {"limits": Limits(max_episode_tokens=500), "sampling": {"max_new_tokens": 1}}
    batch, _ = first_batch(Chat, engine, TWO_TURNS, **options)
    assert batch["stop_reason"] == ["max_response_tokens"]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
    ],
)
def test_bad_sampling_params_are_named(engine, sampling, message):
    failed_run(message, Chat, engine, **ONE, sampling=sampling)


def seeds(engine, seed, **kwargs):
    engine.asked.clear()
    options = {"n": 12, "group_size": 3, "sampling": {"seed": seed}, **kwargs}
    first_batch(Chat, engine, TWO_TURNS, **options)
    return [call["seed"] for call in engine.asked]


def test_a_seed_makes_a_run_repeat_and_no_two_calls_alike(engine):
    first = seeds(engine, 7)
    assert len(set(first)) == len(first) == 24
    assert all(0 <= seed < 2**31 for seed in first)
    # Whatever order the episodes are played in.
    assert sorted(seeds(engine, 7, max_concurrency=1)) == sorted(first)
    assert not set(seeds(engine, 8)) & set(first)


def test_a_call_may_have_a_seed_of_its_own(engine):
    class Seeds:
        async def arun_episode(self, engine, data):
            await engine.generate([5], seed=3)
            await engine.generate([5], seed=None)
            await engine.generate([5])
            return 1.0

    first_batch(Seeds(), engine, sampling={"seed": 7})
    assert [call["seed"] for call in engine.asked][:2] == [3, None]
    assert engine.asked[2]["seed"] not in (3, None, 7)


def line_of(turn):
    return [*turn.prompt_ids, *turn.completion.token_ids]


def longest_before(turns):
    """The slow and obvious parents: of all turns that a prompt begins with, the longest and last."""
    lines = [line_of(turn) for turn in turns]
    return [
        max(
            (j for j in range(k) if list(turn.prompt_ids)[: len(lines[j])] == lines[j]),
            key=lambda j: (len(lines[j]), j),
            default=-1,
        )
        for k, turn in enumerate(turns)
    ]


@few_or_many(40, 100)
def test_a_parent_is_the_longest_line_that_a_call_goes_on_from(tokenizer, examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.randoms(use_true_random=False))
    def check(rng):
        asyncio.run(play_and_drop(tokenizer, rng))

    check()


async def play_and_drop(tokenizer, rng):
    """Calls go on from any line or ask anew, end in any order, and some are dropped."""
    gates = []

    class Gated(ScriptedEngine):
        async def generate(self, prompt_ids, **sampling):
            gates.append(asyncio.Event())
            await gates[-1].wait()
            return await super().generate(prompt_ids, **sampling)

    engine = Gated(tokenizer, lambda prompt: [rng.randrange(2)])
    recorder = Recorder(engine, Episode(None), Limits())
    turns = recorder.episode.turns
    for _ in range(rng.randint(1, 5)):
        lines = [[0], *(line_of(turn) for turn in turns)]
        asked = [rng.choice(lines) + [0] * rng.randrange(2) for _ in range(rng.randint(1, 3))]
        first = len(gates)
        calls = [asyncio.ensure_future(recorder.generate(prompt)) for prompt in asked]
        while len(gates) < first + len(calls):
            await asyncio.sleep(0)
        for k in rng.sample(range(len(calls)), len(calls)):
            gates[first + k].set()
            await calls[k]
            assert [turn.parent for turn in turns] == longest_before(turns)
        if rng.random() < 0.5:
            gone = rng.choice(turns)
            children = [turn for turn in turns if turns[turn.parent] is gone and turn.parent >= 0]
            recorder.drop(gone)
            assert [turn.parent for turn in turns] == longest_before(turns)
            for child in children:  # the tokens of its parent are still those of a turn
                assert line_of(turns[child.parent]) == line_of(gone)
