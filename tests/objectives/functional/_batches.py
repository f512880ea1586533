"""Random batches for property tests: masks with holes, several turns in a row, padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Batch:
    new: Tensor
    old: Tensor
    sampler: Tensor
    advantage: Tensor
    mask: Tensor
    turns: Tensor

    def map(self, function) -> Batch:
        return Batch(*(function(getattr(self, field.name)) for field in fields(self)))


@st.composite
def batches(draw, spread=1.0):
    n, s = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    old = -3 * torch.rand(n, s, generator=g)
    advantage = torch.randn(n, s, generator=g)
    if draw(st.booleans()):
        advantage = advantage[:, :1].expand(n, s).clone()
    return Batch(
        new=old + spread * torch.randn(n, s, generator=g),
        old=old,
        sampler=old + spread * torch.randn(n, s, generator=g),
        advantage=advantage,
        mask=mask,
        turns=(torch.rand(n, s, generator=g) < 0.4).long().cumsum(-1),
    )


def dirty(batch: Batch) -> Batch:
    """The same, with values on masked tokens that spoil whatever reads them."""

    def spoil(x: Tensor) -> Tensor:
        if x.dtype is torch.bool:
            return x
        return torch.where(batch.mask, x, torch.nan if x.is_floating_point() else -1)

    return batch.map(spoil)


@st.composite
def forked_rows(draw):
    """Reward, value, mask, turns ``[N, S]``, episode ``[N]``; ids skip numbers, rows share episodes."""
    n, s = draw(st.integers(0, 5)), draw(st.integers(1, 17))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(n, s, generator=g) < torch.rand(n, 1, generator=g) * 1.4 - 0.2
    steps = torch.randint(0, 3, (n, s), generator=g) * (torch.rand(n, s, generator=g) < 0.4)
    # A turn is sampled in one row only: rows that share an episode have turns of their own.
    turns = steps.cumsum(-1) + 40 * torch.randperm(n, generator=g)[:, None]
    turns = turns * draw(st.sampled_from([1, 1, 10**9]))
    turns = torch.where(mask | (torch.rand(n, s, generator=g) < 0.9), turns, -1)
    episode = torch.randint(-3, 3, (n,), generator=g) * 1000 if draw(st.booleans()) else None
    reward, value = torch.randn(2, n, s, generator=g)
    return reward, torch.where(mask, value, torch.nan), mask, turns, episode
