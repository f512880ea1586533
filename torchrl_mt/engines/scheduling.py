"""Which requests a step takes up: no page of a prompt is computed twice at the same time.

The host finds a prefix in the cache only once it is complete: a group of requests with one prompt
that arrives together would compute it once each. Here the first computes it and the others wait.
"""

from __future__ import annotations

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    CacheAllocator,
    compute_block_hash,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

__all__ = ["GroupScheduler"]


class GroupScheduler(FIFOScheduler):
    """First come, first served, but who needs a page that another is computing waits for it."""

    name = "torchrl_mt"
    cache: PagedAttentionCache

    def _get_waiting_candidates(self) -> list[RequestState]:
        """Waiting requests in order, without those whose next page is being computed."""
        candidates = super()._get_waiting_candidates()
        if not self.cache.use_prefix_sharing or not candidates:
            return candidates
        # Of a model with several kinds of layers, one kind's pages tell as much as all of them.
        allocator = next(iter(self.cache.cache_allocators.values()))
        # Between two steps, whoever has no token yet may still be computing its prompt.
        under_way = {
            page
            for state in self.active_requests.values()
            if not state.generated_tokens
            for page, _ in (_next_page(state, allocator),)
        }
        chosen, budget = [], self.cache.max_batch_tokens
        for state in candidates:
            page, missing = _next_page(state, allocator)
            if page is not None and page in under_way:
                continue
            under_way.add(page)
            chosen.append(state)
            budget -= missing
            if budget <= 0:  # a step takes no more, so the rest need not be looked at
                break
        return chosen


def _next_page(state: RequestState, allocator: CacheAllocator) -> tuple[int | None, int]:
    """The hash of a prompt's first page that is not in the cache, and how many tokens are missing."""
    size = allocator.tokens_per_page
    tokens = state.initial_tokens
    # As many as the host would look up: at least one token is always computed.
    num_pages = (len(tokens) - 1) // size
    hashes: list[int] = vars(state).setdefault("_page_hashes", [])
    known = allocator.ledger.hash_to_block
    for i in range(num_pages):
        if i == len(hashes):
            parent = hashes[-1] if hashes else None
            hashes.append(compute_block_hash(parent, tokens[i * size : (i + 1) * size]))
        if hashes[i] not in known:
            return hashes[i], len(tokens) - i * size
    return None, len(tokens) - num_pages * size


# The host's own way to choose a scheduler is by name.
SCHEDULER_MAPPING[GroupScheduler.name] = GroupScheduler
