"""Episodes that are interrupted are played again, whatever is done about failures."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from tests.collectors.chats import Chat
from torchrl_mt.collectors import CollectorOptions, MultiTurnCollector
from torchrl_mt.collectors.scheduling.groups import Interrupted

OPTIONS = {"group_size": 2, "episodes_per_batch": 4, "max_consecutive_failures": 1}


class Breaks(Chat):
    """The second member's episode is interrupted the first ``breaks`` times that an item is played."""

    started: ClassVar[Counter] = Counter()

    async def step(self, response):
        key = self.data["key"]
        self.started[key] += 1
        if self.started[key] % 2 == 0 and self.started[key] // 2 <= self.data["breaks"]:
            raise Interrupted("the place where it was played is gone.")
        return await super().step(response)


@pytest.fixture(autouse=True)
def unbroken():
    Breaks.started.clear()


@pytest.mark.parametrize("incomplete", ["drop", "keep", "refill", "requeue"])
@pytest.mark.parametrize("staleness", [None, 1])
def test_the_items_of_interrupted_groups_are_played_again(engine, incomplete, staleness):
    data = [{"key": k, "breaks": k} for k in range(4)]
    with MultiTurnCollector(
        *(Breaks, engine, data),
        options=CollectorOptions(cycle=False, incomplete_groups=incomplete),
        max_staleness=staleness,
        **OPTIONS,
    ) as collector:
        batches = []
        for batch in collector:
            batches.append(batch)
            collector.update_policy_weights_()
        stats = collector.stats()
    played = Counter(step["data"]["key"] for batch in batches for step in batch.unbind(0))
    assert played == dict.fromkeys(range(4), 2)
    assert stats["rejected"] == stats["rejected/Interrupted"] == stats["started"] - 8 >= 6


def test_an_item_that_is_always_interrupted_ends_the_run_by_its_name(engine):
    data = [{"key": "poison", "breaks": 1000}]
    with MultiTurnCollector(
        Breaks, engine, data, options=CollectorOptions(cycle=False), **OPTIONS
    ) as collector:
        with pytest.raises(RuntimeError, match=r"interrupted whenever .* is gone.*poison"):
            next(iter(collector))
        stats = collector.stats()
    assert stats["started"] == stats["rejected"] >= 2 * 17
