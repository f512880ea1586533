from __future__ import annotations

import pytest

from torchrl_mt.collectors import Limits, StopReason


@pytest.mark.parametrize("name", ["max_turns", "max_response_tokens", "max_episode_tokens"])
def test_a_limit_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, or None for no limit, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize(
    ("limits", "budget", "reached"),
    [
        (Limits(), None, StopReason.MAX_RESPONSE_TOKENS),
        (Limits(max_response_tokens=4), 4, StopReason.MAX_RESPONSE_TOKENS),
        (Limits(max_episode_tokens=30), 10, StopReason.MAX_EPISODE_TOKENS),
        (Limits(None, 4, 30), 4, StopReason.MAX_RESPONSE_TOKENS),
        (Limits(None, 15, 30), 10, StopReason.MAX_EPISODE_TOKENS),
        (Limits(None, 15, 20), 0, StopReason.MAX_EPISODE_TOKENS),
    ],
)
def test_the_tighter_limit_sets_the_budget(limits, budget, reached):
    assert limits.response_budget(20) == (budget, reached)


def test_only_the_environments_end_is_no_truncation():
    assert [reason for reason in StopReason if not reason.truncated] == [StopReason.DONE]


def test_what_becomes_of_a_timeout_is_one_of_two_things():
    with pytest.raises(ValueError, match=r"on_timeout must be one of .*, got 'keep'"):
        Limits(on_timeout="keep")
