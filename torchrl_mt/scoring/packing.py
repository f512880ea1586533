"""Rows cut into forward passes, without their original padding, padded anew or packed.

Every attended token is in exactly one pass, preceded by the attended tokens of its row only. A sampled
token is predicted by the state of the attended token before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_mt.checks import check_mask
from torchrl_mt.devices import on_cpu, sent
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_vision import RowVision


@dataclass(frozen=True)
class ForwardPass:
    """Inputs of one forward pass over ``[B, L]`` tokens, and the sampled tokens that it predicts."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""
    state: Tensor
    """``[K]`` int64 positions in the flattened ``[B * L]`` whose states predict sampled tokens."""
    target: Tensor
    """``[K]`` int64 sampled tokens."""
    place: Tensor
    """``[K]`` int64 positions of these tokens in the flattened rows ``[N * S]``."""


def check_rows(tokens: Tensor, attention_mask: Tensor, mask: Tensor) -> list[Tensor]:
    """Refuse rows whose shapes differ or whose sampled tokens are padding; return them on the CPU."""
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have shape [N, S], got {tuple(tokens.shape)}.")
    check_mask("attention_mask", attention_mask, tokens.shape)
    check_mask("mask", mask, tokens.shape)
    tokens, attention_mask, mask = on_cpu(tokens, attention_mask, mask)
    wrong = mask & ~attention_mask
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            "mask must be false on padding, where attention_mask is false, but row "
            f"{row} has a sampled token there, at {token}."
        )
    return [tokens, attention_mask, mask]


def micro_batches(
    lengths: Tensor, max_rows: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Group rows into batches of similar length.

    A batch has at most ``max_rows`` rows and ``max_tokens`` tokens, padding included; a longer row is a
    batch of its own. Returns the row indices of each batch, longest rows first.

    Examples:
        >>> micro_batches(torch.tensor([2, 9, 3]), max_tokens=8)
        [tensor([1]), tensor([2, 0])]
    """
    count = len(lengths)
    if max_tokens is None:
        order = (
            torch.arange(count, device="cpu")
            if max_rows is None
            else lengths.cpu().argsort(descending=True)
        )
        return list(order.split(max_rows or max(1, count)))
    lengths = lengths.cpu()
    order = lengths.argsort(descending=True)
    batches, start = [], 0
    while start < count:
        longest = max(1, int(lengths[order[start]]))
        size = max(1, max_tokens // longest)
        size = size if max_rows is None else min(size, max_rows)
        batches.append(order[start : start + size])
        start += size
    return batches


def packs(lengths: Tensor, capacity: int, max_rows: int | None = None) -> list[list[int]]:
    """Group rows into few packs, by best-fit decreasing.

    A pack has at most ``capacity`` tokens and ``max_rows`` rows; a longer row is a pack of its own.
    Returns the row indices of each pack, without rows that have no tokens.

    Examples:
        >>> packs(torch.tensor([2, 9, 3, 6, 0]), 9)
        [[1], [3, 2], [0]]
    """
    sizes = lengths.tolist()
    out: list[list[int]] = []
    # Free tokens and index of each pack with room, ascending.
    room: list[tuple[int, int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        if not sizes[row]:
            break
        fit = bisect_left(room, (sizes[row], -1))
        if fit < len(room):
            free, pack = room.pop(fit)
            out[pack].append(row)
        else:
            free, pack = capacity, len(out)
            out.append([row])
        if free > sizes[row] and len(out[pack]) != max_rows:
            insort(room, (free - sizes[row], pack))
    return out


def forward_passes(
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    passes: Passes,
    *,
    with_lengths: bool = False,
    vision: RowVision | None = None,
    number: Callable[[int], int] | None = None,
) -> Iterator[ForwardPass]:
    """Cut rows into forward passes.

    If packed, several rows share a sequence without padding, each with positions from 0. Masked
    attention costs the square of the sequence, so sequences are as long as the longest row, or
    ``micro_batch_tokens`` if that is less, and several make a batch. Attention over variable lengths
    costs no more for many rows, so all rows of a pass are one sequence.

    Args:
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.
        passes: How to cut. With ``with_lengths``, ``micro_batch_size`` counts rows, not sequences.
        with_lengths: Pack for attention over variable lengths, with transformers' arguments for it;
            ignored unless ``passes.packed``.
        vision: What a vision-language model takes beside tokens: each pass gets its rows' images, and
            positions ``[3, B, L]``, or ``[4, B, L]`` with the text's in front when packed. Such models
            find the rows' lengths in these, and lengths would reach the vision tower.
        number: Called before the first pass with the number of passes; returns how many to make, as
            many or more. Further passes have no rows.

    Yields:
        The passes, on the device of ``tokens``. At least one, even without tokens: a rank without
        rows must run the model as the others do.

    Examples:
        >>> attended = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
        >>> tokens = torch.tensor([[5, 6, 7], [8, 9, 0], [4, 0, 0]])
        >>> (step,) = forward_passes(tokens, attended, attended, Passes(packed=True))
        >>> step.inputs["input_ids"].tolist(), step.inputs["position_ids"].tolist()
        ([[5, 6, 7], [8, 9, 4]], [[0, 1, 2], [0, 1, 0]])
        >>> step.state.tolist(), step.target.tolist()
        ([0, 1, 3], [6, 7, 9])
    """
    packed = bool(passes.packed)
    with_lengths = packed and with_lengths
    most_rows, most_tokens = passes.micro_batch_size, passes.max_tokens
    empty = tokens[:0], attention_mask[:0], mask[:0]
    if not tokens.numel():
        # One unattended token: the model runs, and every parameter gets a gradient.
        tokens = tokens.new_zeros(1, 1)
        attention_mask = mask = torch.zeros_like(tokens, dtype=torch.bool)
        vision = None if vision is None else vision.of_no_rows()
    lengths = attention_mask.sum(-1).cpu()
    lines, fill = [[row] for row in range(len(lengths))], lengths
    if packed:
        total = max(1, int(lengths.sum()))
        longest = total if with_lengths else max(1, int(lengths.max()))
        # Packs leave out rows without tokens, which need no state.
        most = most_rows if with_lengths else None
        lines = packs(lengths, min(longest, most_tokens or total), most) or [[0]]
        fill = torch.tensor([sum(lengths[line].tolist()) for line in lines], device="cpu")
    parts = micro_batches(fill, 1 if with_lengths else most_rows, most_tokens)
    more = 0 if number is None else number(len(parts)) - len(parts)
    for part in parts:
        group = [lines[i] for i in part.tolist()]
        step = pass_over(tokens, attention_mask, mask, lengths, group, packed=packed, vision=vision)
        if with_lengths and vision is None:
            step.inputs.update(_lengths(lengths[group[0]], tokens.device))
        yield step
    for _ in range(more):
        yield from forward_passes(*empty, passes, with_lengths=with_lengths, vision=vision)


def put_back(
    values: list[Tensor], places: list[Tensor], tokens: Tensor, device: torch.device | None = None
) -> Tensor:
    """Scatter the passes' values ``[K]`` to rows: ``[N, S]`` float32, zero elsewhere.

    ``places`` has each pass's :attr:`ForwardPass.place`; ``tokens`` are the rows. The result is on
    ``device``, by default theirs.
    """
    out = torch.zeros(tokens.numel(), device=device or tokens.device)
    if values:
        out = out.index_copy(0, sent(torch.cat(places), out.device), torch.cat(values).to(out))
    return out.view(tokens.shape)


def pass_over(
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    lengths: Tensor,
    lines: list[list[int]],
    *,
    packed: bool = False,
    vision: RowVision | None = None,
) -> ForwardPass:
    """Make one pass over lines of rows; each line becomes a sequence of the batch."""
    device, count = tokens.device, len(lines)
    rows = torch.tensor([row for line in lines for row in line], device="cpu")
    line = torch.tensor([i for i, line in enumerate(lines) for _ in line], device="cpu")
    size = lengths[rows]
    fill = torch.zeros(count, dtype=torch.long, device="cpu").index_add(0, line, size)
    # A line of padding gets one dummy token: attention over nothing gives NaN.
    width = max(1, int(fill.max()))
    start = size.cumsum(0) - size
    offset = line * width + start - (fill.cumsum(0) - fill)[line]
    # In the order in which their placeholders stand in the pass.
    pixels = {} if vision is None else vision.pixels(rows)
    rows, offset, fill = rows.to(device), offset.to(device), fill.to(device)

    attended = attention_mask[rows]
    row, column = attended.nonzero(as_tuple=True)
    rank = (attended.cumsum(-1) - 1)[row, column]
    slot = offset[row] + rank
    ids = tokens[rows[row], column]
    scored = mask[rows[row], column] & (rank > 0)
    input_ids = tokens.new_zeros(count * width).index_copy(0, slot, ids).view(count, width)
    inputs: dict[str, Any] = {"input_ids": input_ids}
    along = torch.arange(width, device=device)
    if packed:
        # The line is filled with one-token rows, which affect no row's length.
        position = (along - fill[:, None]).clamp(max=0).reshape(-1).index_copy(0, slot, rank)
        inputs["position_ids"] = position.view(count, width)
    else:
        inputs["attention_mask"] = (along < fill[:, None].clamp(min=1)).long()
    if vision is not None and vision.positions is not None:
        axes = tokens.new_zeros(3, count * width)
        axes = axes.index_copy(1, slot, vision.positions[:, rows[row], rank]).view(3, count, width)
        # With the text's positions in front, or packed rows would see each other.
        text = [inputs["position_ids"][None]] if packed else []
        inputs["position_ids"] = torch.cat([*text, axes])
    inputs |= pixels
    place = rows[row] * tokens.shape[1] + column
    return ForwardPass(inputs, slot[scored] - 1, ids[scored], place[scored])


def _lengths(size: Tensor, device: torch.device) -> dict[str, Any]:
    """Make the length arguments of transformers' flash attention for the rows of one sequence."""
    size = size.clamp(min=1)
    ends = torch.nn.functional.pad(size.cumsum(0), (1, 0)).to(device, torch.int32)
    longest = int(size.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
