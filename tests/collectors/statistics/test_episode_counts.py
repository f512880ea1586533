"""What one sees of a run: counters, rates, how old tokens are, a bar."""

from __future__ import annotations

import asyncio

import pytest

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting
from tests.collectors.scripted import ScriptedEngine
from tests.tiers import first_fast
from torchrl_mt.collectors.episode import Episode, Turn
from torchrl_mt.collectors.statistics import episode_counts
from torchrl_mt.engines import Completion


def episode(traj_id, *versions):
    """An episode of one turn whose tokens were sampled under these versions."""
    answer = Completion([5] * len(versions), [0.0] * len(versions), list(versions), "stop")
    return Episode({}, traj_id=traj_id, turns=[Turn([1], answer)])


def test_staleness_is_of_the_oldest_token_over_the_last_batch():
    count = episode_counts.EpisodeCounts()
    batches = [(7, [episode(0, 1, 2)]), (9, [episode(1, 3, 9), episode(2, 8), episode(3, 9)])]
    for version, episodes in batches:
        for one in episodes:
            count.start(one)
        count.accept(episodes, version=version)
    rates = count.rates()
    assert rates["staleness/mean"] == (6 + 1 + 0) / 3
    assert rates["staleness/max"] == 6


def test_tokens_per_second_are_of_accepted_episodes_since_the_first_began(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(episode_counts.time, "monotonic", lambda: clock[0])
    count = episode_counts.EpisodeCounts()
    assert count.rates()["tokens_per_second"] == 0
    first, second = episode(0, 0, 0, 0), episode(1, 0)
    count.start(first)
    clock[0] += 2
    count.start(second)
    count.accept([first])
    count.reject([second], "cancelled")
    clock[0] += 1
    assert count.rates()["tokens_per_second"] == 1.0


def test_a_bar_moves_with_the_episodes(engine, capsys):
    options = {"n": 3, "total_episodes": 6, "progress": True}
    with collecting(Chat, engine, [{"turns": 2}], **options) as collector:
        assert len(collector) == len(list(collector)) == 2
    shown = capsys.readouterr().err
    for part in ("6/6", "reward=2", "rejected=0"):
        assert part in shown


def test_a_run_without_an_end_has_no_length(engine):
    with collecting(Chat, engine, n=3) as collector:
        with pytest.raises(TypeError, match="no length"):
            len(collector)
        assert collector


@pytest.mark.parametrize("number", first_fast([300, 3000]))
def test_thousands_of_episodes_run_at_once(tokenizer, number):
    class Waits(ScriptedEngine):
        """Answers nobody before all have asked."""

        async def generate(self, prompt_ids, **arguments):
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            while self.most_running < number:
                await asyncio.sleep(0.01)
            return Completion([5, tokenizer.eos_token_id], [0.0, 0.0], [0, 0], "stop")

    engine = Waits(tokenizer, lambda prompt: [])
    with collecting(Chat, engine, n=number) as collector:
        assert len(next(iter(collector))) == number
        assert collector.stats()["rejected"] == 0
