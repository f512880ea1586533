"""What is computed together: requests, the prompts that they share, and the batches that they are in."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.padded_cache import PaddedCache

__all__ = ["Batch", "Prefill", "Prompt", "Request"]


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, and what was sampled for it so far."""

    tokens: list[int]
    limit: int
    """Most tokens, of prompt and answer."""
    stop_ids: frozenset[int]
    sampling: Sampling
    seed: int
    answer: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class Prompt:
    """Tokens that go through the model once, for all requests that have them."""

    tokens: list[int]
    requests: list[Request]
    known: int
    """How many of the tokens were found in the cache."""
    past: list[torch.Tensor]
    """What the cache had of these."""
    key: Hashable
    """The same for prompts that go on alike where the cache ends."""

    @property
    def num_new(self) -> int:
        """How many tokens have to be computed."""
        return len(self.tokens) - self.known


@dataclass(eq=False, slots=True)
class Batch:
    """What is computed together, row for row as in the batch."""

    cache: PaddedCache
    rows: list[Request | Prompt | None] = field(default_factory=list)
    """Requests that sample; prompts as long as they are being computed; ``None`` for who has left."""
    prefills: int = 0
    """Forward passes of prompts that come first; meanwhile none samples, and no row moves."""

    @property
    def requests(self) -> list[Request]:
        """Those that sample."""
        return [row for row in self.rows if isinstance(row, Request)]

    @property
    def in_use(self) -> bool:
        """Whether anybody waits for what is computed here."""
        return any(row.requests if isinstance(row, Prompt) else row for row in self.rows)

    def sweep(self) -> None:
        """Take out the rows of who has left."""
        gone = [i for i, row in enumerate(self.rows) if row is None]
        if gone:
            self.rows = [self.rows[row] for row in self.cache.remove(gone)]


class Prefill:
    """Prompts of a batch that are computed together, in one forward pass or in several."""

    def __init__(self, model: CachedModel, batch: Batch, prompts: list[Prompt]) -> None:
        self.batch, self.prompts = batch, prompts
        self.rows = batch.cache.join([len(p.tokens) for p in prompts], [p.past for p in prompts])
        batch.rows += prompts
        batch.prefills += 1
        self._num_new = [prompt.num_new for prompt in prompts]
        self.left = longest = max(self._num_new)
        """How many columns are left to compute."""
        new = [[0] * (longest - p.num_new) + p.tokens[p.known :] for p in prompts]
        self._tokens = torch.tensor(new, device=model.layout.device)

    def computed(self) -> list[int]:
        """How many of each prompt's tokens the batch has."""
        return [len(p.tokens) - min(p.num_new, self.left) for p in self.prompts]

    def advance(self, model: CachedModel, budget: int) -> tuple[torch.Tensor, int]:
        """Compute the next columns, as many as a budget of tokens allows.

        Returns:
            ``[B, V]`` logits of what follows, and how many tokens of prompts were computed.
        """
        before, longest = sum(self.computed()), self._tokens.shape[1]
        begin = longest - self.left
        self.left -= min(self.left, max(1, budget // len(self.prompts)))
        tokens = self._tokens[:, begin : longest - self.left]
        inputs = self.batch.cache.fill(self.rows, tokens, self._num_new, self.left)
        return model.logits(inputs), sum(self.computed()) - before
