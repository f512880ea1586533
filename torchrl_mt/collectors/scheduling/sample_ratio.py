"""Collecting and learning that wait for each other, by rows drawn per episode written.

After every draw, ``drawn <= maximum * written``. A batch is begun only if ``drawn >= minimum *
written``, counting the batches that are being played as written, or if a draw waits that needs more
than these. So the two sides never wait for each other at the same time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torchrl.data import RayReplayBuffer, ReplayBuffer

from torchrl_mt.checks import check_positive, check_positive_integer
from torchrl_mt.data import EpisodeSampler
from torchrl_mt.threads import WatchedThread

__all__ = ["CollectionEndedError", "RatioWriter", "SampleRatio"]

_logger = logging.getLogger("torchrl_mt")

_POLL = 0.05
"""Seconds between checks whether the collectors still run."""
WARN_SECONDS = 60.0
"""Seconds of waiting before a warning."""
_WAITING = {
    "writer": ("the collector", "If the learner still draws, all is well."),
    "sampler": (
        "buffer.sample()",
        "If episodes are only slow, all is well. A collector that waits for new weights needs a higher "
        "max_staleness, larger batches or smaller draws.",
    ),
}
"""Who waits, and what to do."""


class CollectionEndedError(RuntimeError):
    """A draw needs more episodes, and the collectors have ended."""


class SampleRatio:
    """Bounds the rows drawn from a collector's buffer per episode written to it.

    ``buffer.sample()`` waits for more episodes while it would draw more than ``maximum`` rows per
    episode. The collector begins no batch while fewer than ``minimum`` rows per episode are drawn. Both
    need :meth:`MultiTurnCollector.start`; a collector that is iterated raises instead. If a draw waits
    for more episodes than ``minimum`` allows, they are played: with ``b`` episodes per batch and ``n``
    rows drawn at once, ``drawn >= minimum * (written - b) - n`` always holds, and ``minimum`` and
    ``maximum`` may be equal.

    A row is what the buffer's sampler draws: an episode of
    :class:`~torchrl_mt.data.EpisodeSampler` (of groups, each member), a clip of
    :class:`~torchrl_mt.data.ClipSampler` and TorchRL's slice samplers, a step of other samplers. A draw
    counts ``batch_size`` even where the last batch of an epoch is smaller, and it counts when
    ``sample()`` returns it, not when it is prefetched. Several collectors that write to one buffer
    share one ``SampleRatio``.

    The idea is that of ``SampleToInsertRatio`` in Reverb (Cassirer et al., 2021).

    Args:
        minimum: least rows per episode; 0 never stops the collector.
        maximum: most rows per episode; ``math.inf`` never stops the learner.
        min_size_to_sample: episodes written before the first draw. Until then, the collector does not
            wait. They count as written, so it then waits until the learner has caught up.
        timeout: seconds that a draw waits at most; no limit if ``None``.

    Raises:
        ValueError: if not ``0 <= minimum <= maximum``, or another argument is not positive.

    Examples:
        >>> ratio = SampleRatio(2, 4)
        >>> collector = MultiTurnCollector(  # doctest: +SKIP
        ...     env, engine, data, episodes_per_batch=8, replay_buffer=buffer, rate_limit=ratio
        ... )
        >>> ratio.stats()["rate/ratio"]
        0.0
    """

    def __init__(
        self,
        minimum: float,
        maximum: float,
        *,
        min_size_to_sample: int = 1,
        timeout: float | None = None,
    ) -> None:
        if not (0 <= minimum <= maximum and minimum < math.inf):
            raise ValueError(
                "minimum and maximum must be rows per episode with 0 <= minimum <= maximum, got "
                f"minimum={minimum} and maximum={maximum}."
            )
        check_positive("maximum", maximum)
        if timeout is not None:
            check_positive("timeout", timeout)
        self.minimum = minimum
        self.maximum = maximum
        self.min_size_to_sample = check_positive_integer("min_size_to_sample", min_size_to_sample)
        self.timeout = timeout
        self.drawn = 0
        """Rows drawn."""
        self.written = 0
        """Episodes written."""
        self._drawing = 0
        """Rows that are being drawn."""
        self._waiting: list[int] = []
        """Rows of each draw that waits."""
        self._seconds = {"writer": 0.0, "sampler": 0.0}
        self._writers: weakref.WeakSet[RatioWriter] = weakref.WeakSet()
        self._buffer: ReplayBuffer | None = None
        self._batch_size: int | None = None
        """Of the last draw."""
        self._group_size = 1
        self._pid = os.getpid()
        self._changed = threading.Condition()

    # Attaching

    def attach(self, buffer: ReplayBuffer, group_size: int = 1) -> None:
        """Count the draws of ``buffer.sample()`` from now on; collectors call this.

        Args:
            buffer: the buffer, in this process.
            group_size: episodes per group, for samplers that draw groups of any size.

        Raises:
            ValueError: if the buffer lives in another process, this counts another buffer, or the
                buffer has another ``SampleRatio``.
        """
        if not isinstance(buffer, ReplayBuffer) or isinstance(buffer, RayReplayBuffer):
            raise ValueError(
                "rate_limit counts the draws from a ReplayBuffer of this process, got a "
                f"{type(buffer).__name__}: its draws in other processes would not be counted."
            )
        if self._buffer is not None and self._buffer is not buffer:
            raise ValueError(
                "this SampleRatio counts another buffer: make one for each buffer, or detach() it."
            )
        counted = vars(buffer).get("sample")
        if isinstance(counted, _CountedDraws) and counted.ratio is not self:
            raise ValueError(
                "replay_buffer has another SampleRatio: collectors that write to one buffer share one; "
                "detach() that of an earlier collector."
            )
        if not isinstance(counted, _CountedDraws):
            # Neither sampler nor transform: they run under the buffer's lock, where waiting would stop
            # the writer, and for batches that are only prefetched.
            buffer.sample = _CountedDraws(self, buffer, buffer.sample)
        self._buffer, self._group_size = buffer, group_size

    def detach(self) -> None:
        """Lift the limit from the buffer, such as to look at it after the run."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and isinstance(vars(buffer).get("sample"), _CountedDraws):
            del buffer.sample

    def writer(self, background: Callable[[], WatchedThread | None]) -> RatioWriter:
        """Add a collector.

        Args:
            background: returns the collector's thread, ``None`` before its start.
        """
        writer = RatioWriter(self, background)
        self._writers.add(writer)
        return writer

    # Counters

    def stats(self) -> dict[str, int | float]:
        """Counters since the beginning.

        Returns:
            A dict with ``rate/ratio`` (rows drawn per episode written; 0 without episodes),
            ``rate/drawn``, ``rate/written``, and the seconds that collectors and draws have waited:
            ``rate/waiting_writer`` and ``rate/waiting_sampler``.
        """
        with self._changed:
            return {
                "rate/ratio": self.drawn / self.written if self.written else 0.0,
                "rate/drawn": self.drawn,
                "rate/written": self.written,
                **{f"rate/waiting_{side}": seconds for side, seconds in self._seconds.items()},
            }

    def state_dict(self) -> dict[str, int]:
        """Rows drawn and episodes written. A collector's ``state_dict`` has it as ``"rate_limit"``."""
        with self._changed:
            return {"drawn": self.drawn, "written": self.written}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue to count from :meth:`state_dict`."""
        with self._changed:
            self.drawn, self.written = int(state_dict["drawn"]), int(state_dict["written"])
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"SampleRatio({self.minimum}, {self.maximum}, drawn={self.drawn}, written={self.written})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SampleRatio counts the draws of one process and cannot be copied or sent to another: "
            "sample in the process of the collector, or detach() it first."
        )

    # Rules; the caller has the lock

    def _may_draw(self, rows: int, written: int) -> bool:
        enough = written >= self.min_size_to_sample
        return enough and self.drawn + self._drawing + rows <= self.maximum * written

    def _may_begin(self) -> bool:
        written = self.written + sum(writer.promised for writer in self._writers)
        return (
            written < self.min_size_to_sample
            or self.drawn >= self.minimum * written
            or any(not self._may_draw(rows, written) for rows in self._waiting)
            or (written == self.written and self._is_too_small())
        )

    def _is_too_small(self) -> bool:
        """Whether the buffer cannot be sampled yet, as if all its episodes are shorter than a clip."""
        size = self._batch_size or getattr(self._buffer, "batch_size", None)
        return self._buffer is not None and size is not None and not self._buffer.can_sample(size)

    # Waiting

    def _wait(self, side: str, allowed: Callable[[], bool], gives_up: Callable[[], bool]) -> bool:
        """Wait until it is allowed, or ``gives_up()`` is true or raises; the caller has the lock."""
        begin = last = time.monotonic()
        warned = False
        while not allowed():
            if gives_up():
                return False
            self._changed.wait(_POLL)
            now = time.monotonic()
            self._seconds[side] += now - last
            last = now
            if not warned and now - begin > WARN_SECONDS:
                warned = True
                who, hint = _WAITING[side]
                _logger.warning(
                    "%s has waited %.0f s: %s. %s", who, now - begin, self._counts(), hint
                )
        return True

    @contextmanager
    def draw(self, batch_size: int) -> Iterator[None]:
        """Draw a batch within the context, once it is allowed. If the draw fails, it does not count.

        Raises:
            CollectionEndedError: if it needs more episodes, and the collectors have ended.
            RuntimeError: if a collector has failed, or none runs in the background.
            TimeoutError: after ``timeout`` seconds.
        """
        if os.getpid() != self._pid:
            self.__reduce__()
        rows = self._rows(batch_size)
        end = math.inf if self.timeout is None else time.monotonic() + self.timeout
        with self._changed:
            self._batch_size = batch_size
            self._waiting.append(rows)
            self._changed.notify_all()
            try:
                self._wait(
                    "sampler",
                    lambda: self._may_draw(rows, self.written),
                    lambda: self._raise_if_in_vain(rows, end),
                )
                self._drawing += rows
            finally:
                self._waiting.remove(rows)
        drawn = 0
        try:
            yield
            drawn = rows
        finally:
            with self._changed:
                self._drawing -= rows
                self.drawn += drawn
                self._changed.notify_all()

    def _rows(self, batch_size: int) -> int:
        """Rows of a draw."""
        sampler: Any = getattr(self._buffer, "sampler", None)
        if isinstance(sampler, EpisodeSampler):
            if sampler.group_key is None:
                return batch_size
            return batch_size * (sampler.group_size or self._group_size)
        if num_slices := getattr(sampler, "num_slices", None):
            return int(num_slices)
        return batch_size // (getattr(sampler, "slice_len", None) or 1)

    def _raise_if_in_vain(self, rows: int, end: float) -> bool:
        """Raise if no collector will write what a draw waits for, or its time is over."""
        if time.monotonic() >= end:
            raise TimeoutError(
                f"sample() waited {self.timeout} seconds for more episodes: {self._counts()}."
            )
        threads = [writer.background() for writer in self._writers]
        if any(thread is not None and thread.is_alive() for thread in threads):
            return False
        begun = [thread for thread in threads if thread is not None]
        wanted = f"a draw of {rows} rows needs more episodes: {self._counts()}"
        for thread in begun:
            if thread.error is not None:
                raise RuntimeError(f"{wanted}, and the collector has failed.") from thread.error
        if begun:
            raise CollectionEndedError(
                f"{wanted}, and the collector has ended. Stop here, or detach() the SampleRatio to go "
                "on with what is stored."
            )
        raise RuntimeError(
            f"{wanted}, and no collector runs in the background, so sample() would wait for ever. "
            f"{self._allowance()} Draw less for each batch of the collector, or start() the collector: "
            "sample() then waits."
        )

    def _allowance(self) -> str:
        if self.written < self.min_size_to_sample:
            return f"min_size_to_sample is {self.min_size_to_sample}."
        return f"{math.floor(self.maximum * self.written) - self.drawn} rows may be drawn now."

    def _counts(self) -> str:
        return (
            f"{self.drawn} rows were drawn and {self.written} episodes written, with "
            f"minimum={self.minimum} and maximum={self.maximum} rows per episode"
        )


class RatioWriter:
    """What one collector tells a :class:`SampleRatio`; made by :meth:`SampleRatio.writer`."""

    def __init__(self, ratio: SampleRatio, background: Callable[[], WatchedThread | None]) -> None:
        self.background = background
        self._ratio = ratio
        self._promised = 0
        self._player: WatchedThread | None = None

    @property
    def promised(self) -> int:
        """Episodes of the batch that is being played."""
        return self._promised if self._player is not None and self._player.is_alive() else 0

    def begin(self, episodes: int, is_closed: Callable[[], bool]) -> None:
        """Wait until a batch may be begun, in the thread that plays it.

        Args:
            episodes: size of the batch.
            is_closed: true once the collector is shut down, which ends the wait.

        Raises:
            RuntimeError: if this is no background thread and the batch may not be begun.
        """
        ratio, thread = self._ratio, threading.current_thread()
        with ratio._changed:
            self._promised = 0
            if not isinstance(thread, WatchedThread):
                if ratio._may_begin():
                    return
                missing = math.ceil(ratio.minimum * ratio.written) - ratio.drawn
                raise RuntimeError(
                    f"the next batch must wait for the learner: {ratio._counts()}. Draw {missing} more "
                    "rows before the next batch, or start() the collector: it then waits."
                )
            if ratio._wait("writer", ratio._may_begin, is_closed):
                self._promised, self._player = episodes, thread

    def wrote(self, episodes: int) -> None:
        """Count a batch that was written."""
        with self._ratio._changed:
            self._promised = 0
            self._ratio.written += episodes
            self._ratio._changed.notify_all()


class _CountedDraws:
    """Replaces ``sample`` of one buffer."""

    def __init__(
        self, ratio: SampleRatio, buffer: ReplayBuffer, sample: Callable[..., Any]
    ) -> None:
        self.ratio = ratio
        self._buffer = buffer
        self._sample = sample

    def __call__(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        size = self._buffer.batch_size if batch_size is None else batch_size
        if size is None:
            return self._sample(batch_size, *args, **kwargs)  # It raises.
        with self.ratio.draw(size):
            return self._sample(batch_size, *args, **kwargs)
