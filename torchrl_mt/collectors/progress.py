"""A bar that shows how far a run is."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

__all__ = ["Progress"]


class Progress:
    """A ``tqdm`` bar of episodes, from the first that is shown until it is closed.

    Args:
        total: how many episodes the run has, if that is known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: Any = None

    def show(self, new: int, accepted: int, **facts: Any) -> None:
        """Move on.

        Args:
            new: episodes since the bar was last moved.
            accepted: episodes so far, the new ones included.
            **facts: what else to show.
        """
        if self._bar is None:
            self._bar = tqdm(total=self._total, initial=accepted - new, unit="ep")
        self._bar.set_postfix(facts)
        self._bar.update(new)

    def close(self) -> None:
        """End the bar; what comes next begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
