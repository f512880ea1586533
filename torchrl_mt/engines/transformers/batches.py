"""Requests, the prompts that they share, and the batches that compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from torchrl_mt.devices import sent, upload
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.engines.stop_strings import StopStrings
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.images import PromptImages
from torchrl_mt.engines.transformers.padded_cache import PaddedCache

__all__ = ["Batch", "Prefill", "Prompt", "Request"]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and the tokens sampled for it so far."""

    tokens: list[int]
    """Prompt and sampled tokens; images have tokens of their own."""
    limit: int
    """Maximum length of ``tokens``."""
    stop_ids: frozenset[int]
    sampling: Sampling
    seed: int
    answer: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False
    stops: StopStrings | None = None
    images: PromptImages | None = None
    failure: Exception | None = None
    """Why it could not be completed, while others go on."""

    def ended_by_string(self, token: int) -> bool:
        """Look for the stop strings; a tokenizer's error ends this request alone."""
        assert self.stops is not None
        try:
            return self.stops.ended_by(token)
        except Exception as error:
            self.failure = error
            return True


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt that is computed once for all requests that share it."""

    tokens: list[int]
    requests: list[Request]
    known: int
    """Number of leading tokens found in the cache."""
    past: list[torch.Tensor]
    """Cached keys and values of these tokens, in pieces."""
    key: Hashable
    """Equal for prompts that share their cached prefix and the next few tokens."""
    images: PromptImages | None = None

    @property
    def num_new(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.known


@dataclass(eq=False, slots=True)
class Batch:
    """Rows that share a cache and are computed together."""

    cache: PaddedCache
    rows: list[Request | Prompt | None] = field(default_factory=list)
    """Each row of the cache: a request that samples, a prompt being computed, or ``None`` if free."""
    prefills: int = 0
    """Number of unfinished prefills; until they end, no request samples and no row moves."""

    @property
    def requests(self) -> list[Request]:
        """Requests that sample."""
        return [row for row in self.rows if isinstance(row, Request)]

    @property
    def in_use(self) -> bool:
        """Whether a request waits for a row of this batch."""
        return any(row.requests if isinstance(row, Prompt) else row for row in self.rows)

    def remove_free_rows(self) -> None:
        """Remove the free rows from the cache."""
        free = [i for i, row in enumerate(self.rows) if row is None]
        if free:
            self.rows = [self.rows[row] for row in self.cache.remove(free)]


class Prefill:
    """Prompts that are computed together, in one or several forward passes."""

    def __init__(self, model: CachedModel, batch: Batch, prompts: list[Prompt]) -> None:
        self.batch, self.prompts = batch, prompts
        self.rows = batch.cache.join(
            [len(p.tokens) for p in prompts],
            [p.past for p in prompts],
            [0 if p.images is None else p.images.shift for p in prompts],
        )
        batch.rows += prompts
        batch.prefills += 1
        self._num_new = [prompt.num_new for prompt in prompts]
        self.left = longest = max(self._num_new)
        """Number of columns left to compute."""
        new = [[0] * (longest - p.num_new) + p.tokens[p.known :] for p in prompts]
        self._tokens = upload(new, model.layout.device)
        shown = [prompt.images for prompt in prompts if prompt.images is not None]
        self._images = {number: image for each in shown for number, image in each.images.items()}
        self._positions: torch.Tensor | None = None
        if any(each.positions is not None for each in shown):
            self._positions = sent(self._image_positions(), model.layout.device)

    def computed(self) -> list[int]:
        """Number of each prompt's tokens that the cache holds."""
        return [len(p.tokens) - min(p.num_new, self.left) for p in self.prompts]

    def advance(self, model: CachedModel, budget: int) -> tuple[torch.Tensor, int]:
        """Compute the next columns, as many as a budget of tokens allows, but at least one.

        Returns:
            Logits ``[B, V]`` of the next token, and the number of prompt tokens computed.
        """
        before, longest = sum(self.computed()), self._tokens.shape[1]
        begin = longest - self.left
        self.left -= min(self.left, max(1, budget // len(self.prompts)))
        columns = slice(begin, longest - self.left)
        positions = None if self._positions is None else self._positions[..., columns]
        inputs = self.batch.cache.fill(
            self.rows, self._tokens[:, columns], self._num_new, self.left, positions
        )
        return model.logits(inputs, self._images), sum(self.computed()) - before

    def _image_positions(self) -> torch.Tensor:
        """Positions ``[3, B, Q]`` of the tokens to compute; 0 on padding."""
        positions = torch.zeros((3, *self._tokens.shape), dtype=torch.int64, device="cpu")
        for row, prompt in enumerate(self.prompts):
            images = prompt.images or _NO_IMAGES
            place = positions[:, row, -prompt.num_new :]
            place.copy_(images.positions_of(prompt.known, len(prompt.tokens)))
        return positions


_NO_IMAGES = PromptImages({}, None, 0)
