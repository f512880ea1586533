"""Attention to each request's own tokens, against attention one request at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from torchrl_mt.engines import TransformersEngine
from torchrl_mt.engines.paged_attention import NAME, Layout, Room, Span, attend
from torchrl_mt.testing import tiny_chat_model

from .helpers import assert_sampled_by, generate_all, prompts

DIM = 4


class Allocator:
    """Pages of one layer's keys and values, as the host lays them out."""

    index = 0

    def __init__(self, num_pages: int, page_size: int, heads: int) -> None:
        pages = [torch.randn(num_pages, page_size, heads, DIM) for _ in range(2)]
        self._kv_page_views = {0: tuple(pages)}
        self._kv_token_views = {0: tuple(rows.flatten(0, 1) for rows in pages)}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 60)),
        min_size=1,
        max_size=12,
    ),
    page_size=st.sampled_from([1, 4, 7]),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2), (3, 1)]),
    decode=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_each_request_attends_to_its_own_tokens(sizes, page_size, heads, decode, seed):
    torch.manual_seed(seed)
    if decode:
        sizes = [(1, past) for _, past in sizes]
    num_heads, num_kept = heads
    needed = [-(-(new + past) // page_size) for new, past in sizes]
    allocator = Allocator(1 + sum(needed), page_size, num_kept)
    order = (1 + torch.randperm(sum(needed))).split(needed)
    spans, rows, first = [], [], 0
    for (new, past), pages in zip(sizes, order, strict=True):
        spans.append(Span(first, new, new + past, pages.tolist()))
        rows.append((pages[:, None] * page_size + torch.arange(page_size)).flatten()[: new + past])
        first += new
    # What lies where a request has written nothing must not matter, not even if it is no number.
    known = torch.cat([row[:past] for (_, past), row in zip(sizes, rows, strict=True)])
    for tokens in allocator._kv_token_views[0]:
        foreign = torch.ones(len(tokens), dtype=torch.bool)
        foreign[known] = False
        tokens[foreign] = torch.nan
    write = torch.cat([row[past:] for (_, past), row in zip(sizes, rows, strict=True)])
    query = torch.randn(1, num_heads, first, DIM)
    key, value = torch.randn(2, 1, num_kept, first, DIM)
    cache = SimpleNamespace(
        layer_to_allocator={0: allocator},
        layout=Layout(spans, page_size, 1, torch.float32, torch.device("cpu")),
        room=Room(query),
    )
    output, _ = attend(
        SimpleNamespace(layer_idx=0),
        query,
        key,
        value,
        None,
        cache=cache,
        write_index=[write],
        scaling=0.7,
        is_causal=True,
    )
    assert output.shape == (1, first, num_heads, DIM)
    keys, values = allocator._kv_token_views[0]
    torch.testing.assert_close(keys[write], key[0].transpose(0, 1))
    for span, (new, past), row in zip(spans, sizes, rows, strict=True):
        own = slice(span.first, span.first + new)
        visible = torch.arange(new + past) <= past + torch.arange(new)[:, None]
        expected = functional.scaled_dot_product_attention(
            query[0, :, own],
            *(
                kept[row].transpose(0, 1).repeat_interleave(num_heads // num_kept, 0)
                for kept in (keys, values)
            ),
            attn_mask=visible,
            scale=0.7,
        )
        torch.testing.assert_close(output[0, own], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_requests_of_one_size_are_one_call_and_others_do_not_pad_to_the_longest():
    spans = [Span(i, 1, 100 + i, range(1, 64)) for i in range(64)]
    layout = Layout(spans, 16, 1, torch.float32, torch.device("cpu"))
    assert len(layout.groups) == 1
    mixed = [*spans, Span(64, 900, 1000, range(1, 64))]
    layout = Layout(mixed, 16, 1, torch.float32, torch.device("cpu"))
    assert sorted(group.size[:2] for group in layout.groups) == [(1, 900), (64, 1)]


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({}, True),
        ({"num_key_value_heads": 2}, True),
        ({"attn_implementation": "eager"}, False),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, False),
    ],
)
def test_models_are_sampled_as_they_are(tokenizer, config, own):
    """Also those that the host attends for; each beside others of any length."""
    torch.manual_seed(0)
    model = tiny_chat_model(" ".join(map(str, range(22))), hidden_size=32, **config)[0]
    engine = TransformersEngine(model, tokenizer, page_size=8, max_batch_tokens=64)
    assert (engine._model.config._attn_implementation == NAME) == own
    assert model.config._attn_implementation == config.get("attn_implementation", "sdpa")
    requests = [prompt[: 1 + 7 * i] for i, prompt in enumerate(prompts(12, length=100))]
    for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
        assert_sampled_by(model, prompt, answer)
    engine.close()
    assert engine._model.config._attn_implementation == model.config._attn_implementation
