"""Episodes that are interrupted are played again, whatever is done about failures."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from tests.collectors.chats import Chat
from tests.collectors.runs import collecting, failed_run, played_to_the_end
from torchrl_mt.collectors.scheduling.groups import Interrupted

OPTIONS = {"n": 4, "group_size": 2, "max_consecutive_failures": 1, "cycle": False}


class Breaks(Chat):
    """The second member's episode is interrupted the first ``breaks`` times that an item is played."""

    started: ClassVar[Counter] = Counter()

    async def step(self, response):
        key = self.data["k"]
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
    data = [{"k": k, "breaks": k} for k in range(4)]
    options = {"incomplete_groups": incomplete, "max_staleness": staleness, **OPTIONS}
    with collecting(Breaks, engine, data, **options) as collector:
        played = Counter(played_to_the_end(collector))
        stats = collector.stats()
    assert played == dict.fromkeys(range(4), 2)
    assert stats["rejected"] == stats["rejected/Interrupted"] == stats["started"] - 8 >= 6


def test_an_item_that_is_always_interrupted_ends_the_run_by_its_name(engine):
    data, match = [{"k": "poison", "breaks": 1000}], r"interrupted whenever .* is gone.*poison"
    _, stats = failed_run(match, Breaks, engine, data, **OPTIONS)
    assert stats["started"] == stats["rejected"] >= 2 * 17
