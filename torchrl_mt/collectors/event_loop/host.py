"""An object that other processes call; its ``async`` methods run in an event loop of its own.

Every call gets one reply: a value, or an error as it was raised.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchrl_mt.collectors.event_loop.loop_thread import LoopThread
from torchrl_mt.processes import answer, failure

__all__ = ["Host"]


class Host:
    """An object and its event loop, for a :class:`~torchrl_mt.processes.WorkerProcess` or an actor.

    Args:
        make: makes the object; its error is the reply to all calls.
        *args: arguments for it.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._loop = LoopThread("torchrl_mt-host")
        self._object: Any = None
        self._error: BaseException | None = None
        try:
            self._object = make(*args)
        except BaseException as error:
            self._error = error

    def call(self, method: str, args: bytes, shared: Any = None) -> Future[tuple[bool, bytes]]:
        """Call a method with pickled arguments, and with ``shared`` if it is given."""
        return asyncio.run_coroutine_threadsafe(self._answer(method, args, shared), self._loop.loop)

    async def _answer(self, method: str, args: bytes, shared: Any) -> tuple[bool, bytes]:
        try:
            if self._error is not None:
                raise self._error
            keywords = {} if shared is None else {"shared": shared}
            return answer(await getattr(self._object, method)(*pickle.loads(args), **keywords))
        except BaseException as error:
            return False, failure(error)

    def close(self) -> None:
        """Cancel the calls, and close the object."""
        self._loop.close()
        if self._object is not None:
            self._object.close()
