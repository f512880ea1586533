"""Nothing that the cache could have kept, or that another request is computing, is computed again.

The host finds a prefix only once it is complete, so a group of requests with one prompt that arrives
together would compute it once each; it forgets the pages that an answer's last step completes; and when
room is needed it drops every prefix at once; of a conversation it drops the page that is not complete.
Here the first of a group computes and the others wait, every page is kept, those that were used longest
ago leave first, and the next turn goes on in the page where the last one ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    BlockLedger,
    CacheAllocator,
    compute_block_hash,
)
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from torchrl_mt.engines.known_prefixes import KnownPrefixes
from torchrl_mt.engines.paged_attention import NAME, Layout, Room, Span

__all__ = ["GroupScheduler", "PrefixCache", "Tally"]

_MEMORY = 8
"""Of how many times the cache's pages it is known that they went through the model."""


@dataclass
class Tally:
    """Tokens counted since the start."""

    generated_tokens: int = 0
    """Sampled, also for requests that were taken back."""
    prefill_tokens: int = 0
    """Tokens of prompts that went through the model, again after an update included."""
    shared_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    new_tokens: int = 0
    """Tokens of prompts that had not gone through the model before, as far as is known."""


class _Ledger(BlockLedger):
    """The host's record of pages, which remembers those that were given up."""

    def __init__(self, known: KnownPrefixes) -> None:
        super().__init__()
        self.known = known

    def register_new_hash(self, block_id: int, block_hash: int) -> int | None:
        self.known.add(block_hash)
        return super().register_new_hash(block_id, block_hash)


class PrefixCache(PagedAttentionCache):
    """The host's cache, which gives up unused pages one by one, the longest unused first."""

    tally: Tally
    own_attention: bool
    """Whether tokens are read with a :class:`Layout`, not by the host's indices."""
    layout: Layout
    room: Room
    known: KnownPrefixes

    @classmethod
    def adopt(cls, cache: PagedAttentionCache, tally: Tally) -> None:
        """Make a cache one of these: the host makes its own and takes no other class."""
        cast(Any, cache).__class__ = cls
        adopted = cast(PrefixCache, cache)
        adopted.tally = tally
        adopted.own_attention = cache.config._attn_implementation == NAME
        adopted.room = Room(torch.empty(0, dtype=cache.dtype, device=cache.device))
        for allocator in cache.cache_allocators.values():
            room = _MEMORY * allocator.num_blocks
            adopted.known = KnownPrefixes(allocator.tokens_per_page, room)
            allocator.ledger = _Ledger(adopted.known)

    def count(self, batch: Iterable[FutureRequestState]) -> None:
        """Count the tokens of a batch that is about to be computed."""
        tally = self.tally
        for future in batch:
            state = future.state
            tally.generated_tokens += future.has_new_token
            begin = state.position_offset - future.query_length
            in_prompt = min(state.position_offset, len(state.initial_tokens)) - begin
            if in_prompt > 0:
                tally.prefill_tokens += in_prompt
                if self.use_prefix_sharing and not vars(state).get("_counted"):
                    vars(state)["_counted"] = True
                    (allocator,) = self.cache_allocators.values()
                    names = list(_page_names(state, allocator))
                    known = self.known.length(state.initial_tokens, names)
                    tally.new_tokens += len(state.initial_tokens) - known

    def lay_out(self, batch: Sequence[FutureRequestState]) -> None:
        """Prepare for attending to the requests of a batch, whose tokens follow each other."""
        if not self.own_attention:
            return
        (allocator,) = self.cache_allocators.values()
        tables, spans, first = allocator.block_table, [], 0
        for future in batch:
            state, length = future.state, future.query_length
            spans.append(Span(first, length, state.position_offset, tables[state.request_id]))
            first += length
        self.layout = Layout(
            spans,
            allocator.tokens_per_page,
            allocator.block_physical_stride // allocator.tokens_per_page,
            self.dtype,
            self.cache_tensor.device,
        )

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Say where a request's tokens are written, and where the host's attention reads them."""
        if self.own_attention:
            read_index = None
            if query_length == 1:  # as nearly always
                (allocator,) = self.cache_allocators.values()
                page, place = divmod(past_length, allocator.tokens_per_page)
                block = allocator.block_table[request_id][page]
                write_index[0].append(block * allocator.block_physical_stride + place)
                return
        super().extend_read_and_write_indices(
            request_id, past_length, query_length, read_index, write_index
        )

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Find a prefix, and count it."""
        found = super().search_prefix_match(request_id, prompt_ids)
        if self.use_prefix_sharing:
            found += self._take_tail(request_id, prompt_ids, found)
        self.tally.shared_tokens += found
        return found

    def keep_tail(self, state: RequestState) -> None:
        """Keep a finished request's incomplete page too, for the prompt that goes on there."""
        if not self.use_prefix_sharing:
            return
        (allocator,) = self.cache_allocators.values()
        tokens = state.initial_tokens + state.generated_tokens
        # The last token was sampled; it need not have gone through the model.
        known = min(state.position_offset, len(tokens) - 1)
        full, length = divmod(known, allocator.tokens_per_page)
        table = allocator.block_table.get(state.request_id, ())
        if not length or full >= len(table):
            return
        parent = allocator.ledger.block_to_hash.get(table[full - 1]) if full else None
        if full and parent is None:
            return
        name = self.known.add_tail(parent, tokens[known - length : known])
        allocator.ledger.register_new_hash(table[full], name)

    def _take_tail(self, request_id: str, prompt_ids: list[int], found: int) -> int:
        """Go on in the incomplete page behind a prefix, if one was kept; how many tokens it holds.

        The request will write behind them, so the page is nobody else's from then on.
        """
        (allocator,) = self.cache_allocators.values()
        ledger, table = allocator.ledger, allocator.block_table.get(request_id, [])
        parent = ledger.block_to_hash[table[-1]] if table else None
        for length, name in self.known.tails(parent, prompt_ids, found):
            page = ledger.hash_to_block.get(name)
            if page in ledger.cached_blocks:
                del ledger.cached_blocks[page], ledger.block_to_hash[page]
                del ledger.hash_to_block[name]
                allocator.block_table[request_id] = [*table, page]
                return length
        return 0

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Register the pages that a step completed, also if it was the request's last."""
        if not complete_blocks:
            return
        if state.status != RequestStatus.FINISHED or not self.use_prefix_sharing:
            return super().mark_complete_blocks(state, complete_blocks)
        tokens = state.initial_tokens + state.generated_tokens
        for name, num_blocks in complete_blocks.items():
            allocator = self.cache_allocators[name]
            if state.request_id in allocator.block_table:
                allocator.mark_complete_blocks(state.request_id, tokens, num_blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release a request's pages, the last first: a page is of no use without those before it."""
        for allocator in self.cache_allocators.values():
            if request_id in allocator.block_table:
                allocator.block_table[request_id].reverse()
        super().free_blocks(request_id, no_cache)

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """What is free or kept only in case it is needed again, in bytes or as a share of all."""
        kept = sum(
            len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
            for allocator in self.cache_allocators.values()
        )
        share = kept / (self.num_sectors * self.bytes_per_sector) if relative else kept
        return super().compute_free_capacity(relative) + share

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Find room for a request's next tokens, at the cost of pages that nobody uses."""
        if self.own_attention:
            (allocator,) = self.cache_allocators.values()
            pages = allocator.block_table.get(state.request_id, ())
            if state.position_offset + request_len <= len(pages) * allocator.tokens_per_page:
                return True
        while not super().can_store_request_tokens(state, request_len, dry_run):
            if dry_run or not self._evict_oldest():
                return False
        return True

    def _evict_oldest(self) -> bool:
        """Give up the pages that were used longest ago, a few at a time."""
        evicted_any = False
        for allocator in self.cache_allocators.values():
            ledger = allocator.ledger
            oldest = list(islice(ledger.cached_blocks, max(1, self.num_blocks // 64)))
            for block in oldest:
                del ledger.cached_blocks[block]
                del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            self.pool.free_blocks(allocator.index, oldest)
            evicted_any |= bool(oldest)
        self.pool.try_to_free_sectors()
        return evicted_any


class GroupScheduler(FIFOScheduler):
    """First come, first served, but who needs a page that another is computing waits for it."""

    name = "torchrl_mt"
    cache: PagedAttentionCache

    def finish_request(self, request_id: str) -> None:
        """Release a request's cache, but keep what a later prompt may begin with."""
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED:
            cast(PrefixCache, self.cache).keep_tail(state)
        super().finish_request(request_id)

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
    known, size, found = allocator.ledger.hash_to_block, allocator.tokens_per_page, 0
    for name in _page_names(state, allocator):
        if name not in known:
            return name, len(state.initial_tokens) - found
        found += size
    return None, len(state.initial_tokens) - found


def _page_names(state: RequestState, allocator: CacheAllocator) -> Iterator[int]:
    """The hashes of a prompt's complete pages; each is computed once."""
    size, tokens = allocator.tokens_per_page, state.initial_tokens
    names: list[int] = vars(state).setdefault("_page_names", [])
    # As many as the host would look up: at least one token is always computed.
    for i in range((len(tokens) - 1) // size):
        if i == len(names):
            parent = names[-1] if names else None
            names.append(compute_block_hash(parent, tokens[i * size : (i + 1) * size]))
        yield names[i]


# The host's own way to choose a scheduler is by name.
SCHEDULER_MAPPING[GroupScheduler.name] = GroupScheduler
