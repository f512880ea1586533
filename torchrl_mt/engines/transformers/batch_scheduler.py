"""Which requests are computed together, token by token, and what is kept of them.

Two promises: no token of a prompt goes through the model that the cache has or that is just being
computed for another request; and requests and what is kept of earlier ones have no more tokens than
there may be, but for a request that is alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchrl_mt.engines.sampling import draw, random_word
from torchrl_mt.engines.transformers.batches import Batch, Prefill, Prompt, Request
from torchrl_mt.engines.transformers.cached_model import CachedModel
from torchrl_mt.engines.transformers.padded_cache import PaddedCache
from torchrl_mt.engines.transformers.prefix_tree import PrefixTree

__all__ = ["BatchScheduler", "TokenCounts"]

_PASS_COST = 128
"""A further forward pass costs about as much as this many tokens in one."""
_PROMPT_INTERVAL = 4
"""Steps of sampling between two steps of prompts, so that prompts are computed together."""
_ANSWER_ROOM = 16
"""Prompts with fewer tokens in common do not wait for each other; room for an answer's beginning."""
_SEEN_FACTOR = 8
"""Of how many times the cache's tokens it is known that they went through the model."""


@dataclass
class TokenCounts:
    """Tokens counted since the start."""

    generated_tokens: int = 0
    """Sampled, also for requests that were taken back."""
    prefill_tokens: int = 0
    """Tokens of prompts that went through the model, again after an update included."""
    shared_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    new_tokens: int = 0
    """Tokens of prompts that had not gone through the model before, as far as is known."""


class BatchScheduler:
    """Takes steps; one thread calls it, but for :meth:`usage`, which any may.

    Args:
        model: in the mode that it samples in.
        cache_tokens: most tokens in the cache.
        max_batch_tokens: most tokens of a forward pass.
        sharing: keep and share what was computed.
    """

    def __init__(
        self, model: CachedModel, *, cache_tokens: int, max_batch_tokens: int, sharing: bool
    ) -> None:
        self.version = 0
        """Of the weights: what each token is stamped with."""
        self.counts = TokenCounts()
        self._model = model
        self._room, self._budget, self._sharing = cache_tokens, max_batch_tokens, sharing
        self._key_cost = model.key_cost
        self._kept = PrefixTree()
        self._seen = PrefixTree()
        # Whoever moves from one to the other is in both for a moment, never in none.
        self._waiting: dict[Request, None] = {}
        self._running: dict[Request, None] = {}
        self._finished: list[Request] = []
        self._prefills: list[Prefill] = []
        self._batches: list[Batch] = []
        self._since_admission = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are in no batch yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batches."""
        return len(self._running)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self._waiting.update(dict.fromkeys(requests))

    def step(self) -> None:
        """Compute prompts that are due, and sample a token for every request that is ready."""
        self._drop_cancelled()
        if self._is_due():
            self._admit()
        self._compute_prompts()
        self._sample()

    def take_finished(self) -> list[Request]:
        """The requests that were completed since the last call, also by a step that failed."""
        finished, self._finished = self._finished, []
        return finished

    def forget_cache(self) -> None:
        """Drop all keys and values; requests begin anew with what they have."""
        for batch in self._batches:
            for row in batch.rows:
                if isinstance(row, Request):
                    self._seen.add(row.tokens[:-1])
        self._waiting = {**self._running, **self._waiting}
        self._clear()

    def stop(self) -> list[Request]:
        """Forget everything; returns the requests that are not complete."""
        requests = [*self._running, *self._waiting]
        self._clear()
        self._waiting = {}
        return requests

    def usage(self) -> dict[str, int]:
        """Requests, and tokens in the cache, now."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "cache_tokens": self._num_held(),
            "kept_tokens": len(self._kept),
        }

    def _clear(self) -> None:
        """Empty the batches and the cache."""
        self._running = {}
        self._prefills, self._batches = [], []
        self._kept = PrefixTree()

    # Prompts

    def _is_due(self) -> bool:
        """Whether to look for prompts: a pass for each that comes would cost more than it brings."""
        sampling = sum(len(batch.rows) for batch in self._batches)
        count = len(self._waiting)
        return count > 0 and (self._since_admission >= _PROMPT_INTERVAL or count >= sampling)

    def _admit(self) -> None:
        """Let requests in, oldest first, but none whose beginning is just being computed."""
        under_way = {prompt.key: prompt for prefill in self._prefills for prompt in prefill.prompts}
        chosen: dict[Hashable, Prompt] = {}
        budget, room = self._budget, self._room - self._num_held()
        for request in list(self._waiting):
            if self._running and (budget <= 0 or len(self._running) >= self._budget):
                break
            prompt = self._look_up(request)
            first = chosen.get(prompt.key) or under_way.get(prompt.key)
            if first is not None and first.tokens != request.tokens:
                continue
            room -= len(request.tokens) + _ANSWER_ROOM
            if self._running and room < 0:
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
            self._running[request] = None
            del self._waiting[request]
        self._since_admission = 0
        self._evict()
        for prompts in self._grouped(chosen.values()):
            self._prefills.append(Prefill(self._model, self._batch_for(prompts), prompts))

    def _look_up(self, request: Request) -> Prompt:
        """What of a request has to be computed."""
        if not self._sharing:
            return Prompt(request.tokens, [request], 0, [], request)
        # At least one token is always computed: what follows it is not kept.
        known, past = self._kept.find(request.tokens[:-1], copied=True)
        key = tuple(request.tokens[: known + _ANSWER_ROOM])
        return Prompt(request.tokens, [request], known, past, key)

    def _grouped(self, prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
        """Prompts that are padded to one size, where that is cheaper than another forward pass."""
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
        """Where prompts are to be computed: in a batch that is under way, or in one of their own."""
        # Who samples does not wait for a prompt that takes several steps.
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
        """The batch where rows cause the least padding; ``None`` if a batch of their own is cheaper."""
        best, least = None, float(_PASS_COST)
        for batch in batches:
            width, size = batch.cache.width, len(batch.rows)
            padding = count * max(0, width - longest) + size * max(0, longest - width)
            fits = (size + count) * max(width, longest) <= self._room
            if padding * self._key_cost < least and fits:
                best, least = batch, padding * self._key_cost
        return best

    def _compute_prompts(self) -> None:
        """Put prompts through the model, within the budget."""
        budget = self._budget
        # The oldest has half of the budget, so that short ones that keep coming do not hold it up.
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
        """Sample the first tokens after prompts."""
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
        self._sweep()

    # Sampling

    def _sample(self) -> None:
        """Sample a token for every request in the batches."""
        self._preempt()
        self._merge()
        for batch in list(self._batches):
            if batch.rows and not batch.prefills:
                requests = batch.requests
                last = [[request.tokens[-1]] for request in requests]
                tokens = torch.tensor(last, device=self._model.layout.device)
                logits = self._model.logits(batch.cache.extend(tokens))
                self._draw(logits, requests)
        self._since_admission += 1

    def _merge(self) -> None:
        """Make one batch of two, if that is cheaper."""
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
        """Append a token to each request; those that are complete leave."""
        words = [random_word(request.seed, len(request.tokens)) for request in requests]
        tokens, log_probs = draw(logits, [request.sampling for request in requests], words)
        if not bool(log_probs.isfinite().all()):
            raise ValueError("the model's logits are not finite: are its weights?")
        self.counts.generated_tokens += len(requests)
        finished = []
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            if token in request.stop_ids or len(request.tokens) == request.limit:
                finished.append(request)
        self._finished += finished
        self._leave(finished)
        self._evict()

    # Leaving

    def _drop_cancelled(self) -> None:
        """Let go of what was taken back."""
        for request in [request for request in self._waiting if request.cancelled]:
            del self._waiting[request]
        self._leave([request for request in self._running if request.cancelled])

    def _leave(self, requests: list[Request]) -> None:
        """Take requests out of the batches; what was computed for them may be kept."""
        if not requests:
            return
        gone = set(requests)
        for request in requests:
            del self._running[request]
        for batch in self._batches:
            left: list[tuple[int, list[int]]] = []
            for i, row in enumerate(batch.rows):
                if isinstance(row, Prompt):
                    row.requests = [request for request in row.requests if request not in gone]
                elif row in gone:
                    assert row is not None
                    # The last token was sampled; it has not gone through the model.
                    left.append((i, row.tokens[:-1]))
                    batch.rows[i] = None
            self._keep(batch.cache, [i for i, _ in left], [text for _, text in left])
        self._sweep()

    def _sweep(self) -> None:
        """Take out the rows that nobody waits for."""
        for batch in list(self._batches):
            if not batch.in_use and (batch.prefills or len(self._batches) > 1):
                self._drop(batch)
            elif not batch.prefills:
                batch.sweep()  # of the last batch the memory stays, for who comes next

    def _drop(self, batch: Batch) -> None:
        """Give a batch up that nobody waits for."""
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
        """Keep what was computed, for later prompts.

        Args:
            cache: where it is.
            rows: of the cache.
            texts: of each row the tokens that were computed.
            copied: whether requests still have them.
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

    def _num_held(self) -> int:
        """Tokens of the requests under way."""
        return sum(len(request.tokens) for request in list(self._running))

    def _evict(self) -> None:
        """Give up what is kept in case it is needed, where requests need the room."""
        _shrink(self._kept, self._room - self._num_held())

    def _preempt(self) -> None:
        """Have room for a token of each request; who came last goes back to the queue for it."""
        sampling = {
            request for batch in self._batches if not batch.prefills for request in batch.requests
        }
        least = 0 if self._prefills else 1  # somebody must get on
        while len(sampling) > least and self._num_held() + len(sampling) > self._room:
            last = next(request for request in reversed(self._running) if request in sampling)
            sampling.remove(last)
            self._waiting = {last: None, **self._waiting}
            self._leave([last])


def _shrink(tree: PrefixTree, size: int) -> None:
    """Have a tree know no more tokens than that, and some fewer: it is slow to look for the oldest."""
    if len(tree) > size:
        tree.evict(len(tree) - size + size // 64)
