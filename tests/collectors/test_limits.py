from __future__ import annotations

import pytest

from torchrl_mt.collectors import Limits, StopReason


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
