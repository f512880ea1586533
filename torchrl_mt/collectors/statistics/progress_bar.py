"""A progress bar of a run."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """A ``tqdm`` bar of episodes, from the first that is shown until it is closed.

    Args:
        total: how many episodes the run has, if that is known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: Any = None

    def show(self, new: int, accepted: int, **facts: Any) -> None:
        """Count ``new`` episodes, ``accepted`` in all, and show facts beside them."""
        if self._bar is None:
            self._bar = tqdm(total=self._total, initial=accepted - new, unit="ep")
        self._bar.set_postfix(facts)
        self._bar.update(new)

    def close(self) -> None:
        """End the bar; what comes next begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
