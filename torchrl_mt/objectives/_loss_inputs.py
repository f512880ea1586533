"""The entries of rows that the loss reads: there, of one shape, and finite on the tokens that count.

Everything is checked before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.objectives._rows import check_like, read_entry, read_valid
from torchrl_mt.objectives.functional._checks import check_mask
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
    shape, first = rows["action"].shape, keys.action
    for name, value in rows.items():
        expected = {"advantage": (*shape, 1), "group": shape[:1]}.get(name, shape)
        check_like(getattr(keys, name), value, first, torch.Size(expected))
    rows["advantage"] = rows["advantage"].squeeze(-1)
    rows |= {name: rows[name].float() for name in FLOATING if name in rows}
    mask = counted_tokens(tensordict, keys, rows["attention_mask"], rows["assistant_mask"])
    _check_values(rows, mask, keys)
    return rows, mask


def counted_tokens(
    tensordict: TensorDictBase, keys: Any, attention_mask: Tensor, assistant_mask: Tensor
) -> Tensor:
    """Find the sampled tokens of valid rows that have a score, ``[N, S]`` bool."""
    check_like(keys.assistant_mask, assistant_mask, keys.attention_mask, attention_mask.shape)
    for key, mask in ((keys.attention_mask, attention_mask), (keys.assistant_mask, assistant_mask)):
        check_mask(f"the entry {key!r} of rows", mask, mask.shape)
    mask = scored_tokens(attention_mask, assistant_mask)
    valid = tensordict.get(keys.valid, None)
    if valid is not None:
        check_like(keys.valid, valid, keys.attention_mask, mask.shape[:1])
        mask &= read_valid(tensordict, keys.valid, mask).unsqueeze(-1)
    return mask


def _check_values(rows: dict[str, Tensor], mask: Tensor, keys: Any) -> None:
    """Refuse NaN, infinity and padding on tokens that count, in one look at the device."""
    names = [name for name in FLOATING if name in rows]
    wrong = [mask & ~rows[name].isfinite() for name in names]
    wrong.append(mask & ~rows["attention_mask"])
    counts = torch.stack(wrong).sum((1, 2)).tolist()
    for name, where, count in zip([*names, "assistant_mask"], wrong, counts, strict=True):
        if not count:
            continue
        row, token = where.nonzero()[0].tolist()
        key = getattr(keys, name)
        if name == "assistant_mask":
            raise ValueError(
                f"{key!r} must be false on padding, where {keys.attention_mask!r} is false, but "
                f"{count} sampled tokens lie there, the first in row {row} at token {token}."
            )
        raise ValueError(
            f"{key!r} must be finite on sampled tokens, but {count} are not, the "
            f"first in row {row} at token {token}: {rows[name][row, token].item()}. "
            "Drop these rows, or mend what wrote them."
        )
