"""Read items without blocking the event loop, so that slow data does not delay running episodes."""

from __future__ import annotations

import asyncio
from functools import partial

from torchrl_mt.collectors.items.items import Item, Items
from torchrl_mt.threads import call_in_thread

__all__ = ["ItemReader"]


class ItemReader:
    """Reads items; slow data in a thread."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.items_left = True
        """Whether there may be another item."""
        self._num_returned = 0

    def put_back(self, ticket: int) -> None:
        """Return an item, to be given out again before any new one."""
        self.items.put_back(ticket)
        self._num_returned += 1
        self.items_left = True

    async def next(self, stop: asyncio.Event) -> Item | None:
        """Next item; ``None`` at the end of the data or once ``stop`` is set."""
        returned = self._num_returned
        if self.items.at_once:
            item = next(self.items, None)
        else:
            item = await self._read(stop)
        if item is None:
            self.items_left = stop.is_set() or self._num_returned != returned
        return item

    async def _read(self, stop: asyncio.Event) -> Item | None:
        """Read an item in a thread; put it back if the caller has stopped waiting."""
        put_back = partial(self._put_back_read, self.items.num_loads)
        reading = asyncio.ensure_future(call_in_thread(next, self.items, None))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            reading.add_done_callback(put_back)
            raise
        finally:
            stopping.cancel()
        if stop.is_set():
            reading.add_done_callback(put_back)
            return None
        return reading.result()

    def _put_back_read(self, num_loads: int, reading: asyncio.Future[Item | None]) -> None:
        """Put back an unclaimed item, unless a state was loaded since."""
        if reading.cancelled() or reading.exception() is not None:
            return
        item = reading.result()
        if item is not None and self.items.num_loads == num_loads:
            self.put_back(item.ticket)
