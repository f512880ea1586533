"""Warnings about runs that go on but teach little: cut answers, stalls, stale episodes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.limits import Limits, StopReason
from torchrl_mt.collectors.scheduling.scheduler import Scheduler
from torchrl_mt.collectors.scheduling.staleness import Lead

__all__ = ["CutWarning", "RunWarnings", "Stall", "warn_of_settings"]

_logger = logging.getLogger("torchrl_mt")

_CUT_SHARE = 0.9
_CUT_REMEDY = {
    StopReason.MAX_RESPONSE_TOKENS: "Raise Limits(max_response_tokens=...), the engine's max_new_tokens "
    "and that of sampling, whichever is lowest, have the prompt ask for shorter answers, or let the "
    'environment see what was cut (Limits(on_cut="continue"))',
    StopReason.MAX_EPISODE_TOKENS: "Raise Limits(max_episode_tokens=...) or the engine's "
    "max_total_tokens, whichever is lower, or shorten the prompts",
}
STALL_SECONDS, BACKGROUND_STALL_SECONDS = 3.0, 60.0
"""Seconds of waiting for new weights before a warning: while iterating, and in the background."""


def warn_of_settings(
    engine: Any, episodes_per_batch: int, max_concurrency: int | None, max_staleness: int | None
) -> None:
    """Warn about a collector's settings that cannot have the intended effect."""
    if max_staleness is not None and getattr(engine, "shares_weights", False):
        _logger.warning(
            "max_staleness=%d lets episodes go on while the policy is trained, but the engine "
            "samples with the very weights that are trained: tokens would be of no known "
            "version. Make the engine with share_weights=False.",
            max_staleness,
        )
    usable = episodes_per_batch * (1 + (max_staleness or 0))
    if max_concurrency is not None and max_concurrency > usable:
        _logger.warning(
            "max_concurrency=%d is more than batches can use: with episodes_per_batch=%d and "
            "max_staleness=%s at most %d episodes run at once. For more, ask for larger batches, or "
            "for a higher max_staleness.",
            max_concurrency,
            episodes_per_batch,
            max_staleness,
            usable,
        )


class CutWarning:
    """Warns once if a limit cuts nearly all episodes of a batch in their first turn.

    The environment never judges such episodes, so there is little to learn from them.
    """

    def __init__(self) -> None:
        self._said = False

    def __call__(self, episodes: Sequence[Episode], limits: Limits) -> None:
        """Check a batch of finished episodes, at least one, against the limits they were played with."""
        cut = Counter(
            episode.stop_reason
            for episode in episodes
            if len(episode.turns) == 1 and episode.stop_reason in _CUT_REMEDY
        )
        if self._said or cut.total() <= _CUT_SHARE * len(episodes):
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
            _CUT_REMEDY[reason],
        )


class Stall:
    """Decides when to warn of a stall: once per stall, after some time.

    Each warning doubles the time, since training may just be slow.

    Args:
        patience: seconds that a stall must last before the first warning.

    Examples:
        >>> stall = Stall(patience=0.0)
        >>> stall.should_warn(True), stall.should_warn(True), stall.should_warn(False)
        (True, False, False)
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._since: float | None = None
        self._told = False

    def should_warn(self, stalled: bool) -> bool:
        """Whether to warn now, given whether the run is stalled at this moment."""
        if not stalled:
            self._since, self._told = None, False
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._told or now - self._since < self.patience:
            return False
        self._told = True
        self.patience *= 2
        return True


class RunWarnings:
    """Warns about a collector that waits for weights, and about one that rejects most as stale."""

    def __init__(self) -> None:
        self._stall = Stall(STALL_SECONDS)
        self._told_stale = False

    def be_patient(self) -> None:
        """Warn of stalls later: a background collector waits whenever training is slow."""
        self._stall = Stall(BACKGROUND_STALL_SECONDS)

    def check(self, scheduler: Scheduler, lead: Lead, version: int) -> None:
        """Check the run at a weight version."""
        allowed = lead.allowed(version)
        if self._stall.should_warn(scheduler.starves and scheduler.begun >= allowed):
            _logger.warning(
                "the collector waits for new weights: with max_staleness=%d and %d updates since it "
                "began, %d episodes of %d a batch may be begun before the next update, and all were "
                "(%d delivered, %d in the batch that is waited for). Call update_policy_weights_() "
                "after each batch, or give a higher max_staleness, or none; if training only takes its "
                "time, all is well.",
                lead.max_staleness,
                lead.updates(version),
                allowed,
                lead.batch_size,
                scheduler.given_out,
                scheduler.ready,
            )
        stale, accepted = scheduler.counts.count("rejected/stale"), scheduler.counts.accepted
        if stale > max(accepted, 2 * lead.batch_size) and not self._told_stale:
            self._told_stale = True
            _logger.warning(
                "%d episodes were rejected as stale and %d delivered: there are more than "
                "max_staleness=%d updates while an episode is played. Update less often, give a higher "
                'max_staleness, or staleness="admission" where older episodes will do.',
                stale,
                accepted,
                lead.max_staleness,
            )
