"""Tokens by what the sampler saw before them.

A token's key is a number that tells its row's tokens up to it. Rows that begin alike share keys as far
as they do.
"""

from __future__ import annotations

import numpy as np

from torchrl_mt.audit.rows import Rows

__all__ = ["ends_of", "keys_of", "mix", "nth", "spread"]


def mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Hash pairs of integers to uint64: splitmix64's rounds."""
    out = one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    out += other.astype(np.int64).view(np.uint64) * np.uint64(0xD1342543DE82EF95)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        out = (out ^ (out >> np.uint64(shift))) * np.uint64(factor)
    return out ^ (out >> np.uint64(31))


def keys_of(rows: Rows, *by: str, turns: bool = False) -> np.ndarray:
    """Give each token its key, ``[M]`` uint64.

    Args:
        rows: the rows.
        *by: entries of rows, such as ``"episode"``, that tell apart what else is alike.
        turns: whether the turns of tokens do too.
    """
    own = mix(rows.id, rows.token)
    if turns and rows.turn is not None:
        own = mix(own, rows.turn)
    total, begins = own.cumsum(), rows.token == 0  # Sums of uint64 wrap.
    keys = total - (total - own)[begins][begins.cumsum() - 1]
    for name in by:
        keys = mix(keys, rows.of_tokens(name))
    return keys


def nth(keys: np.ndarray, *order: np.ndarray) -> np.ndarray:
    """Number equal keys from 0 on, in the order of the columns, the first of which counts most."""
    at = np.lexsort((*reversed(order), keys))
    count = np.arange(len(keys))
    begins = np.append(True, keys[at][1:] != keys[at][:-1])[: len(keys)]
    out = np.empty_like(count)
    out[at] = count - np.maximum.accumulate(np.where(begins, count, 0))
    return out


def ends_of(rows: Rows) -> np.ndarray:
    """Whether a token is the last of its row, ``[M]`` bool."""
    return np.append(rows.token[1:] == 0, True)[: len(rows.token)]


def spread(rows: Rows, at: np.ndarray) -> np.ndarray:
    """Flags ``[M]`` that are true at some places."""
    out = np.zeros(len(rows.token), bool)
    out[at] = True
    return out
