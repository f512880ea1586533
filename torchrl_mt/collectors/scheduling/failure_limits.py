"""Limits of failure: how many episodes may fail in a row, and how often an item is played again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FailurePolicy", "FailureStreak", "IncompleteGroups", "Requeues"]

IncompleteGroups = Literal["drop", "keep", "refill", "requeue"]
"""What becomes of a group with a member that failed after all retries."""

_LEAST_CONSECUTIVE = 32
"""Minimum of the default of ``max_consecutive_failures``."""

MOST_REQUEUES, MOST_REQUEUES_ALL_FAILED = 64, 16
"""Requeues of an item: in all, and in a row after groups in which every member failed."""


@dataclass(frozen=True)
class FailurePolicy:
    """Retries of rejected episodes, and what becomes of incomplete groups.

    The fields are arguments of :class:`~torchrl_mt.collectors.MultiTurnCollector` and of its options.
    """

    max_retries: int = 0
    max_consecutive_failures: int | None = None
    incomplete_groups: IncompleteGroups = "drop"

    def most_consecutive(self, concurrency: int) -> int:
        """``max_consecutive_failures``, or its default at this concurrency."""
        return self.max_consecutive_failures or max(_LEAST_CONSECUTIVE, 2 * concurrency)


class FailureStreak:
    """Number of members that failed in a row, in spite of their retries, and of groups dropped in a row.

    A finished member ends the streak, but only once an environment has judged an episode: until then,
    episodes finish only because a limit cuts them. A complete group ends that of groups.

    Args:
        most: length of the streak that ends the run.

    Examples:
        >>> streak = FailureStreak(2)
        >>> streak.add_failure(OSError("gone"))
        >>> streak.add_judged()
        >>> streak.add_finished()
        >>> streak.add_failure(OSError("gone"))
        >>> streak.add_failure(OSError("gone"))
        Traceback (most recent call last):
        RuntimeError: 2 episodes in a row were rejected, the last for OSError: gone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = self._groups = 0
        self._any_judged = False

    def add_judged(self) -> None:
        """Record that an environment has answered or a workflow has returned."""
        self._any_judged = True

    def add_finished(self, failure: BaseException | None = None) -> None:
        """Record a member that finished, with the error of its last failed attempt."""
        if self._any_judged:
            self._length = 0
        elif failure is not None:
            self.add_failure(failure)

    def add_failure(self, error: BaseException) -> None:
        """Record a member that failed.

        Raises:
            RuntimeError: if ``most`` members failed in a row, or one by
                :func:`~torchrl_mt.collectors.workflow.misuse` before any was judged.
        """
        self._length += 1
        # Code that does not do what is asked of it in its first episode will not in the next ones.
        at_once = not self._any_judged and getattr(error, "is_misuse", False)
        if self._length >= self._most or at_once:
            so_far = "" if self._any_judged else " before any was rewarded"
            row = f"{self._length} episodes in a row were" if self._length > 1 else "An episode was"
            raise RuntimeError(
                f"{row} rejected{so_far}, the last for {type(error).__name__}: "
                f"{str(error).rstrip('.')}."
            ) from error

    def add_group(self, error: BaseException | None = None) -> None:
        """Record a group that was complete, or was dropped because a member failed with this error.

        Raises:
            RuntimeError: if ``most`` groups in a row were dropped, and at least 32.
        """
        self._groups = 0 if error is None else self._groups + 1
        if self._groups >= max(self._most, _LEAST_CONSECUTIVE):
            raise RuntimeError(
                f"{self._groups} groups in a row were dropped, each for a rejected episode, the last "
                f"for {type(error).__name__}: {str(error).rstrip('.')}. To go on without such episodes: "
                "incomplete_groups='keep', 'refill' or 'requeue'."
            ) from error

    def reset(self) -> None:
        """End the streaks."""
        self._length = self._groups = 0


class Requeues:
    """How often the items of incomplete groups are played again, by ticket."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        """Requeues in all, and in a row after groups in which every member failed."""

    def __contains__(self, ticket: int) -> bool:
        """Whether an item was requeued."""
        return ticket in self._counts

    def try_again(self, ticket: int, *, all_failed: bool) -> bool:
        """Count a requeue of an item, unless it had too many; return whether it may be requeued.

        ``all_failed`` says whether every member of its last group failed.
        """
        times, in_a_row = self._counts.get(ticket, (0, 0))
        in_a_row = in_a_row + 1 if all_failed else 0
        if times == MOST_REQUEUES or in_a_row > MOST_REQUEUES_ALL_FAILED:
            return False
        self._counts[ticket] = (times + 1, in_a_row)
        return True

    def forget(self, ticket: int) -> None:
        """Forget an item that is done."""
        self._counts.pop(ticket, None)
