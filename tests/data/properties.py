"""How much the property tests of this folder try: a little in the fast tier, all of it in the other."""

import pytest
from hypothesis import Phase, settings

FEW = 4
"""Examples in the fast tier."""
_tier = {"is_fast": False}


def set_tier(*, is_fast):
    """Called before the tests are imported."""
    _tier["is_fast"] = is_fast


def few_or(number):
    """``number``, or :data:`FEW` in the fast tier."""
    return min(number, FEW) if _tier["is_fast"] else number


def every(step):
    """1, or ``step`` in the fast tier: which of many similar moments are tried."""
    return step if _tier["is_fast"] else 1


def slow(*values):
    """Parameters of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(number=None, **kwargs):
    """Settings of a property test: ``number`` examples, by default as many as the profile says."""
    number = few_or(number or settings.default.max_examples)
    return settings(deadline=None, max_examples=number, **kwargs)


def runs(number):
    """Settings of a state machine that is run ``number`` times."""
    return examples(number, stateful_step_count=20, phases=[Phase.explicit, Phase.generate])
