"""Rotary embeddings whose frequencies depend on the longest row of a pass: dynamic NTK and LongRoPE.

A pass gives each row what the model gives the row alone, whatever was computed before it, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Rope:
    """One set of frequencies of a rotary embedding of transformers."""

    module: nn.Module
    """Whose buffer they are."""
    prefix: str
    """Of its attributes' names; not empty where layers of several types have their own."""
    dynamic: bool
    """Whether they change with each length, rather than once."""
    original: int
    """Most tokens of a row that has the model's own frequencies."""


@contextmanager
def lengths_apart(model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Compute a pass as if it were the model's first, and leave the frequencies as they were.

    Args:
        model: The model; one without such embeddings is left alone.
        inputs: Keyword arguments of the pass: ``input_ids`` and ``position_ids`` or ``attention_mask``.

    Raises:
        ValueError: If rows of the pass have other frequencies than they would have alone.
    """
    ropes = _ropes(model)
    for rope in ropes:
        _check_lengths(model, rope, _row_lengths(inputs))
    before = [_state(rope) for rope in ropes]
    try:
        for rope in ropes:
            _reset(rope)
        yield
    finally:
        for rope, state in zip(ropes, before, strict=True):
            _restore(rope, state)


def _ropes(model: nn.Module) -> list[_Rope]:
    """All frequencies of a model that depend on lengths."""
    out = []
    for module in model.modules():
        kinds = module.__dict__.get("rope_type")
        if kinds is None:
            continue
        if isinstance(kinds, str):
            kinds = {"": kinds}
        if not isinstance(kinds, dict):
            continue
        for layer, kind in kinds.items():
            prefix = f"{layer}_" if layer else ""
            if not hasattr(module, f"{prefix}original_inv_freq"):
                continue
            if "dynamic" in kind:
                out.append(_Rope(module, prefix, True, int(vars(module)["original_max_seq_len"])))
            elif kind == "longrope":
                out.append(_Rope(module, prefix, False, _short_frequencies(module.config, layer)))
    return out


def _short_frequencies(config: Any, layer: str) -> int:
    """Most tokens of a row that has LongRoPE's short frequencies."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # transformers 4
        own = getattr(config, "original_max_position_embeddings", None)
        return int(config.max_position_embeddings if own is None else own)
    return int((parameters[layer] if layer else parameters)["original_max_position_embeddings"])


def _row_lengths(inputs: dict[str, Any]) -> Tensor:
    """Tokens of each row of a pass, padded or packed."""
    position, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if position is not None:
        ends = torch.nn.functional.pad(position[:, 1:] == 0, (0, 1), value=True)
        return position[ends] + 1
    if mask is not None and mask.ndim == 2:
        return mask.sum(-1)
    return torch.tensor([inputs["input_ids"].shape[1]])


def _check_lengths(model: nn.Module, rope: _Rope, lengths: Tensor) -> None:
    """Refuse rows that have not the same frequencies."""
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


def _names(rope: _Rope) -> tuple[str, str]:
    """Names of the frequencies and of the length that they are for."""
    return f"{rope.prefix}inv_freq", f"{rope.prefix}max_seq_len_cached"


def _state(rope: _Rope) -> tuple[Tensor, Tensor, Any]:
    """The frequencies, their values, and the length that they are for."""
    name, cached = _names(rope)
    frequencies = getattr(rope.module, name)
    return frequencies, frequencies.clone(), rope.module.__dict__.get(cached)


def _reset(rope: _Rope) -> None:
    """Forget the rows of earlier passes."""
    name, cached = _names(rope)
    if rope.dynamic:
        original = getattr(rope.module, f"{rope.prefix}original_inv_freq")
        setattr(rope.module, name, original.to(getattr(rope.module, name).device))
        setattr(rope.module, cached, rope.original)


def _restore(rope: _Rope, state: tuple[Tensor, Tensor, Any]) -> None:
    """Put frequencies back."""
    name, cached = _names(rope)
    frequencies, values, length = state
    # LongRoPE writes into the buffer, dynamic NTK puts another in its place.
    if not rope.dynamic:
        with torch.inference_mode(frequencies.is_inference()):
            frequencies.copy_(values)
    setattr(rope.module, name, frequencies)
    if length is None:
        rope.module.__dict__.pop(cached, None)
    else:
        setattr(rope.module, cached, length)
