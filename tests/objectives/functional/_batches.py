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


def place_compact(mask: Tensor) -> Tensor:
    """Where each row's tokens go, ``[N, S]``, for its sampled ones to stand first, in order."""
    return (~mask).int().argsort(dim=-1, stable=True)


def place_spread(mask: Tensor, seed: int = 0) -> tuple[Tensor, int]:
    """Columns of a wider row that the tokens go to, in order, and its width."""
    n, s = mask.shape
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, s + 5, generator=g).argsort(-1)[:, :s].sort(-1).values, s + 5
