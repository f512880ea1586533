"""Counters of started, accepted and rejected episodes.

``accepted + rejected + running == started`` at any moment and in any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torchrl_mt.collectors.episode import Episode
from torchrl_mt.collectors.workflow import Rejected

__all__ = ["EpisodeCounts"]

_logger = logging.getLogger("torchrl_mt")

_LONG = 60.0
"""Seconds after which a running call is logged."""
_WATCH = 1.0
"""Seconds between checks for long calls."""


class EpisodeCounts:
    """Counters of episodes. Each started episode is settled once: accepted or rejected.

    Examples:
        >>> counts = EpisodeCounts()
        >>> counts.start(episode := Episode(data=None, traj_id=0))
        >>> counts.reject([episode], "cancelled")
        >>> counts.accept([episode])
        >>> counts.stats()["rejected/cancelled"], counts.stats()["accepted"]
        (1, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._running: dict[int, Episode] = {}
        self._logged: set[str] = set()
        self._ages: list[int] = []
        """Ages of the last accepted episodes, see :meth:`Episode.age`."""
        self._last: Counter[str] = Counter()
        """Counts of the last accepted episodes, their turns and their tokens."""
        self._new_tokens = 0
        self._began: float | None = None
        self._seconds: Counter[str] = Counter()
        """Seconds of settled episodes: in all, of the engine, of the environment."""
        self._watched = 0.0
        self.on_reject: Callable[[list[Episode], str], None] | None = None
        """Called with the episodes that :meth:`reject` has counted, and the cause."""

    @property
    def accepted(self) -> int:
        """Number of accepted episodes."""
        return self._counts["accepted"]

    def count(self, name: str) -> int:
        """One of the counters of :meth:`stats`."""
        return self._counts[name]

    def add(self, name: str) -> None:
        """Increment a counter that is not of episodes; its name has a ``/``."""
        with self._lock:
            self._counts[name] += 1

    def start(self, episode: Episode) -> None:
        """Count an episode that begins."""
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
            self._counts["started"] += 1
            self._running[episode.traj_id] = episode

    def accept(self, episodes: Iterable[Episode], *, version: int = 0) -> None:
        """Count delivered episodes, at the weight version of the delivery."""
        # Outside the lock, which is needed to begin episodes.
        facts = [
            (
                episode,
                Counter(
                    accepted=1,
                    turns=len(episode.turns),
                    tokens=episode.num_tokens,
                    cut=sum(t.completion.finish_reason == "length" for t in episode.turns),
                    forks=episode.num_forks,
                ),
                episode.stop_reason,
                episode.age(version),
            )
            for episode in episodes
        ]
        with self._lock:
            self._ages, self._last = [], Counter()
            for episode, counts, reason, age in facts:
                if not self._settle([episode]):
                    continue
                self._last.update(counts)
                if reason is not None:
                    self._counts[f"stop/{reason.value}"] += 1
                self._ages += [] if age is None else [age]
            self._counts.update(self._last)
            self._new_tokens += self._last["tokens"]

    def reject(self, episodes: Iterable[Episode], cause: str) -> None:
        """Count rejected episodes; those that are not running are left out."""
        with self._lock:
            settled = self._settle(episodes)
            if settled:
                self._counts.update({"rejected": len(settled), f"rejected/{cause}": len(settled)})
        if settled and self.on_reject is not None:
            self.on_reject(settled, cause)

    def reject_running(self, cause: str) -> None:
        """Count every running episode as rejected."""
        with self._lock:
            running = tuple(self._running.values())
        self.reject(running, cause)

    def fail(self, episode: Episode, error: BaseException) -> None:
        """Count an episode that failed, and log the first of each cause."""
        rejected = isinstance(error, Rejected)
        cause = error.cause if isinstance(error, Rejected) else type(error).__name__
        self.reject([episode], cause)
        with self._lock:
            is_new = cause not in self._logged
            self._logged.add(cause)
        if is_new:
            detail = f" ({error})" if rejected and str(error) != cause else ""
            _logger.warning(
                "An episode was rejected for %s%s; more of this cause are only counted.",
                cause,
                detail,
                exc_info=None if rejected else error,
            )

    def stats(self) -> dict[str, int]:
        """All counters; those of turns, tokens, cut responses and forks are of accepted episodes."""
        with self._lock:
            names = ("started", "accepted", "rejected", "turns", "tokens", "cut", "forks")
            stats = {name: self._counts[name] for name in names}
            stats |= {name: count for name, count in self._counts.items() if "/" in name}
            stats["running"] = len(self._running)
            return stats

    def rates(self) -> dict[str, float]:
        """Accepted tokens per second, and mean length and staleness of the last accepted episodes."""
        with self._lock:
            seconds = 0.0 if self._began is None else time.monotonic() - self._began
            ages, last = self._ages, self._last
            return {
                "tokens_per_second": self._new_tokens / seconds if seconds else 0.0,
                "turns_per_episode": last["turns"] / max(last["accepted"], 1),
                "tokens_per_turn": last["tokens"] / max(last["turns"], 1),
                "staleness/mean": sum(ages) / len(ages) if ages else 0.0,
                "staleness/max": float(max(ages, default=0)),
            }

    def waiting(self) -> dict[str, float]:
        """Seconds of the longest running call, and fractions of the time of settled episodes."""
        with self._lock:
            running = list(self._running.values())
            seconds = dict(self._seconds)
        total = seconds.get("total", 0.0)
        engine, environment = (
            seconds.get(kind, 0.0) / total if total else 0.0 for kind in ("engine", "environment")
        )
        return {
            "waiting/longest": max((each.calls.longest()[0] for each in running), default=0.0),
            "time/engine": engine,
            "time/environment": environment,
            "time/waiting": max(1.0 - engine - environment, 0.0) if total else 0.0,
        }

    def watch(self) -> None:
        """Warn about calls that take long, once per episode and in one line. Call this regularly."""
        now = time.monotonic()
        if now - self._watched < min(_WATCH, _LONG):
            return
        self._watched = now
        with self._lock:
            running = list(self._running.values())
        calls = [(*episode.calls.longest(), episode) for episode in running]
        new = [call for call in calls if call[0] > _LONG and not call[2].calls.told]
        if not new:
            return
        for _, _, episode in new:
            episode.calls.told = True
        seconds, what, longest = max(new, key=lambda call: call[0])
        among = f", the longest of {len(new)} that wait" if len(new) > 1 else ""
        _logger.warning(
            "episode %d (task %s) has waited for %s for %.0f seconds%s. Limits(tool_timeout=..., "
            "turn_timeout=...) would end it.",
            longest.traj_id,
            longest.task_id,
            what,
            seconds,
            among,
        )

    def load(self, stats: Mapping[str, int]) -> None:
        """Continue from saved :meth:`stats`, without the episodes that were running."""
        with self._lock:
            self._counts = Counter(stats)
            self._counts["started"] -= self._counts.pop("running", 0)

    def _settle(self, episodes: Iterable[Episode]) -> list[Episode]:
        """Remove those of ``episodes`` that are running, and return them."""
        found = [self._running.pop(episode.traj_id, None) for episode in episodes]
        settled = [episode for episode in found if episode is not None]
        for episode in settled:
            self._seconds["total"] += time.monotonic() - episode.begun  # type: ignore[assignment]
            self._seconds.update(episode.calls.seconds)
        return settled
