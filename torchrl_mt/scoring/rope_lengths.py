"""Rotary embeddings whose frequencies depend on a pass's longest row: dynamic NTK and LongRoPE.

A pass that would compute a row differently from the row alone is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_mt._hosts.transformers import RotaryFrequencies, rotary_frequencies


@contextmanager
def lengths_apart(model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Reset the frequencies for a pass, and restore them afterwards.

    Models without such embeddings are unaffected. ``inputs`` are the keyword arguments of the pass:
    ``input_ids`` and ``position_ids`` or ``attention_mask``. Rows that would get other frequencies
    together than alone are refused.
    """
    ropes = rotary_frequencies(model)
    for rope in ropes:
        _check_lengths(model, rope, _row_lengths(inputs))
    with ExitStack() as stack:
        for rope in ropes:
            stack.callback(rope.reset())
        yield


def _row_lengths(inputs: dict[str, Any]) -> Tensor:
    position, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if position is not None and mask is None:
        # Of several rows of positions the first is the text's.
        position = position[0] if position.ndim == 3 else position
        ends = torch.nn.functional.pad(position[:, 1:] == 0, (0, 1), value=True)
        return position[ends] + 1
    if mask is not None and mask.ndim == 2:
        return mask.sum(-1)
    if position is not None:
        return position.flatten() + 1  # A row may end at any token of a tree.
    return torch.tensor([inputs["input_ids"].shape[1]], device="cpu")


def _check_lengths(model: nn.Module, rope: RotaryFrequencies, lengths: Tensor) -> None:
    """Refuse rows that need different frequencies."""
    # A single token is not rotated against another.
    lengths = lengths[lengths > 1]
    kind = torch.where(lengths > rope.original, lengths if rope.dynamic else rope.original + 1, 0)
    if len(kind.unique()) > 1:
        most = f"{rope.original} tokens"
        apart = (
            f"different lengths, one above {most},"
            if rope.dynamic
            else f"up to {most} and longer ones"
        )
        raise ValueError(
            f"{type(model).__name__} gives all rows of a pass the rotary frequencies of the longest, "
            f"here of {int(lengths.max())} tokens with one of {int(lengths.min())} beside it; rows of "
            f"{apart} need passes of their own: pass packed=False and micro_batch_size=1, and give a "
            "loss one row at a time, with the total of all."
        )
