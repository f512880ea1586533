"""What would let a run learn nothing is an error or is said, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.collectors.chats import Chat
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import Limits, MultiTurnCollector


@pytest.fixture
def make(tokenizer, caplog):
    """Makes collectors over an engine that answers as long as it is told, in turn."""
    caplog.set_level(logging.WARNING, "torchrl_mt")
    made = []

    def make(env, lengths, data=None, **kwargs):
        lengths = iter(lengths)
        engine = ScriptedEngine(
            tokenizer, lambda prompt: [5] * (next(lengths) - 1) + [tokenizer.eos_token_id]
        )
        made.append(MultiTurnCollector(env, engine, data, **kwargs))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


def forever(*lengths: int) -> Iterator[int]:
    while True:
        yield from lengths


def said(caplog, what):
    return [r.getMessage() for r in caplog.records if what in r.getMessage()]


class BreaksLater(Chat):
    """Judges the first answers, as many as the class is told."""

    left = 0

    async def step(self, response):
        type(self).left -= 1
        if self.left < 0:
            raise OSError("no judge")
        return await super().step(response)


CUT = Limits(max_response_tokens=3)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_step_that_never_succeeds_ends_the_run_however_many_episodes_are_cut(make, retries):
    collector = make(
        *(Chat, forever(9, 9, 2), [{"fail_at": 1, "error": OSError("no judge")}]),
        episodes_per_batch=2,
        limits=CUT,
        max_retries=retries,
        max_consecutive_failures=4,
    )
    with pytest.raises(
        RuntimeError, match=r"4 episodes in a row.*any was rewarded.*OSError: no judge"
    ):
        list(islice(collector, 50))


def test_once_an_answer_was_judged_any_episode_that_ends_interrupts_the_failures(make):
    class Once(BreaksLater):
        left = 1

    # One episode is judged, then one of two fails and the other is cut.
    collector = make(
        Once, [2, *[9, 2] * 20], episodes_per_batch=1, limits=CUT, max_consecutive_failures=2
    )
    stream = iter(collector)
    for _ in range(10):
        next(stream)
    assert collector.stats()["rejected/OSError"] > 2


def test_an_episode_that_was_judged_and_then_refused_counts_as_judged(make):
    class Once(BreaksLater):
        left = 1

    collector = make(
        Once,
        [2, *[9, 2] * 20],
        episodes_per_batch=1,
        limits=CUT,
        max_consecutive_failures=2,
        accept=lambda td: td["stop_reason"][-1] != "done",
    )
    stream = iter(collector)
    for _ in range(10):
        next(stream)


def test_a_workflow_that_never_returns_is_counted_alike(make):
    class Never:
        async def arun_episode(self, engine, data):
            answer = await engine.generate([4] * 6)
            if len(answer.token_ids) == 2:
                raise OSError("no judge")
            await engine.generate([4] * 9)  # raises LimitReached

    collector = make(
        Never(),
        forever(3, 3, 2),
        episodes_per_batch=1,
        limits=Limits(max_episode_tokens=9),
        max_consecutive_failures=3,
    )
    with pytest.raises(RuntimeError, match=r"3 episodes in a row"):
        list(islice(collector, 50))


@pytest.mark.parametrize(
    ("limits", "sampling", "name", "remedy"),
    [
        (Limits(max_response_tokens=3), {}, "max_response_tokens=3", "max_new_tokens"),
        (None, {"max_new_tokens": 4}, "max_response_tokens=4", "max_new_tokens"),
        (Limits(max_episode_tokens=8), {}, "max_episode_tokens=8", "shorten the prompts"),
    ],
)
def test_cuts_in_the_first_turn_are_said_once(make, caplog, limits, sampling, name, remedy):
    collector = make(Chat, forever(9), episodes_per_batch=10, limits=limits, sampling=sampling)
    stream = iter(collector)
    for _ in range(3):
        next(stream)
    (message,) = said(caplog, "first turn")
    assert "10 of the 10 episodes" in message
    assert name in message
    assert remedy in message


@pytest.mark.parametrize(("short", "warned"), [(1, False), (0, True)])
def test_nine_in_ten_may_be_cut_without_a_word(make, caplog, short, warned):
    lengths = [2] * short + [9] * (10 - short)
    next(iter(make(Chat, lengths, episodes_per_batch=10, limits=CUT)))
    assert bool(said(caplog, "first turn")) is warned


def test_episodes_that_are_cut_later_are_not_said(make, caplog):
    collector = make(
        *(Chat, [2, 9] * 10, [{"turns": 3}]), episodes_per_batch=10, max_concurrency=1, limits=CUT
    )
    next(iter(collector))
    assert collector.stats()["stop/max_response_tokens"] == 10
    assert not said(caplog, "first turn")


@pytest.mark.parametrize(
    ("concurrency", "staleness", "usable"),
    [(None, None, None), (4, None, None), (5, None, 4), (8, 1, None), (9, 1, 8), (5, 0, 4)],
)
def test_concurrency_that_batches_cannot_use_is_said(make, caplog, concurrency, staleness, usable):
    make(
        *(Chat, forever(2)),
        episodes_per_batch=4,
        max_concurrency=concurrency,
        max_staleness=staleness,
    )
    messages = said(caplog, "max_concurrency")
    if usable is None:
        assert not messages
    else:
        (message,) = messages
        assert f"max_concurrency={concurrency}" in message
        assert "episodes_per_batch=4" in message
        assert f"at most {usable} " in message
