"""Memory that rows leave; what rows hold shows in the log-probabilities of the engine's answers."""

from __future__ import annotations

import pytest
import torch

from torchrl_mt.engines.transformers.padded_cache import CacheLayout, PaddedCache

LAYOUT = CacheLayout((((2, 3), (2, 3)), None, ((1, 4), (1, 2))), torch.float32, torch.device("cpu"))
"""A layer like any other, one that keeps nothing, and one whose values are narrower."""
PAST = [torch.ones(2, 2 * 3 + 2 * 3 + 4 + 2)]


@pytest.mark.parametrize("how", ["join", "absorb"])
def test_nothing_of_earlier_rows_remains(how):
    """A mask does not hide what is not a number: a weight of 0 times it is none, either."""
    cache, other = PaddedCache(LAYOUT), PaddedCache(LAYOUT)
    cache.join([50, 30], [[], []])
    memories = [memory for k in (0, 2) for memory in (cache.layers[k].keys, cache.layers[k].values)]
    for memory in memories:
        memory[1] = torch.nan
    cache.remove([1])
    if how == "join":
        cache.join([5], [PAST])
    else:
        other.join([5], [PAST])
        cache.absorb(other, [0])
    for memory in memories:
        assert memory[1, :, : cache.end].isfinite().all()
        assert memory[1].nansum() == memory.shape[1] * memory.shape[3] * 2
