"""Which distribution a server's log-probabilities are of: given, or found out by one probe."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from torchrl_mt.checks import check_choice
from torchrl_mt.engines.completions.api import Answer
from torchrl_mt.engines.sampling_params import TruncationWarning
from torchrl_mt.http_client import HttpError

__all__ = ["LogProbsMode"]

_logger = logging.getLogger("torchrl_mt")

_PROBE_TOKENS, _NEARLY_GREEDY, _CERTAIN = 4, 0.02, -0.05
"""Of a probe: its tokens, its temperature, and the lowest log-probability of a certain token."""
_WARNINGS = {
    "raw_logprobs": "Sampling with %s: raw log-probabilities are not those of what was sampled from; do "
    "not train on them. Completion.sampling records it.",
    "unknown": "Sampling with %s: log-probabilities must be those of what is sampled from; vLLM reports "
    "such only when started with --logprobs-mode processed_logprobs. Say so with logprobs_mode=.",
}
"""Warnings, logged once, if log-probabilities are or may be of another distribution."""


class LogProbsMode:
    """Marks the sampling records of responses whose log-probabilities are of another distribution.

    Args:
        mode: ``"processed_logprobs"``, ``"raw_logprobs"``, or ``None`` to find out.
        sample: samples a response for a request and its maximum length.

    Raises:
        ValueError: if ``mode`` is none of these.
    """

    def __init__(
        self,
        mode: Literal["processed_logprobs", "raw_logprobs"] | None,
        sample: Callable[[Mapping[str, Any], int], Awaitable[Answer]],
    ) -> None:
        if mode is not None:
            check_choice("logprobs_mode", mode, ("processed_logprobs", "raw_logprobs"))
        self._mode: str | None = mode
        """``None`` before the probe; ``"unknown"`` if the server refuses it."""
        self._sample = sample
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )
        self._warn = TruncationWarning()
        self._has_warned = False

    async def marked(self, body: Mapping[str, Any], record: dict[str, Any]) -> dict[str, Any]:
        """Add the mode to a sampling record where it matters; warns once.

        Args:
            body: the request.
            record: what it asked for beyond plain sampling.
        """
        if not record:
            return record
        lock = self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._mode is None:
                self._mode = await self._probe(body, record)
        warning = _WARNINGS.get(self._mode)
        if warning is not None and not self._has_warned:
            self._has_warned = True
            _logger.warning(warning, record)
        if self._mode == "raw_logprobs":
            return record | {"logprobs_mode": self._mode}
        self._warn(record)
        return record

    async def _probe(self, body: Mapping[str, Any], record: Mapping[str, Any]) -> str:
        """Find out which distribution log-probabilities are of, by nearly certain tokens."""
        truncated = record.keys() & {"top_k", "top_p", "min_p"}
        greedy = {"top_k": 1} if truncated else {"temperature": _NEARLY_GREEDY}
        # After one token, hardly any model's own distribution is certain.
        asked = {**body, **greedy, "prompt": body["prompt"][:1], "max_tokens": _PROBE_TOKENS}
        asked.pop("stop", None)  # it may leave too few tokens
        try:
            answer = await self._sample(asked, _PROBE_TOKENS)
        except HttpError:
            return "unknown"
        mode = "raw_logprobs" if min(answer.log_probs) < _CERTAIN else "processed_logprobs"
        _logger.info("the server gives %s, as a probe has shown.", mode)
        return mode
