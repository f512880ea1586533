"""How long a run goes on that fails: members in a row, and items played again."""

from __future__ import annotations

__all__ = ["FailureStreak", "Requeues"]

MOST_REQUEUES, MOST_BARREN = 64, 16
"""How often an item is played again because its group lost a member: in all, and in a row without a
member that came to its end."""


class FailureStreak:
    """Members in a row that failed in spite of retries, without one that came to its end.

    Until an episode was judged, those that come to their end were only cut, and interrupt no row.

    Args:
        most: how many end the run.

    Examples:
        >>> streak = FailureStreak(2)
        >>> streak.enter_failure(OSError("gone"))
        >>> streak.enter_judged()
        >>> streak.enter_end()
        >>> streak.enter_failure(OSError("gone"))
        >>> streak.enter_failure(OSError("gone"))
        Traceback (most recent call last):
        RuntimeError: 2 episodes in a row were rejected, the last for OSError: gone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = 0
        self._any_judged = False

    def enter_judged(self) -> None:
        """Enter that an environment has answered."""
        self._any_judged = True

    def enter_end(self, failure: BaseException | None = None) -> None:
        """Enter a member that came to its end.

        Args:
            failure: why it was rejected before, if it was played again.
        """
        if self._any_judged:
            self._length = 0
        elif failure is not None:
            self.enter_failure(failure)

    def enter_failure(self, error: BaseException) -> None:
        """Enter a member that failed.

        Raises:
            RuntimeError: if there are too many in a row.
        """
        self._length += 1
        if self._length >= self._most:
            so_far = "" if self._any_judged else " before the environment had judged any"
            raise RuntimeError(
                f"{self._length} episodes in a row were rejected{so_far}, the last for "
                f"{type(error).__name__}: {error}."
            ) from error

    def reset(self) -> None:
        """Begin a new row."""
        self._length = 0


class Requeues:
    """How often items, by ticket, are played again since their groups lost a member."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        """In all, and in a row without a member that came to its end."""

    def __contains__(self, ticket: int) -> bool:
        """Whether an item is being played again."""
        return ticket in self._counts

    def may_have(self, ticket: int, *, barren: bool) -> bool:
        """Whether to play an item once more; if so, it is counted.

        ``barren`` says that no member of its group came to its end.
        """
        times, in_a_row = self._counts.get(ticket, (0, 0))
        in_a_row = in_a_row + 1 if barren else 0
        if times == MOST_REQUEUES or in_a_row > MOST_BARREN:
            return False
        self._counts[ticket] = (times + 1, in_a_row)
        return True

    def forget(self, ticket: int) -> None:
        """Be done with an item."""
        self._counts.pop(ticket, None)
