"""Collecting in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

__all__ = ["Background"]

_logger = logging.getLogger("torchrl_mt")


class Background(threading.Thread):
    """Goes through batches until they end; begins at once.

    Args:
        batches: what to go through.
        ended: whether an error is only that somebody has ended the collector.
    """

    def __init__(self, batches: Iterable[object], ended: Callable[[], bool]) -> None:
        super().__init__(name="torchrl_mt-collect", daemon=True)
        self.error: BaseException | None = None
        """What has ended it before its time."""
        self._batches = batches
        self._ended = ended
        self.start()

    def run(self) -> None:
        """Collect."""
        try:
            for _ in self._batches:
                pass
        except BaseException as error:
            if not self._ended():
                self.error = error
                _logger.warning("collecting in the background has ended", exc_info=error)
