"""The limit of prompt and response together, as the first server that answers reports it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torchrl_mt.engines.completions.api import max_model_len

__all__ = ["ModelLimit"]

_TIMEOUT = 5.0
"""Seconds for a request to ``/v1/models``."""
_AWAY_PAUSE = 0.5
"""Seconds between two attempts to reach a server that is not up yet."""


class ModelLimit:
    """Requests a model's limit until it is known.

    Args:
        tokens: the limit, if it is known already.
        origins: the servers' addresses.
        model: the model's name.
        headers: sent with every request.
        wait_ready: seconds to wait for a server that is not up.
        is_closed: whether nobody needs the limit any more.
    """

    def __init__(
        self,
        tokens: int | None,
        *,
        origins: Sequence[str],
        model: str,
        headers: Mapping[str, str],
        wait_ready: float,
        is_closed: Callable[[], bool],
    ) -> None:
        self.tokens = tokens
        """The limit; ``None`` if it is not known."""
        self._origins = origins
        self._model = model
        self._headers = headers
        self._wait_ready = wait_ready
        self._is_closed = is_closed
        self._is_settled = tokens is not None
        """Whether the limit is known, or the servers do not report it."""
        self._lock = threading.Lock()

    async def wait(self) -> int | None:
        """Request the limit until a server is up, for at most ``wait_ready`` seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_ready
        while not (self._is_settled or self._is_closed()):
            if await asyncio.to_thread(self.request) or loop.time() >= end:
                break
            await asyncio.sleep(_AWAY_PAUSE)
        return self.tokens

    def request(self) -> bool:
        """Request the limit unless it is settled; false if no server is up."""
        with self._lock:
            if self._is_settled or self._is_closed():
                return True
            answered = [self._ask(origin) for origin in self._origins if not self._is_settled]
            # Asking again would delay every request.
            self._is_settled = self._is_settled or "late" in answered
            return self._is_settled

    def _ask(self, origin: str) -> str:
        """Request the limit from one server."""
        import httpx

        try:
            answer = httpx.get(f"{origin}/v1/models", headers=self._headers, timeout=_TIMEOUT)
        except httpx.TimeoutException:
            return "late"
        except httpx.TransportError:
            return "away"
        if answer.status_code in (502, 503, 504):
            return "away"
        self._is_settled = True
        with suppress(ValueError):  # The server sent no JSON.
            self.tokens = max_model_len(answer.json(), self._model)
        return "settled"
