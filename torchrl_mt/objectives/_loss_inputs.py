"""The entries of rows that the loss reads: there, of one shape, and finite on the tokens that count.

Everything is checked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.objectives._rows import read_entry, read_valid
from torchrl_mt.objectives.functional._checks import check_shape
from torchrl_mt.objectives.scoring.row_log_probs import scored_tokens

FLOATING = (
    "sample_log_prob",
    "sampler_log_prob",
    "ref_log_probs",
    "advantage",
    "weight",
    "value",
    "value_target",
)
"""Entries that are turned to float32 and must be finite on the tokens that count."""


def read_inputs(
    tensordict: TensorDictBase, keys: Any, names: Iterable[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Read the entries that ``keys`` has under ``names``, and ``keys.weight`` where it is present.

    Returns the entries by name, floating ones as ``[N, S]`` float32, and the mask of the tokens that
    count: the sampled ones of valid rows that have a score.
    """
    usual = type(keys)()
    rows = {
        name: read_entry(tensordict, getattr(keys, name), getattr(usual, name)) for name in names
    }
    weight = tensordict.get(keys.weight, None)
    if weight is not None:
        rows["weight"] = weight
    shape = rows["action"].shape
    for name, value in rows.items():
        expected = {"advantage": (*shape, 1), "group": shape[:1]}.get(name, shape)
        check_shape(str(getattr(keys, name)), value, torch.Size(expected))
    rows["advantage"] = rows["advantage"].squeeze(-1)
    rows |= {name: rows[name].float() for name in FLOATING if name in rows}
    mask = scored_tokens(rows["attention_mask"], rows["assistant_mask"])
    mask &= read_valid(tensordict, keys.valid, mask).unsqueeze(-1)
    _check_finite(rows, mask, keys)
    return rows, mask


def _check_finite(rows: dict[str, Tensor], mask: Tensor, keys: Any) -> None:
    """Refuse NaN and infinity on tokens that count, in one look at the device."""
    names = [name for name in FLOATING if name in rows]
    wrong = [mask & ~rows[name].isfinite() for name in names]
    counts = torch.stack(wrong).sum((1, 2)).tolist()
    for name, where, count in zip(names, wrong, counts, strict=True):
        if count:
            row, token = where.nonzero()[0].tolist()
            raise ValueError(
                f"{getattr(keys, name)!r} must be finite on sampled tokens, but {count} are not, the "
                f"first in row {row} at token {token}: {rows[name][row, token].item()}. "
                "Drop these rows, or mend what wrote them."
            )
