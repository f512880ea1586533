"""An event loop in a thread of its own, driven from ordinary code.

Works where a loop runs already (a notebook), lets Ctrl-C through, and leaves nothing behind when closed.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """Run coroutines in a background thread.

    Args:
        name: name of the thread.
        max_workers: how many blocking calls (``asyncio.to_thread``) may run at once.

    Examples:
        >>> import asyncio
        >>> thread = LoopThread("example", max_workers=1)
        >>> thread.run(asyncio.sleep(0, result="done"))
        'done'
        >>> thread.close()
    """

    def __init__(self, name: str, max_workers: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(
            ThreadPoolExecutor(max_workers, thread_name_prefix=f"{name}-worker")
        )
        # A daemon, so that a script which dies without closing does not hang on it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closer = weakref.finalize(self, _close, self._loop, self._thread)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._closer.alive

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end and return its result; an interrupt cancels it first."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                wait([future])
                # The future is done once cancellation was asked for; what the coroutine does then
                # happens before the loop's next callback.
                asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
            raise

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self._closer()


async def _settle() -> None:
    """Wait until every other task of the loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End a loop and its thread."""
    asyncio.run_coroutine_threadsafe(_settle(), loop).result()
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
