"""Rows divided among ranks, and a rank's rows cut into micro-batches.

Every row is in exactly one part, with its images. Equal rows give equal parts in every process.
"""

from __future__ import annotations

import math
from heapq import heapify, heapreplace
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, distributed

from torchrl_mt.checks import check_choice, check_mask, check_positive_integer
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import check_like, read_entry, read_episode
from torchrl_mt.ranks import call_on_all, check_process_group
from torchrl_mt.scoring.packing import micro_batches as batches_of
from torchrl_mt.scoring.packing import packs
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_trees import row_trees, tree_batches

Kept = Literal["group", "episode"]
"""Which rows stay together: those of a group, or those of an episode (its forks)."""


def split_rows(
    rows: TensorDictBase, num_parts: int, *, keep: Kept | None = None
) -> list[TensorDictBase]:
    """Divide rows into parts of about as many tokens, one for each rank.

    The largest rows come first, and each goes into the part that has fewest tokens yet. So no part has
    more than the mean and the largest row (group, episode) together. (Graham, 1969, "Bounds on
    multiprocessing timing anomalies": at most 4/3 of what is possible.)

    Args:
        rows: Rows ``[N]`` with ``("masks", "all_attention_mask")``, whose true tokens count.
        num_parts: Number of parts. With fewer rows, some are empty.
        keep: ``"group"`` or ``"episode"`` keeps their rows together. An
            :class:`~torchrl_mt.objectives.ExperienceMaker` needs whole episodes on each rank, and whole
            groups unless it has the ``process_group``.

    Returns:
        ``num_parts`` TensorDicts. Each has its rows in the order that they had.

    Raises:
        KeyError: If the rows lack an entry.
        ValueError: If ``num_parts`` is below 1 or ``keep`` is unknown.

    Examples:
        >>> from tensordict import TensorDict
        >>> attended = torch.arange(5) < torch.tensor([[5], [3], [1], [2]])
        >>> rows = TensorDict({"masks": {"all_attention_mask": attended}}, [4])
        >>> [part["masks", "all_attention_mask"].sum().item() for part in split_rows(rows, 2)]
        [6, 5]
    """
    check_positive_integer("num_parts", num_parts)
    sizes, item = _lengths(rows), torch.arange(len(rows), device="cpu")
    if keep is not None:
        check_choice("keep", keep, get_args(Kept))
        item = _items(rows, keep)
        sizes = sizes.new_zeros(int(item.max()) + 1 if len(item) else 0).index_add(0, item, sizes)
    part_of_item = torch.tensor(
        _lightest_first(sizes.tolist(), num_parts), dtype=torch.long, device="cpu"
    )
    part = part_of_item[item]
    return [_take(rows, (part == i).nonzero().squeeze(-1)) for i in range(num_parts)]


def micro_batches(
    rows: TensorDictBase,
    passes: Passes | None = None,
    *,
    process_group: distributed.ProcessGroup | None = None,
) -> list[TensorDictBase]:
    """Cut rows into the micro-batches of :class:`~torchrl_mt.objectives.MultiTurnLoss`.

    Rows of similar length come together, as in the forward passes of an
    :class:`~torchrl_mt.objectives.ExperienceMaker`. The loss of each micro-batch, with the total of all
    rows, adds up to the loss of all.

    Args:
        rows: Rows ``[N]`` with ``("masks", "all_attention_mask")``.
        passes: Limits of a micro-batch: ``micro_batch_size`` rows and ``micro_batch_tokens`` tokens,
            padding included unless ``packed``. A longer row is a micro-batch of its own.
        process_group: All ranks get as many micro-batches as the one with most; further ones are empty.
            Give it if gradients or parameters are exchanged in each pass (FSDP, DDP): the loss runs the
            model on an empty one too.

    Returns:
        One or more TensorDicts.

    Raises:
        KeyError: If the rows lack the mask.
        TypeError: If ``process_group`` is none.
        RuntimeError: If another rank of ``process_group`` fails.

    Examples:
        >>> from tensordict import TensorDict
        >>> attended = torch.arange(5) < torch.tensor([[5], [3], [1], [2]])
        >>> rows = TensorDict({"masks": {"all_attention_mask": attended}}, [4])
        >>> [len(part) for part in micro_batches(rows, Passes(micro_batch_tokens=6))]
        [1, 2, 1]
        >>> passes = Passes(micro_batch_tokens=6, packed=True)
        >>> [len(part) for part in micro_batches(rows, passes)]
        [2, 2]
    """
    passes = Passes.checked(passes)
    check_process_group(process_group)
    if process_group is None:
        return [_take(rows, part) for part in _cut(rows, passes)]
    parts: list[Tensor] = []

    def extend() -> int:
        parts.extend(_cut(rows, passes))
        return len(parts)

    number = max(call_on_all(extend, process_group))
    parts += [torch.arange(0, device="cpu")] * (number - len(parts))
    return [_take(rows, part) for part in parts]


def _cut(rows: TensorDictBase, passes: Passes) -> list[Tensor]:
    """Choose the rows of each micro-batch: one or more ``[n]`` int64."""
    lengths = _lengths(rows)
    if passes.packed != "tree":
        return cut(lengths, passes)
    tokens = read_entry(rows, ExperienceKeys.action, ExperienceKeys.action)
    key = ExperienceKeys.attention_mask
    return cut_trees(tokens, read_entry(rows, key, key), passes, math.inf)


def cut_trees(tokens: Tensor, attention_mask: Tensor, passes: Passes, width: float) -> list[Tensor]:
    """Choose the rows of each micro-batch, by the tokens of the rows' trees.

    See :func:`~torchrl_mt.scoring.row_trees.row_trees`.
    """
    trees = row_trees(tokens, attention_mask, width, passes.max_tokens)
    parts = [[row for tree in batch for row in tree.rows] for batch in tree_batches(trees, passes)]
    rest = (~attention_mask.any(-1)).nonzero().squeeze(-1).tolist()
    parts = [*parts[:-1], parts[-1] + rest] if parts else [rest]
    return [torch.tensor(sorted(part), dtype=torch.long, device="cpu") for part in parts]


def cut(lengths: Tensor, passes: Passes) -> list[Tensor]:
    """Choose the rows of each micro-batch, by the rows' lengths ``[N]``: one or more ``[n]`` int64."""
    if passes.packed:
        capacity = passes.max_tokens or max(1, int(lengths.sum()))
        chosen = packs(lengths, capacity, passes.micro_batch_size)
        # Packs leave rows without tokens out.
        rest = (lengths == 0).nonzero().squeeze(-1)
        parts = [torch.tensor(pack, device="cpu") for pack in chosen]
        parts += rest.split(passes.micro_batch_size or max(1, len(rest))) if len(rest) else []
    else:
        parts = batches_of(lengths, passes.micro_batch_size, passes.max_tokens)
    return [part.sort().values for part in parts] or [torch.arange(0, device="cpu")]


def _lengths(rows: TensorDictBase) -> Tensor:
    """Count the tokens of each row: ``[N]`` int64 on the CPU."""
    key = ExperienceKeys.attention_mask
    attended = read_entry(rows, key, key)
    if attended.ndim != 2 or attended.shape[:1] != rows.batch_size:
        raise ValueError(
            f"rows must have batch size [N] and {key!r} shape [N, S], got {list(rows.batch_size)} and "
            f"{tuple(attended.shape)}."
        )
    check_mask(f"the entry {key!r} of rows", attended, attended.shape)
    return attended.sum(-1).cpu()


def _items(rows: TensorDictBase, keep: Kept) -> Tensor:
    """Number each row's group or episode in order of appearance of ids: ``[N]`` on the CPU."""
    if keep == "episode":
        name = read_episode(rows)
    else:
        name = read_entry(rows, ExperienceKeys.group, ExperienceKeys.group)
        check_like(ExperienceKeys.group, name, "batch_size", rows.batch_size)
    return name.cpu().unique(return_inverse=True)[1]


def _lightest_first(sizes: list[int], num_parts: int) -> list[int]:
    """Choose a part for each item, the largest first, of those with fewest tokens the first."""
    out = [0] * len(sizes)
    load = [(0, part) for part in range(num_parts)]
    heapify(load)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        tokens, part = load[0]
        out[i] = part
        heapreplace(load, (tokens + sizes[i], part))
    return out


def _take(rows: TensorDictBase, index: Tensor) -> TensorDictBase:
    """Select rows; images and other shared entries follow."""
    if not len(index):
        # An index without elements fails for columns of Python objects, and so does any of none.
        return rows[:0] if len(rows) else rows.copy()
    return rows[index.to(rows.device)] if rows.device is not None else rows[index]
