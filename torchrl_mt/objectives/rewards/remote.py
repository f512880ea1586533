"""Rewards from an HTTP server: the server's finite number for every row, ``None``, or an error.

There is no default reward. The error names the address, the number of attempts and the last reply.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any

from tensordict import NestedKey, TensorDictBase

from torchrl_mt.checks import check_at_least
from torchrl_mt.http_client import HttpClient, HttpError
from torchrl_mt.objectives.rewards.text import Decoder, prompt_mask, texts_of
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry, read_objects
from torchrl_mt.threads import wait_all
from torchrl_mt.vision.rows import RAW

_logger = logging.getLogger("torchrl_mt")

REFERENCE = "reference"
_QUOTED = 200
"""Characters of a reply that an error quotes."""


class RewardError(HttpError):
    """A reward server gave no rewards. Nothing was written: the call may be repeated.

    Args:
        url: The server's address.
        attempts: Number of requests made.
        reason: Why the last one failed.
        name: The source's own name, if it has one.
    """

    asked = "reward server"

    def __init__(self, url: str, attempts: int, reason: str, name: str | None = None) -> None:
        if name is not None:
            self.asked = f"reward server {name!r} at"
        super().__init__(url, attempts, reason)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.attempts, self.reason, self.name)


class RemoteReward:
    """Reward source that asks an HTTP server for the scores of rows.

    It posts ``{"queries": [...], "prompts": [...]}``, with ``"references"`` and ``"images"`` where the
    rows have them, and expects ``{"rewards": [...]}``, one finite number per query, or null where it has
    no reward (:class:`~torchrl_mt.objectives.RewardMix`). A query is the text
    of a whole row; its prompt is the part before the row's first sampled token; its images are a list of
    ``data:`` URIs in the order of the text. Pass it as ``reward`` to
    :class:`~torchrl_mt.objectives.ExperienceMaker`.

    Connection errors, timeouts and the statuses 408, 425, 429 and 5xx are retried after a wait that
    doubles each time and is at least ``Retry-After``, if that is at most ``timeout``. The rows of a
    request that fails for good have no reward, and a warning is logged. If all requests fail, or the
    first ``max_concurrency`` of them, :class:`RewardError` is raised and leaves the maker's rows
    unchanged.

    Args:
        url: The address to post to.
        tokenizer: Decodes the rows.
        name: Its name in metrics and, beside the address, in errors; the address by default.
        batch_size: Rows per request.
        max_concurrency: Requests in flight at once.
        timeout: Seconds that one attempt may take in all.
        max_retries: Retries of a failed request.
        backoff: Approximate seconds before the first retry.
        headers: Headers of every request.
        reference_key: Key of the rows' entry to send as references, which the rows must have. By
            default ``"reference"`` is sent if the rows have it.
        images: Whether to send images, which a server of texts does not need.
        skip_special_tokens: Whether to leave special tokens out of the texts.

    Raises:
        ImportError: If httpx or tenacity is not installed: ``pip install 'torchrl-mt[server]'``.
        ValueError: If ``url`` is no address or a number is out of range.
        TypeError: If ``tokenizer`` cannot decode or an argument is no number.
    """

    per_episode = True

    def __init__(
        self,
        url: str,
        tokenizer: Decoder,
        *,
        name: str | None = None,
        batch_size: int = 64,
        max_concurrency: int = 8,
        timeout: float = 60.0,
        max_retries: int = 3,
        backoff: float = 1.0,
        headers: Mapping[str, str] | None = None,
        reference_key: NestedKey | None = None,
        images: bool = True,
        skip_special_tokens: bool = False,
    ) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer must have a method decode, got {tokenizer!r}.")
        for what, value in (("batch_size", batch_size), ("max_concurrency", max_concurrency)):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{what} must be an integer, got {value!r}.")
            check_at_least(what, value)
        self._options: dict[str, Any] = {
            "headers": headers,
            "timeout": timeout,
            "max_retries": max_retries,
            "backoff": backoff,
            "max_connections": max_concurrency,
        }
        self._client = self._connect(url)
        self.url = url
        self.tokenizer = tokenizer
        self.name = url if name is None else name
        self.batch_size = batch_size
        self.max_concurrency = max_concurrency
        self.reference_key = reference_key
        self.images = images
        self.skip_special_tokens = skip_special_tokens

    def _connect(self, url: str) -> HttpClient:
        """Make a client, without opening a connection."""
        return HttpClient(url, name="reward source", error=self._failure, **self._options)

    def _failure(self, url: str, attempts: int, reason: str) -> RewardError:
        return RewardError(url, attempts, reason, None if self.name == url else self.name)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the client, whose connections belong to this process."""
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings and make a new client."""
        vars(self).update(state)
        self._client = self._connect(self.url)

    async def __call__(self, rows: TensorDictBase) -> list[float | None]:
        """Ask the server for the scores of rows.

        Args:
            rows: Rows ``[n]`` with tokens and both masks, and optionally references.

        Returns:
            ``n`` finite numbers, or ``None`` for rows without a reward.

        Raises:
            KeyError: If rows lack an entry.
            RewardError: If the server refuses all requests, does not answer, or answers in another
                format.
        """
        bodies = self._bodies(rows)
        failures: list[RewardError] = []
        answers: list[list[float | None]] = []

        async def ask(body: dict[str, list[Any]]) -> list[float | None]:
            count = len(body["queries"])
            try:
                answers.append(await self._client.post(body, partial(_rewards, count=count)))
            except RewardError as error:
                failures.append(error)
                # Later requests would only wait in vain.
                if not answers and len(failures) >= min(len(bodies), self.max_concurrency):
                    raise
                return [None] * count
            return answers[-1]

        parts = await wait_all(map(ask, bodies))
        if failures:
            _logger.warning(
                "%d of %d requests failed, and their rows have no reward from this source: %s",
                len(failures),
                len(bodies),
                failures[-1],
            )
        return [reward for part in parts for reward in part]

    def _bodies(self, rows: TensorDictBase) -> list[dict[str, list[Any]]]:
        tokens = read_entry(rows, ExperienceKeys.action)
        attended = read_entry(rows, ExperienceKeys.attention_mask)
        columns: dict[str, list[Any]] = {
            name: texts_of(
                self.tokenizer, tokens, mask, skip_special_tokens=self.skip_special_tokens
            )
            for name, mask in (("queries", attended), ("prompts", prompt_mask(rows)))
        }
        key = REFERENCE if self.reference_key is None else self.reference_key
        references = read_objects(rows, key)
        if references is not None:
            columns["references"] = references
        elif self.reference_key is not None:
            read_entry(rows, key, hint=f", which {self.name!r} sends as references")
        shown = read_objects(rows, RAW) if self.images else None
        if shown is not None:
            # Rows of a group show the same images.
            uris = {image: image.data_uri() for image in set(chain(*shown))}
            columns["images"] = [[uris[image] for image in images] for images in shown]
        starts = range(0, len(rows), self.batch_size)
        bodies = [{k: v[i : i + self.batch_size] for k, v in columns.items()} for i in starts]
        try:
            json.dumps(references, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the entry {key!r} of rows must be fit for JSON: {error}.") from error
        return bodies


def _rewards(answer: Any, count: int) -> list[float | None]:
    """Read and check the rewards in a reply."""

    def fail(what: str) -> ValueError:
        return ValueError(f"{what}; it sent {str(answer)[:_QUOTED]}")

    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise fail("the reply must be {'rewards': [...]}")
    if len(rewards) != count:
        raise fail(f"{count} queries were sent and {len(rewards)} rewards came back")
    for i, reward in enumerate(rewards):
        if reward is None:
            continue
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise fail(f"reward {i} must be a number, got {reward!r}")
        # Also refuses numbers too large for float32.
        if not abs(reward) < 3.4e38 or not math.isfinite(reward):
            raise fail(f"reward {i} must be a finite number, got {reward!r}")
    return [None if reward is None else float(reward) for reward in rewards]
