"""What would let a run learn nothing is an error or is said, once."""

from __future__ import annotations

from itertools import cycle, islice, repeat

import pytest

from tests.collectors.chats import Chat, failing
from tests.collectors.runs import collecting, said
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import Limits


@pytest.fixture
def make(tokenizer):
    """Makes collectors over an engine that answers as long as it is told, in turn."""
    made = []

    def make(env, lengths, data=None, **options):
        lengths = iter(lengths)

        def answer(prompt):
            return [5] * (next(lengths) - 1) + [tokenizer.eos_token_id]

        made.append(collecting(env, ScriptedEngine(tokenizer, answer), data, **options))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()


CUT = Limits(max_response_tokens=3)
JUDGES_ONE = {"limits": CUT, "max_consecutive_failures": 2}


def judges_one():
    """Judges the first answer and no other."""
    return failing(lambda k, _: k > 1, "no judge")


@pytest.mark.parametrize("retries", [0, 1])
def test_a_step_that_never_succeeds_ends_the_run_however_many_episodes_are_cut(make, retries):
    data = [{"fail_at": 1, "error": OSError("no judge")}]
    options = {"limits": CUT, "max_retries": retries, "max_consecutive_failures": 4}
    collector = make(Chat, cycle([9, 9, 2]), data, n=2, **options)
    said = r"4 episodes in a row.*any was rewarded.*OSError: no judge"
    with pytest.raises(RuntimeError, match=said):
        list(islice(collector, 50))


def test_once_an_answer_was_judged_any_episode_that_ends_interrupts_the_failures(make):
    # One episode is judged, then one of two fails and the other is cut.
    collector = make(judges_one(), [2, *[9, 2] * 20], **JUDGES_ONE)
    assert len(list(islice(collector, 10))) == 10
    assert collector.stats()["rejected/OSError"] > 2


def test_an_episode_that_was_judged_and_then_refused_counts_as_judged(make):
    def accept(td):
        return td["stop_reason"][-1] != "done"

    collector = make(judges_one(), [2, *[9, 2] * 20], accept=accept, **JUDGES_ONE)
    assert len(list(islice(collector, 10))) == 10


def test_a_workflow_that_never_returns_is_counted_alike(make):
    class Never:
        async def arun_episode(self, engine, data):
            answer = await engine.generate([4] * 6)
            if len(answer.token_ids) == 2:
                raise OSError("no judge")
            await engine.generate([4] * 9)  # raises LimitReached

    options = {"limits": Limits(max_episode_tokens=9), "max_consecutive_failures": 3}
    collector = make(Never(), cycle([3, 3, 2]), **options)
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
    collector = make(Chat, repeat(9), n=10, limits=limits, sampling=sampling)
    assert len(list(islice(collector, 3))) == 3
    (message,) = said(caplog, "first turn")
    assert "10 of the 10 episodes" in message
    assert name in message
    assert remedy in message


@pytest.mark.parametrize(("short", "warned"), [(1, False), (0, True)])
def test_nine_in_ten_may_be_cut_without_a_word(make, caplog, short, warned):
    lengths = [2] * short + [9] * (10 - short)
    next(iter(make(Chat, lengths, n=10, limits=CUT)))
    assert bool(said(caplog, "first turn")) is warned


def test_episodes_that_are_cut_later_are_not_said(make, caplog):
    collector = make(Chat, [2, 9] * 10, [{"turns": 3}], n=10, max_concurrency=1, limits=CUT)
    next(iter(collector))
    assert collector.stats()["stop/max_response_tokens"] == 10
    assert not said(caplog, "first turn")


@pytest.mark.parametrize(
    ("concurrency", "staleness", "usable"),
    [(None, None, None), (4, None, None), (5, None, 4), (8, 1, None), (9, 1, 8), (5, 0, 4)],
)
def test_concurrency_that_batches_cannot_use_is_said(make, caplog, concurrency, staleness, usable):
    make(Chat, repeat(2), n=4, max_concurrency=concurrency, max_staleness=staleness)
    messages = said(caplog, "max_concurrency")
    if usable is None:
        assert not messages
    else:
        (message,) = messages
        assert f"max_concurrency={concurrency}" in message
        assert "episodes_per_batch=4" in message
        assert f"at most {usable} " in message
