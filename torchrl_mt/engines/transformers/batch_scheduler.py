"""Continuous batching: which requests are computed together, and what stays in the cache.

Two promises: no prompt token is computed that the cache holds or that is being computed for another
request; and running requests and kept prefixes stay within ``cache_tokens``, unless one request alone
exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchrl_mt.devices import on_cpu, upload
from torchrl_mt.engines.sampling import draw, random_word
from torchrl_mt.engines.transformers.batches import Batch, Prefill, Prompt, Request
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.padded_cache import PaddedCache
from torchrl_mt.engines.transformers.prefix_tree import PrefixTree

__all__ = ["BatchScheduler", "TokenCounts"]

_PASS_COST = 128
"""Cost of another forward pass, in tokens."""
_PROMPT_INTERVAL = 4
"""Sampling steps between two admissions, so that prompts are computed together."""
_ANSWER_ROOM = 16
"""Tokens reserved for a response. Prompts wait for another that shares this many uncached tokens."""
_SEEN_FACTOR = 8
"""Size of the record of computed tokens, in multiples of the cache's size."""


@dataclass
class TokenCounts:
    """Numbers of tokens since the start."""

    generated_tokens: int = 0
    """Sampled tokens, including those of cancelled requests."""
    prefill_tokens: int = 0
    """Prompt tokens computed, including those computed again after an update."""
    shared_tokens: int = 0
    """Prompt tokens found in the cache."""
    new_tokens: int = 0
    """Prompt tokens that were not computed before, as far as is recorded."""


class BatchScheduler:
    """Schedules prompts and sampling step by step.

    Use it from one thread; only :meth:`usage` may be called from others.

    Args:
        model: the model in evaluation mode.
        cache_tokens: maximum number of tokens in the cache.
        max_batch_tokens: maximum number of tokens in a forward pass.
        sharing: keep computed prefixes and share them between requests.
    """

    def __init__(
        self, model: CachedModel, *, cache_tokens: int, max_batch_tokens: int, sharing: bool
    ) -> None:
        self.version = 0
        """Weight version that stamps each sampled token."""
        self.counts = TokenCounts()
        self._model = model
        self._room, self._budget, self._sharing = cache_tokens, max_batch_tokens, sharing
        self._key_cost = model.key_cost
        self._kept = PrefixTree()
        self._seen = PrefixTree()
        # A request that moves is in both for a moment and never in neither.
        self.waiting: dict[Request, None] = {}
        """Requests that are in no batch yet."""
        self.running: dict[Request, None] = {}
        """Requests in the batches."""
        self._finished: list[Request] = []
        self._prefills: list[Prefill] = []
        self._batches: list[Batch] = []
        self._since_admission = self._left_since = 0

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self.waiting.update(dict.fromkeys(requests))

    def step(self) -> None:
        """Compute some prompts, and sample a token for every request that is ready."""
        try:
            if self._model.has_moved():
                self._model.follow()
                self.forget_cache()
            self._drop_cancelled()
            if self.waiting and self.is_due():
                self._admit()
            self._compute_prompts()
            self._sample()
        except Exception as error:
            if not self._model.has_moved():
                raise
            raise RuntimeError(
                "the model was moved or converted while tokens were sampled: do it between two "
                "rollouts, or make the engine with share_weights=False."
            ) from error

    def take_finished(self) -> list[Request]:
        """Requests completed since the last call, including those of a step that failed."""
        finished, self._finished = self._finished, []
        return finished

    def forget_cache(self) -> None:
        """Drop all keys and values; running requests become prompts with the tokens they have."""
        for batch in self._batches:
            for row in batch.rows:
                if isinstance(row, Request):
                    self._seen.add(row.tokens[:-1])
        self.waiting = {**self.running, **self.waiting}
        self._clear()

    def stop(self) -> list[Request]:
        """Drop all requests and the cache; returns the incomplete requests."""
        requests = [*self.running, *self.waiting]
        self._clear()
        self.waiting = {}
        return requests

    def usage(self) -> dict[str, int]:
        """Current numbers of requests and of tokens in the cache."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "cache_tokens": self._running_tokens(),
            "kept_tokens": len(self._kept),
        }

    def _clear(self) -> None:
        """Empty the batches and the cache."""
        self.running = {}
        self._prefills, self._batches = [], []
        self._kept = PrefixTree()
        self._model.forget_images()

    # Prompts

    def is_due(self, arriving: int = 0) -> bool:
        """Whether to admit requests; a forward pass for each single prompt would cost too much."""
        sampling = sum(len(batch.rows) for batch in self._batches)
        count = max(len(self.waiting) + arriving, self._left_since)
        return self._since_admission >= _PROMPT_INTERVAL or count >= sampling

    def _admit(self) -> None:
        """Admit requests, oldest first, except those whose prefix is being computed."""
        running = {prompt.key: prompt for prefill in self._prefills for prompt in prefill.prompts}
        chosen: dict[Hashable, Prompt] = {}
        budget, room = self._budget, self._room - self._running_tokens()
        for request in list(self.waiting):
            if self.running and (budget <= 0 or len(self.running) >= self._budget):
                break
            prompt = self._look_up(request)
            first = chosen.get(prompt.key) or running.get(prompt.key)
            if first is not None and first.tokens != request.tokens:
                continue
            room -= len(request.tokens) + _ANSWER_ROOM
            if self.running and room < 0:
                break
            if first is not None:
                first.requests.append(request)
                self.counts.shared_tokens += len(request.tokens)
            else:
                prompt.tokens = request.tokens[:]
                chosen[prompt.key] = prompt
                budget -= prompt.num_new
                self.counts.shared_tokens += prompt.known
                if self._sharing:
                    known = self._seen.find(request.tokens[:-1])[0]
                    self.counts.new_tokens += len(request.tokens) - known
            self.running[request] = None
            del self.waiting[request]
        self._since_admission = self._left_since = 0
        self._evict()
        for prompts in self._grouped(chosen.values()):
            self._prefills.append(Prefill(self._model, self._batch_for(prompts), prompts))

    def _look_up(self, request: Request) -> Prompt:
        """Look up a request's prefix in the cache."""
        if not self._sharing:
            return Prompt(request.tokens, [request], 0, [], request, request.images)
        # The last token is always computed, because logits are not cached.
        known, past = self._kept.find(request.tokens[:-1], copied=True)
        key = tuple(request.tokens[: known + _ANSWER_ROOM])
        return Prompt(request.tokens, [request], known, past, key, request.images)

    def _grouped(self, prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
        """Group prompts whose padding costs less than another forward pass."""
        group: list[Prompt] = []
        cost, widest = 0.0, 0
        for prompt in sorted(prompts, key=lambda prompt: (prompt.num_new, len(prompt.tokens))):
            width, length = len(prompt.tokens), prompt.num_new
            own = length * (1 + self._key_cost * width)
            widest, size = max(widest, width), len(group) + 1
            together = size * length * (1 + self._key_cost * widest)
            too_large = size * length > self._budget or size * widest > self._room
            if group and (together > cost + own + _PASS_COST or too_large):
                yield group
                group, widest, together = [], width, own
            group.append(prompt)
            cost = together
        if group:
            yield group

    def _batch_for(self, prompts: list[Prompt]) -> Batch:
        """Choose a batch for prompts: a running one if the padding is cheap, or else their own."""
        # A prompt that takes several steps must not delay requests that sample.
        long = {
            prefill.batch
            for prefill in self._prefills
            if prefill.left * len(prefill.prompts) > self._budget
        }
        batch = None
        if max(prompt.num_new for prompt in prompts) * len(prompts) <= self._budget:
            count = sum(len(prompt.requests) for prompt in prompts)
            longest = max(len(prompt.tokens) for prompt in prompts)
            batch = self._cheapest(
                [each for each in self._batches if each not in long], count, longest
            )
        batch = batch or next((each for each in self._batches if not each.rows), None)
        if batch is None:
            batch = Batch(self._model.new_cache())
            self._batches.append(batch)
        return batch

    def _cheapest(self, batches: Iterable[Batch], count: int, longest: int) -> Batch | None:
        """Find the batch where rows need the least padding; ``None`` if their own is cheaper."""
        best, least = None, float(_PASS_COST)
        for batch in batches:
            width, size = batch.cache.width, len(batch.rows)
            padding = count * max(0, width - longest) + size * max(0, longest - width)
            fits = (size + count) * max(width, longest) <= self._room
            if padding * self._key_cost < least and fits:
                best, least = batch, padding * self._key_cost
        return best

    def _compute_prompts(self) -> None:
        """Compute prompts, within the budget."""
        budget = self._budget
        # The oldest prefill gets half of the budget, so that short ones cannot starve it.
        prefill = self._prefills[0] if self._prefills else None
        share = budget // 2 if len(self._prefills) > 1 else budget
        while prefill is not None and budget > 0:
            logits, count = prefill.advance(self._model, share)
            self.counts.prefill_tokens += count
            budget -= max(1, count)
            if not prefill.left:
                self._prefills.remove(prefill)
                self._begin_sampling(prefill, logits)
            prefill = min(self._prefills, key=lambda prefill: prefill.left, default=None)
            share = budget

    def _begin_sampling(self, prefill: Prefill, logits: torch.Tensor) -> None:
        """Sample the first token of every request of computed prompts."""
        batch, prompts = prefill.batch, prefill.prompts
        batch.prefills -= 1
        self._keep(batch.cache, prefill.rows, [prompt.tokens for prompt in prompts], copied=True)
        rows: list[tuple[int, Request]] = []
        further: list[tuple[int, Request]] = []
        for i, (row, prompt) in enumerate(zip(prefill.rows, prompts, strict=True)):
            pairs = [(i, request) for request in prompt.requests]
            batch.rows[row] = prompt.requests[0] if pairs else None
            rows += pairs[:1]
            further += pairs[1:]
        if further:
            batch.cache.absorb(batch.cache, [prefill.rows[i] for i, _ in further])
            batch.rows += [request for _, request in further]
        rows += further
        if rows:
            self._draw(logits[[i for i, _ in rows]], [request for _, request in rows])
        self._remove_free_rows()

    # Sampling

    def _sample(self) -> None:
        """Sample a token for every request in the batches."""
        self._preempt()
        self._merge()
        for batch in list(self._batches):
            if batch.rows and not batch.prefills:
                requests = batch.requests
                last = [[request.tokens[-1]] for request in requests]
                tokens = upload(last, self._model.layout.device)
                logits = self._model.logits(batch.cache.extend(tokens))
                self._draw(logits, requests)
        self._since_admission += 1

    def _merge(self) -> None:
        """Merge the smallest batch into another, if that is cheaper."""
        idle = [batch for batch in self._batches if not batch.prefills]
        if len(idle) > 1:
            small = min(idle, key=lambda batch: len(batch.rows))
            idle.remove(small)
            into = self._cheapest(idle, len(small.rows), small.cache.width)
            if into is not None:
                into.cache.absorb(small.cache, range(len(small.rows)))
                into.rows += small.rows
                self._batches.remove(small)

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> None:
        """Sample a token for each request, and remove complete requests."""
        words = [random_word(request.seed, len(request.tokens)) for request in requests]
        try:
            drawn = draw(logits, [request.sampling for request in requests], words)
            tokens, log_probs = on_cpu(*drawn)
        except Exception as error:
            if len(requests) > 1:  # one that cannot be drawn for must not end the others
                for row, request in zip(logits.split(1), requests, strict=True):
                    self._draw(row, [request])
                return
            requests[0].failure = error
            tokens = torch.zeros(1, dtype=torch.int64, device="cpu")
            log_probs = torch.full((1,), torch.nan, device="cpu")
        finished = []
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            if not math.isfinite(log_prob):
                request.failure = request.failure or ValueError(
                    "the model's logits must be finite, got others: check its weights."
                )
                finished.append(request)
                continue
            self.counts.generated_tokens += 1
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            if (
                token in request.stop_ids
                or (request.stops is not None and request.ended_by_string(token))
                or len(request.tokens) == request.limit
            ):
                finished.append(request)
        self._finished += finished
        self._leave(finished)
        self._evict()

    # Leaving

    def _drop_cancelled(self) -> None:
        for request in [request for request in self.waiting if request.cancelled]:
            del self.waiting[request]
        self._leave([request for request in self.running if request.cancelled])

    def _leave(self, requests: list[Request]) -> None:
        """Remove requests from the batches, and keep their prefixes in the cache."""
        if not requests:
            return
        gone = set(requests)
        self._left_since += len(gone)
        for request in requests:
            del self.running[request]
        for batch in self._batches:
            left: list[tuple[int, list[int]]] = []
            for i, row in enumerate(batch.rows):
                if isinstance(row, Prompt):
                    row.requests = [request for request in row.requests if request not in gone]
                elif row in gone:
                    assert row is not None
                    # The last token was sampled, but its keys and values were not computed.
                    left.append((i, row.tokens[:-1]))
                    batch.rows[i] = None
            self._keep(batch.cache, [i for i, _ in left], [text for _, text in left])
        self._remove_free_rows()

    def _remove_free_rows(self) -> None:
        """Remove free rows, and batches that no request waits for."""
        for batch in list(self._batches):
            if not batch.in_use and (batch.prefills or len(self._batches) > 1):
                self._drop(batch)
            elif not batch.prefills:
                batch.remove_free_rows()  # the last batch keeps its memory for later requests

    def _drop(self, batch: Batch) -> None:
        """Drop a batch that no request waits for, and keep what was computed of its prompts."""
        self._batches.remove(batch)
        for prefill in [prefill for prefill in self._prefills if prefill.batch is batch]:
            self._prefills.remove(prefill)
            sizes = prefill.computed()
            texts = [p.tokens[:size] for p, size in zip(prefill.prompts, sizes, strict=True)]
            self._keep(batch.cache, prefill.rows, texts)

    def _keep(
        self,
        cache: PaddedCache,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        *,
        copied: bool = False,
    ) -> None:
        """Keep computed prefixes for later prompts.

        Args:
            cache: holds the keys and values.
            rows: rows of the cache.
            texts: computed tokens of each row.
            copied: whether requests still hold these rows.
        """
        if not self._sharing:
            return
        known = [self._kept.find(text)[0] for text in texts]
        new = [i for i, text in enumerate(texts) if known[i] < len(text)]
        if not new:
            return
        pieces = cache.pieces(
            [rows[i] for i in new], [known[i] for i in new], [len(texts[i]) for i in new]
        )
        for i, piece in zip(new, pieces, strict=True):
            self._kept.add(texts[i], piece, copied=copied)
            self._seen.add(texts[i])
        _shrink(self._seen, _SEEN_FACTOR * self._room)
        self._evict()

    def _running_tokens(self) -> int:
        return sum(len(request.tokens) for request in list(self.running))

    def _evict(self) -> None:
        """Evict kept prefixes until they fit beside the running requests."""
        _shrink(self._kept, self._room - self._running_tokens())

    def _preempt(self) -> None:
        """Make room for a token per request; the latest requests go back to the queue."""
        sampling = {
            request for batch in self._batches if not batch.prefills for request in batch.requests
        }
        least = 0 if self._prefills else 1  # one request must always make progress
        while len(sampling) > least and self._running_tokens() + len(sampling) > self._room:
            last = next(request for request in reversed(self.running) if request in sampling)
            sampling.remove(last)
            self.waiting = {last: None, **self.waiting}
            self._leave([last])


def _shrink(tree: PrefixTree, size: int) -> None:
    """Evict down to ``size`` tokens and a little below, because each eviction scans the tree."""
    if len(tree) > size:
        tree.evict(len(tree) - size + size // 64)
