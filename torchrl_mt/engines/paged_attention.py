"""Attention over a paged cache in which each request meets its own tokens alone.

Where there is no flash attention, the host lays all requests' tokens side by side and masks what does
not belong together: the work grows with the square of the requests. Here it grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
)

__all__ = ["NAME", "Layout", "Room", "Span", "supports"]

NAME = "torchrl_mt_paged"
"""Under which transformers knows it."""


class Span(NamedTuple):
    """What one request brings to a batch."""

    first: int
    """Where its tokens begin among those of the batch."""
    num_queries: int
    """How many they are."""
    num_keys: int
    """How many tokens the last of them attends to, itself included."""
    blocks: Sequence[int]
    """Where those lie: blocks of the cache, in order."""


_READING = 8
"""Reading a key costs as much as its meeting so many queries, about."""
_CALL = 2**16
"""A further call costs as much as this work, about."""


class _Group(NamedTuple):
    """Requests of a similar size, padded to one."""

    queries: torch.Tensor | None
    """``[B, Q]`` tokens of the batch; padding repeats one. ``None``: all of them in order, one each."""
    taken: torch.Tensor | None
    """``[B, Q]`` which of these are no padding; ``None``: all."""
    pages: torch.Tensor
    """``[B * P]`` pages of the cache."""
    size: tuple[int, int, int]
    """``B``, ``Q`` and ``P``."""
    bias: torch.Tensor
    """``[B, 1, Q, K]`` 0 where a query attends to a key, else minus infinity."""
    foreign: torch.Tensor
    """Places among the ``B * K`` keys that hold what others left there, which need not be finite."""


class Layout:
    """How the requests of a batch are grouped; it holds for all layers.

    Args:
        spans: what each request brings.
        page_size: tokens of a page.
        block_size: pages of a block; a layer's own page is the first from its point of view.
        dtype: of the queries.
        device: of the cache.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        page_size: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size, self.block_size = page_size, block_size
        self.dtype, self.device = dtype, device
        self.groups: list[_Group] = []
        keys = [span.num_keys for span in spans]
        single = all(span.num_queries == 1 for span in spans)
        if single and _alike(len(keys), max(keys), sum(keys) * _work(1), 1):
            self.groups.append(self._group(spans, in_order=True))
            return
        members: list[Span] = []
        work = most = 0
        for span in sorted(spans, key=lambda span: (span.num_queries, span.num_keys)):
            own = span.num_keys * _work(span.num_queries)
            widest = max(most, span.num_keys)
            # The last in order has the most queries.
            if members and not _alike(len(members) + 1, widest, work + own, span.num_queries):
                self.groups.append(self._group(members))
                members, work, widest = [], 0, span.num_keys
            members.append(span)
            work, most = work + own, widest
        self.groups.append(self._group(members))

    def _group(self, spans: Sequence[Span], in_order: bool = False) -> _Group:
        """Pad requests to one size."""
        device = self.device
        num_queries = max(span.num_queries for span in spans)
        num_pages = -(-max(span.num_keys for span in spans) // self.page_size)
        blocks: list[int] = []
        for i, span in enumerate(spans, 1):
            blocks += span.blocks[:num_pages]
            # Block 0 is never written: the host keeps it for padding.
            blocks += [0] * (i * num_pages - len(blocks))
        sizes = torch.tensor([span.num_queries for span in spans], device=device)
        past = torch.tensor([span.num_keys for span in spans], device=device) - sizes
        step = torch.arange(num_queries, device=device)
        # What lies behind a request's last token, in its page or in block 0, lies behind its queries.
        place = torch.arange(num_pages * self.page_size, device=device)
        hidden = place > (past[:, None] + step)[..., None]
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
        bias.masked_fill_(hidden, -math.inf)
        # The last query sees all that its request has written.
        foreign = (place >= (past + sizes)[:, None]).flatten().nonzero().squeeze(1)
        queries = taken = None
        if not in_order:
            first = torch.tensor([span.first for span in spans], device=device)
            queries = first[:, None] + torch.minimum(step, sizes[:, None] - 1)
            taken = step < sizes[:, None]
        return _Group(
            queries,
            taken,
            torch.tensor(blocks, device=device) * self.block_size,
            (len(spans), num_queries, num_pages),
            bias[:, None],
            foreign,
        )


def _work(num_queries: int) -> int:
    """About what a key costs: it is read, and meets each query."""
    return num_queries + _READING


def _alike(count: int, num_keys: int, work: int, num_queries: int) -> bool:
    """Whether requests that cost ``work`` may be padded to one size."""
    return count * num_keys * _work(num_queries) <= 2 * work + _CALL


class Room:
    """Memory that every layer and step reads keys and values into.

    New memory for each would be brought in page by page by the operating system, which takes longer
    than to fill it.

    Args:
        like: of the dtype and on the device of the keys.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._memory = [like.new_empty(0) for _ in range(2)]

    def take(self, which: int, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of this shape; it holds until the next one is taken."""
        size = math.prod(shape)
        if size > len(self._memory[which]):
            self._memory[which] = self._memory[which].new_empty(size + size // 2)
        return self._memory[which][:size].view(shape)


def supports(config: PreTrainedConfig) -> bool:
    """Whether all layers of a model attend to all earlier tokens."""
    return set(group_layers_by_attn_type(config)) == {FULL_ATTENTION}


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cache: Any,
    write_index: list[torch.Tensor],
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into the cache, and attend to each request's own.

    Args:
        module: the attention layer.
        query: ``[1, H, N, D]``, of the tokens of all requests, one request after the other.
        key: ``[1, G, N, D]``, ``H`` a multiple of ``G``.
        value: likewise.
        attention_mask: none.
        cache: with the batch's ``layout`` and ``room`` to read it into.
        write_index: where the tokens belong in the cache.
        scaling: of the scores.
        position_bias: not supported.
        softcap: not supported.
        **kwargs: not used.

    Returns:
        ``[1, N, H, D]``, and nothing for the weights.
    """
    if position_bias is not None or softcap is not None:
        raise ValueError("a model with position_bias or softcap needs attn_implementation='eager'.")
    layer = cast(int, module.layer_idx)
    allocator: FullAttentionCacheAllocator = cache.layer_to_allocator[layer]
    index = write_index[allocator.index]
    for rows, new in zip(allocator._kv_token_views[layer], (key, value), strict=True):
        rows.index_copy_(0, index, new[0].transpose(0, 1))
    keys, values = allocator._kv_page_views[layer]
    queries = query[0].transpose(0, 1)  # [N, H, D]
    output: torch.Tensor | None = None
    for group in cache.layout.groups:
        part = _attend_group(group, queries, keys, values, scaling, cache.room)
        if group.queries is None:
            output = part[:, 0]
            break
        output = torch.empty_like(queries) if output is None else output
        output[group.queries[group.taken]] = part[group.taken]
    assert output is not None
    return output[None], None


def _attend_group(
    group: _Group,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    room: Room,
) -> torch.Tensor:
    """Attend within requests of one size; ``[B, Q, H, D]``."""
    batch, length, num_pages = group.size
    q = (queries[:, None] if group.queries is None else queries[group.queries]).transpose(1, 2)
    num_keys, heads = num_pages * keys.shape[1], keys.shape[2]
    shape = (batch * num_pages, *keys.shape[1:])
    read = []
    for i, pages in enumerate((keys, values)):
        rows = torch.index_select(pages, 0, group.pages, out=room.take(i, shape))
        # A bias of minus infinity does not hide a NaN, nor does a weight of 0.
        rows.view(batch * num_keys, -1).index_fill_(0, group.foreign, 0)
        read.append(rows.view(batch, num_keys, heads, -1).transpose(1, 2))
    k, v = read
    bias, shared = group.bias, q.shape[1] // heads
    # Heads that share keys are further queries of one head.
    q = q.reshape(batch, heads, shared * length, -1)
    if shared > 1:
        bias = bias.repeat(1, 1, shared, 1)
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads * shared, length, -1).transpose(1, 2)


AttentionInterface.register(NAME, attend)
