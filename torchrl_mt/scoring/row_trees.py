"""Rows that share a prefix, computed once: each forward pass over trees of rows instead of rows.

A token's state depends on its row's tokens up to it alone, so rows have the same states as far as their
tokens agree. A tree is laid out in depth-first order, in which the descendants of a token are a span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_mt.scoring.packing import ForwardPass, forward_passes, micro_batches, pass_over
from torchrl_mt.scoring.passes import Passes

FLEX = "flex_attention"
"""transformers' name of the attention whose masks are blocks."""


@dataclass
class RowTree:
    """Rows of which each continues, or leaves, the path of the one before it."""

    rows: list[int]
    """The rows, in the order of their tokens."""
    shared: list[int]
    """Number of tokens that each has in common with the row before it; 0 for the first."""
    size: int
    """Number of tokens of the tree."""


def row_trees(
    tokens: Tensor, attention_mask: Tensor, width: float, most: int | None = None
) -> list[RowTree]:
    """Collect rows into trees.

    A mask over a whole tree makes attention cost the square of its size, and other layers cost
    ``width`` times its size: a row joins the tree of its neighbour if both together cost less so.

    Args:
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        width: Tokens at which attention costs as much as the other layers; infinity if attention skips
            what is masked.
        most: Maximum tokens of a tree; a longer row is a tree of its own.

    Returns:
        The trees; each row that has tokens is in exactly one.

    Examples:
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 8], [4, 0, 0]])
        >>> for tree in row_trees(tokens, tokens > 0, math.inf):
        ...     print(tree)
        RowTree(rows=[2], shared=[0], size=1)
        RowTree(rows=[0, 1], shared=[0, 2], size=4)
    """
    texts = _texts(tokens, attention_mask)
    # Of one width and with the highest byte first, so that bytes compare as tokens do.
    keys = [text.astype(">i8").tobytes() for text in texts]
    trees: list[RowTree] = []
    before = np.empty(0, np.int64)
    for row in sorted((i for i, key in enumerate(keys) if key), key=keys.__getitem__):
        text = texts[row]
        size = len(text)
        least = min(size, len(before))
        differs = text[:least] != before[:least]
        shared = int(differs.argmax()) if differs.any() else least
        before = text
        if trees and shared:
            tree = trees[-1]
            joint = tree.size + size - shared
            joins = _cost(joint, width) <= _cost(tree.size, width) + _cost(size, width)
            if joins and (most is None or joint <= most):
                tree.rows.append(row)
                tree.shared.append(shared)
                tree.size = joint
                continue
        trees.append(RowTree([row], [0], size))
    return trees


def tree_ratio(tokens: Tensor, attention_mask: Tensor, width: float = math.inf) -> float:
    """Tokens of rows ``[N, S]`` per token of their trees: how much fewer tokens are computed.

    Examples:
        >>> tokens = torch.tensor([[5, 6, 7], [5, 6, 8]])
        >>> tree_ratio(tokens, tokens > 0)
        1.5
    """
    size = sum(tree.size for tree in row_trees(tokens, attention_mask, width))
    return int(attention_mask.sum()) / size if size else 1.0


def tree_batches(trees: list[RowTree], passes: Passes) -> list[list[RowTree]]:
    """Group trees into forward passes, of similar size: as rows, with their tokens and padding."""
    sizes = torch.tensor([tree.size for tree in trees], device="cpu")
    parts = micro_batches(sizes, passes.micro_batch_size, passes.max_tokens)
    return [[trees[i] for i in part.tolist()] for part in parts]


def tree_passes(
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    passes: Passes,
    *,
    width: float,
    attention: str | None,
    number: Callable[[int], int] | None = None,
) -> Iterator[ForwardPass]:
    """Cut rows into forward passes over their trees.

    Positions are depths, and a mask ``[B, 1, L, L]`` lets each token see its ancestors and itself.
    Passes whose trees have one row each are as without trees.

    Args:
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.
        passes: Limits of a pass; ``micro_batch_size`` counts trees.
        width: See :func:`row_trees`.
        attention: transformers' name of the model's attention, which says what masks are.
        number: See :func:`~torchrl_mt.scoring.packing.forward_passes`.

    Yields:
        At least one pass, on the device of ``tokens``.
    """
    trees = row_trees(tokens, attention_mask, width, passes.max_tokens)
    batches = tree_batches(trees, passes) if trees else []
    lengths = attention_mask.sum(-1).cpu()
    ids, attended, sampled = (x.cpu().numpy() for x in (tokens, attention_mask, mask))
    count = max(1, len(batches)) if number is None else number(max(1, len(batches)))
    for batch in batches:
        if all(len(tree.rows) == 1 for tree in batch):
            lines = [tree.rows for tree in batch]
            yield pass_over(tokens, attention_mask, mask, lengths, lines)
        else:
            yield _tree_pass(ids, attended, sampled, batch, attention, tokens.device)
    for _ in range(count - len(batches)):
        yield from forward_passes(tokens[:0], attention_mask[:0], mask[:0], Passes())


def _tree_pass(
    tokens: np.ndarray,
    attention_mask: np.ndarray,
    mask: np.ndarray,
    trees: list[RowTree],
    attention: str | None,
    device: torch.device,
) -> ForwardPass:
    """Lay out trees, one in each sequence of the batch."""
    length = max(tree.size for tree in trees)
    ids = np.zeros((len(trees), length), np.int64)
    depth = np.zeros_like(ids)
    # One past each token's last descendant; padding has none.
    end = np.tile(np.arange(1, length + 1), (len(trees), 1))
    path = np.empty(tokens.shape[1], np.int64)
    states, targets, places = [], [], []
    for line, tree in enumerate(trees):
        new = 0
        for row, shared in zip(tree.rows, tree.shared, strict=True):
            column = attention_mask[row].nonzero()[0]
            text, size = tokens[row, column], len(column)
            added = slice(new, new := new + size - shared)
            path[shared:size] = np.arange(added.start, added.stop)
            ids[line, added] = text[shared:]
            depth[line, added] = np.arange(shared, size)
            end[line, path[:size]] = new
            scored = mask[row, column].nonzero()[0]
            scored = scored[scored > 0]
            states.append(line * length + path[scored - 1])
            targets.append(text[scored])
            places.append(row * tokens.shape[1] + column[scored])

    def sent(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    inputs: dict[str, Any] = {
        "input_ids": sent(ids),
        "position_ids": sent(depth),
        "attention_mask": _ancestors(sent(end), attention),
    }
    return ForwardPass(inputs, sent(*states), sent(*targets), sent(*places))


def _ancestors(end: Tensor, attention: str | None) -> Any:
    """Make the mask of ancestors from the ends of spans ``[B, L]``, in the form that attention takes."""
    count, length = end.shape
    along = torch.arange(length, device=end.device)
    if attention == FLEX:
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[b, k])

        return create_block_mask(sees, count, None, length, length, device=end.device)
    query, key = along[:, None], along
    seen = ((key <= query) & (query < end[:, None, :]))[:, None]
    if attention == "sdpa":
        return seen
    # The smallest number of half precision too: sums with scores stay finite.
    return torch.zeros(seen.shape, device=end.device).masked_fill(
        ~seen, torch.finfo(torch.float16).min
    )


def _texts(tokens: Tensor, attention_mask: Tensor) -> list[np.ndarray]:
    """Each row's attended tokens, on the CPU."""
    lengths = attention_mask.sum(-1).cpu().numpy()
    return np.split(tokens[attention_mask].cpu().numpy(), lengths.cumsum()[:-1])


def _cost(size: int, width: float) -> float:
    """Cost of a tree: in tokens' attention to one token, or in tokens if attention costs nothing."""
    return size if math.isinf(width) else size * (size + width)
