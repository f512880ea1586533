"""A word about limits that leave the environment nothing to say.

Where nearly every episode is cut in its first turn, what the model learns is what a cut is worth.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.limits import Limits, StopReason

__all__ = ["CutWarning"]

_logger = logging.getLogger("torchrl_mt")

_SHARE = 0.9
_REMEDY = {
    StopReason.MAX_RESPONSE_TOKENS: "Raise Limits(max_response_tokens=...), the engine's max_new_tokens "
    "and that of sampling, whichever is lowest, or have the prompt ask for shorter answers",
    StopReason.MAX_EPISODE_TOKENS: "Raise Limits(max_episode_tokens=...) or the engine's "
    "max_total_tokens, whichever is lower, or shorten the prompts",
}


class CutWarning:
    """Says once that nearly all episodes of a batch were cut in their first turn, and by which limit."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, episodes: Sequence[Episode], limits: Limits) -> None:
        """Look at a batch.

        Args:
            episodes: at least one, finished.
            limits: those that they were played within.
        """
        cut = Counter(
            episode.stop_reason
            for episode in episodes
            if len(episode.turns) == 1 and episode.stop_reason in _REMEDY
        )
        if self._said or cut.total() <= _SHARE * len(episodes):
            return
        self._said = True
        reason = cut.most_common(1)[0][0]
        assert reason is not None
        _logger.warning(
            "%d of the %d episodes of a batch were cut in their first turn, most of them by %s=%s: "
            "there is little to learn from what the environment has no say in. %s.",
            cut.total(),
            len(episodes),
            reason.value,
            getattr(limits, reason.value),
            _REMEDY[reason],
        )
