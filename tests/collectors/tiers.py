"""How much of a property the tier that runs tries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

slow = pytest.mark.slow
_everything = False


def pytest_configure(config: pytest.Config) -> None:
    """Find out which tier runs; conftest.py imports this."""
    global _everything
    _everything = config.option.markexpr != "not slow"


def examples(few: int, many: int) -> int:
    """So many examples: few in the fast tier, many where everything runs."""
    return many if _everything else few


def but_slow(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """Values of a parameter, of which only the first are in the fast tier."""
    values = list(values)
    return [*values[:fast], *(pytest.param(value, marks=slow) for value in values[fast:])]
