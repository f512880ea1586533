"""What episodes are reset with, one item after the other, from any kind of data.

Every item is given out once an epoch. A run that goes on from ``state_dict`` first gives out again what
was given out and not done with, and then what follows: it neither repeats an item nor skips one.

A ``DataLoader`` has no position to save. ``torchdata``'s ``StatefulDataLoader`` has one, but only where
the loader was made as such, and it counts batches that were read: it knows nothing of items that were
given out and not done with, nor of lists, iterators, seeds and curricula.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torchrl_mt.collectors.items.sources import Source, make_source
from torchrl_mt.collectors.settings import ItemOrder

__all__ = ["Item", "Items"]


class Item(NamedTuple):
    """An item that was given out."""

    ticket: int
    """The item's number, counted from the first on; told back when it is done with."""
    value: Any
    """The item."""


class Items(Iterator[Item]):
    """Give out the items of some data, and know which of them are done with.

    =========================  =======================  ===============================================
    data                       order                    after ``load_state_dict``
    =========================  =======================  ===============================================
    ``None``                   ``{"seed": k}``, ever    exact, at once
                               new ``k``
    list, map-style            as it is, or a fresh     exact, at once
    ``Dataset``, HF            permutation per epoch
    ``Dataset``, tensor,       (``shuffle``)
    TensorDict
    ``DataLoader``             its own; items are the   exact, by going through the epoch's batches
                               rows of its batches      again up to the position
    other iterables; a         as they come             exact if they come in the same order again;
    function that returns                               read again up to the position
    an iterator
    iterators                  as they come, once       the new iterator is read up to the position
    ``Curriculum``             its own                  exact, if it has ``state_dict``
    =========================  =======================  ===============================================

    A ``DataLoader`` that shuffles with a ``generator`` of its own goes on with that generator, whose
    state is saved; without one, the order follows from ``seed`` and the epoch, whatever torch's global
    generator does. ``set_epoch`` of the data or of its sampler is called as an epoch begins. A ``set``
    is gone through in the order of its items' ``repr``, as its own changes between processes.

    Items that are given out and not done with cost memory, and those alone: from data that is read in
    order their values are kept, and go into ``state_dict``; all else is read again. All methods may be
    called from several threads. While the data takes its time, only who wants a further item waits for
    it, and who loads a state.

    Args:
        data: what to give out; see the table.
        shuffle: give out in random order: for data with a length and items by index.
        cycle: begin again at the end; by default, unless ``data`` is an iterator.
        seed: what the order (and without data, the items) follow from.

    Raises:
        TypeError: if ``data`` is none of the above (a mapping, a string).
        ValueError: if ``data`` is empty, or cannot be shuffled, cycled or ended as asked.

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
        self._source: Source = make_source(data, ItemOrder(shuffle, cycle, seed))
        self._following = 0
        self._open: dict[int, Any] = {}
        """By ticket, the items that are not done with; their values if those cannot be read again."""
        self._again: list[int] = []
        """A heap of the tickets to give out before any new one."""
        self._position = self._source.state(0)
        """How the source goes on after what it has read."""
        self._closed = False
        self.num_loads = 0
        """How often a state was loaded: tickets given out before mean nothing after."""
        # Held for long while the data is read; the other one guards what is above and is held briefly.
        self._reading = threading.Lock()
        self._lock = threading.RLock()

    def __next__(self) -> Item:
        """Give out an item.

        Raises:
            StopIteration: if the data is at its end, and is not to be cycled.
            RuntimeError: if the data raises; it names the item. The position stays as it was.
        """
        with self._reading:
            try:
                return self._read()
            finally:
                if self._closed:
                    self._source.close()

    def _read(self) -> Item:
        """Read an item; nobody else reads meanwhile."""
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
        """Whether the next item is there without reading, loading or computing anything."""
        return self._source.at_once

    def close(self) -> None:
        """Read no more: lets go of what reads, such as a ``DataLoader``'s processes.

        The position stays as it is, for :meth:`state_dict`.
        """
        self._closed = True
        if self._reading.acquire(blocking=False):  # else who reads lets go of it
            try:
                self._source.close()
            finally:
                self._reading.release()

    @property
    def wants_reports(self) -> bool:
        """Whether the data is to be told what became of its items."""
        return self._source.wants_reports

    def done(self, ticket: int, episodes: Sequence[Any] = ()) -> None:
        """Be done with an item: it is not given out again, after a restart neither.

        Args:
            ticket: the item's ticket.
            episodes: what became of it, for data that asks (:attr:`wants_reports`).

        Raises:
            ValueError: if no such item is given out.
        """
        with self._lock:
            self._require_given(ticket)
            self._source.report(self._open.pop(ticket), list(episodes))

    def hand_over(self) -> None:
        """Tell the data what became of its items, if it asks; waits while an item is read."""
        if self.wants_reports:
            with self._reading:
                self._source.hand_over()

    def put_back(self, ticket: int) -> None:
        """Have an item given out again, with the same ticket and before any new one.

        Args:
            ticket: the item's ticket.

        Raises:
            ValueError: if no such item is given out.
        """
        with self._lock:
            self._require_given(ticket)
            heapq.heappush(self._again, ticket)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restarted run needs, for ``torch.save``.

        Returns:
            The number of items given out (``"following"``), the tickets of those not done with
            (``"open"``) and, where they cannot be read again, their ``"values"``, the source's
            position (``"source"``), and what the data looks like (``"data"``).
        """
        source = self._source
        # What a curriculum does next changes with every report, too.
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, over equal data.

        Items given out before this call are forgotten. The seed is taken over with the position.

        Raises:
            ValueError: if the data looks different or ends before the position, or an iterator is
                past it already. Nothing is changed then, but for an iterator that was read.
        """
        with self._reading, self._lock:
            saved, own = state_dict["data"], self._source.fingerprint
            if saved != own:
                raise ValueError(
                    f"state_dict must be of the same data, got one of {_describe(saved)} for "
                    f"{_describe(own)}: give the data and the shuffle of the saved run."
                )
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
        """Refuse a ticket that nobody holds."""
        if ticket not in self._open or ticket in self._again:
            raise ValueError(
                "ticket must be that of an item that is given out and not done with, got "
                f"{ticket!r}: call done or put_back once for an item."
            )


def _describe(fingerprint: dict[str, Any]) -> str:
    """What data looks like, in words."""
    return ", ".join(f"{key} {value}" for key, value in fingerprint.items())
