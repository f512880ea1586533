"""The two tiers of tests: what the fast one leaves out, and how much less of the rest it tries.

Plain ``pytest`` runs the fast tier; ``pytest -m "slow or not slow"`` runs everything.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import Phase, settings

FEW = 4
"""Examples of a property in the fast tier, if the test does not say."""
_ALL = 5000
"""Tests beyond which a run is one of all, and not of those near a change."""
_tier = {"is_fast": False}


def pytest_configure(config: pytest.Config) -> None:
    """Find out which tier runs, before the tests are imported; tests/conftest.py imports this."""
    _tier["is_fast"] = config.option.markexpr == "not slow"
    if _tier["is_fast"] and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each test with one of its parameters if all tests are run; tests/conftest.py imports this.

    Which one depends on the test's name, so that all parameters are among those of some tests.
    """
    if not _tier["is_fast"] or len(items) < _ALL:
        return
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            by_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {same[zlib.crc32(test.encode()) % len(same)] for test, same in by_test.items()}
    left_out = {item for same in by_test.values() for item in same} - kept
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def in_fast_tier(few: int, many: int) -> int:
    """``few`` in the fast tier, ``many`` where everything runs."""
    return few if _tier["is_fast"] else many


# ---- properties ---------------------------------------------------------------------------------


def examples(many: int | None = None, few: int = FEW, **kwargs: Any) -> settings:
    """Settings of a property test: how many examples it tries; by default as the profile says."""
    many = many or settings.default.max_examples
    return settings(deadline=None, max_examples=in_fast_tier(min(few, many), many), **kwargs)


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """A test that is given ``examples``: few in the fast tier, and once more many in the slow one."""
    return pytest.mark.parametrize("examples", [few, slow(many)])


def runs(many: int) -> settings:
    """Settings of a state machine that is run ``many`` times."""
    return examples(many, stateful_step_count=20, phases=[Phase.explicit, Phase.generate])


# ---- tables of parameters -----------------------------------------------------------------------


def slow(*values: Any) -> Any:
    """Parameters of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first_fast(values: Iterable[Any], number: int = 1) -> list[Any]:
    """Values of a parameter; only the first are in the fast tier."""
    values = list(values)
    return [*values[:number], *map(slow, values[number:])]


def some_fast(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several; only those among ``fast`` are in the fast tier."""
    return [x if x in fast else slow(*(x if isinstance(x, tuple) else [x])) for x in values]


def pairs(ones: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """All pairs; each of ``ones`` is in the fast tier once, with the next of ``others``."""
    others = list(others)
    return [
        (one, other) if j == i % len(others) else slow(one, other)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]
