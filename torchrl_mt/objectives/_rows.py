"""Where the entries of training rows lie, and the one way to read them."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

TOKENS = ("tokens", "full")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
SAMPLER_LOG_PROBS = ("log_probs", "full")
OLD_LOG_PROBS = ("log_probs", "old")
REF_LOG_PROBS = ("log_probs", "ref")
TURNS = ("turns", "full")
REWARDS = ("rewards", "full")
TURN_RETURNS = ("returns", "full")
EPISODE = "episode"
GROUP = "group"


def read_entry(rows: TensorDictBase, key: NestedKey, hint: str = "") -> Tensor:
    """Read an entry, or say which one is missing and who makes it."""
    value = rows.get(key, None)
    if value is None:
        found = sorted(map(str, rows.keys(include_nested=True, leaves_only=True)))
        raise KeyError(f"rows lack the entry {key!r}{hint}; found {', '.join(found)}.")
    return value
