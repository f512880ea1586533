"""Tables of parameters of which the fast tier tries a part: every value once, not every combination."""

import pytest


def some(fast, values):
    """All of ``values``; those that are not ``fast`` are slow."""
    return [
        x
        if x in fast
        else pytest.param(*(x if isinstance(x, tuple) else [x]), marks=pytest.mark.slow)
        for x in values
    ]


def pairs(ones, others):
    """All pairs; each of ``ones`` is in the fast tier once, with the next of ``others``."""
    others = list(others)
    return [
        pytest.param(one, other, marks=[] if j == i % len(others) else pytest.mark.slow)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
    ]
