"""A progress bar of a run."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """A ``tqdm`` bar of episodes, made at the first update.

    Args:
        total: number of episodes of the run; ``None`` if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: Any = None

    def show(self, new: int, accepted: int, **facts: Any) -> None:
        """Add ``new`` episodes, ``accepted`` in all, and show facts beside the bar."""
        if self._bar is None:
            self._bar = tqdm(total=self._total, initial=accepted - new, unit="ep")
        self._bar.set_postfix(facts)
        self._bar.update(new)

    def close(self) -> None:
        """Close the bar; the next update makes a new one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
