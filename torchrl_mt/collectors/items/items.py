"""Items from any kind of data, with a position that can be saved.

Every item is given out once per epoch. A resumed run first gives out the items again that were given
out but not done, then the following ones, so no finished item is repeated and none is skipped.

``torchdata``'s ``StatefulDataLoader`` saves a position too, but of batches that were read. It knows
nothing of items that are not done, nor of lists, iterators, seeds and curricula.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torchrl_mt.collectors.items.sources import Source, make_source

__all__ = ["Item", "Items"]


class Item(NamedTuple):
    """An item that was given out."""

    ticket: int
    """Number of the item, from 0; passed to :meth:`Items.done` or :meth:`Items.put_back`."""
    value: Any
    """The item."""


class Items(Iterator[Item]):
    """Give out the items of some data, and keep track of which are done.

    Data may be a list, a map-style or Hugging Face data set, a tensor, a TensorDict, a ``DataLoader``,
    any other iterable, a function that returns an iterator, an iterator, a curriculum or ``None``.
    :doc:`/collecting` says in which order each gives its items, and what holds after
    :meth:`load_state_dict`.

    All methods are thread-safe. While the data reads an item, only ``next``, ``load_state_dict`` and,
    for curricula, ``hand_over`` and ``state_dict`` wait.

    Args:
        data: the data. ``None`` is ``{"seed": k}``, with ever new ``k``.
        shuffle: give out in random order; for data with a length and an index.
        cycle: start again at the end. ``None`` means true, except for iterators.
        seed: seed of the order, and of the items that are made without data.

    Raises:
        TypeError: if ``data`` is none of the above (such as a mapping or a string).
        ValueError: if ``data`` is empty, or cannot be shuffled or cycled as asked.

    Examples:
        >>> items = Items(["a", "b", "c"], cycle=False)
        >>> first, second = next(items), next(items)
        >>> first
        Item(ticket=0, value='a')
        >>> items.done(second.ticket)
        >>> state = items.state_dict()
        >>> items = Items(["a", "b", "c"], cycle=False)
        >>> items.load_state_dict(state)
        >>> [value for _, value in items]
        ['a', 'c']
    """

    def __init__(
        self, data: Any = None, *, shuffle: bool = False, cycle: bool | None = None, seed: int = 0
    ) -> None:
        self._source: Source = make_source(data, shuffle, cycle, seed)
        self._following = 0
        self._open: dict[int, Any] = {}
        """Items that are not done, by ticket; the values are ``None`` if they can be read again."""
        self._again: list[int] = []
        """A heap of the tickets to give out before any new one."""
        self._position = self._source.state(0)
        """State of the source after the items that were read."""
        self._closed = False
        self.num_loads = 0
        """Number of loaded states; a load invalidates earlier tickets."""
        # Held while the data is read, perhaps for long; the other lock is held briefly.
        self._reading = threading.Lock()
        self._lock = threading.RLock()

    def __next__(self) -> Item:
        """Give out an item.

        Raises:
            StopIteration: at the end of data that is not cycled.
            RuntimeError: if the data raises; names the item. The position does not change.
        """
        with self._reading:
            try:
                return self._read()
            finally:
                if self._closed:
                    self._source.close()

    def _read(self) -> Item:
        """Read an item; the caller holds the reading lock."""
        with self._lock:
            ticket = heapq.heappop(self._again) if self._again else None
        if ticket is not None:
            try:
                by_index = self._source.by_index
                return Item(ticket, self._source.at(ticket) if by_index else self._open[ticket])
            except BaseException:
                with self._lock:
                    heapq.heappush(self._again, ticket)
                raise
        value = self._source.read(self._following)
        with self._lock:
            ticket = self._following
            self._following += 1
            self._open[ticket] = None if self._source.by_index else value
            if not self._source.wants_reports:
                self._position = self._source.state(self._following)
        return Item(ticket, value)

    @property
    def at_once(self) -> bool:
        """Whether the next item needs no reading, loading or computing."""
        return self._source.at_once

    def close(self) -> None:
        """Release resources of the data, such as a ``DataLoader``'s processes.

        The position does not change, for :meth:`state_dict`.
        """
        self._closed = True
        if self._reading.acquire(blocking=False):  # Else the thread that reads closes the source.
            try:
                self._source.close()
            finally:
                self._reading.release()

    @property
    def wants_reports(self) -> bool:
        """Whether the data is a curriculum, which is told how episodes went."""
        return self._source.wants_reports

    def done(self, ticket: int, episodes: Sequence[Any] = ()) -> None:
        """Mark an item as done: it is not given out again, not even after a restart.

        Args:
            ticket: the item's ticket.
            episodes: finished episodes of the item, for a curriculum (:attr:`wants_reports`).

        Raises:
            ValueError: if no such item is given out.
        """
        with self._lock:
            self._require_given(ticket)
            self._source.report(self._open.pop(ticket), list(episodes))

    def hand_over(self) -> None:
        """Pass the reports of :meth:`done` to a curriculum; waits while an item is read."""
        if self.wants_reports:
            with self._reading:
                self._source.hand_over()

    def put_back(self, ticket: int) -> None:
        """Return an item, to be given out again with the same ticket and before any new one.

        Raises:
            ValueError: if no such item is given out.
        """
        with self._lock:
            self._require_given(ticket)
            heapq.heappush(self._again, ticket)

    def state_dict(self) -> dict[str, Any]:
        """The position, for ``torch.save``.

        Returns:
            A dict with the number of items given out (``"following"``), the tickets of those not done
            (``"open"``), their ``"values"`` if they cannot be read again, the source's position
            (``"source"``), and the kind and size of the data (``"data"``).
        """
        source = self._source
        # A curriculum's state also changes with every report.
        with self._reading if source.wants_reports else nullcontext(), self._lock:
            tickets = sorted(self._open)
            if source.wants_reports:
                source.hand_over()
                self._position = source.state(self._following)
            kept = [self._open[ticket] for ticket in tickets]
            values = None if source.by_index else source.saved(kept)
            return {
                "data": dict(source.fingerprint),
                "following": self._following,
                "open": tickets,
                "values": values,
                "source": self._position,
            }

    def check_same_data(self, state_dict: dict[str, Any]) -> None:
        """Refuse the state of data of another kind or size (``ValueError``)."""
        saved, own = state_dict["data"], self._source.fingerprint
        if saved != own:
            raise ValueError(
                f"state_dict must be of the same data, got one of {_describe(saved)} for "
                f"{_describe(own)}: give the data and the shuffle of the saved run."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` over equal data.

        Items given out before this call are forgotten. The saved seed replaces the given one.

        Raises:
            ValueError: if the data differs in kind or size, ends before the position, or is an iterator
                past it. Nothing is changed then, except that an iterator may have been read.
        """
        with self._reading, self._lock:
            self.check_same_data(state_dict)
            self._source.load(state_dict["source"])
            tickets = list(state_dict["open"])
            values = state_dict["values"] or [None] * len(tickets)
            values = self._source.restored(values)
            self._following = state_dict["following"]
            self._open = dict(zip(tickets, values, strict=True))
            self._again = sorted(tickets)
            self._position = self._source.state(self._following)
            self.num_loads += 1

    def _require_given(self, ticket: int) -> None:
        """Raise if a ticket is not given out."""
        if ticket not in self._open or ticket in self._again:
            raise ValueError(
                "ticket must be that of an item that is given out and not done with, got "
                f"{ticket!r}: call done or put_back once for an item."
            )


def _describe(fingerprint: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fingerprint.items())
