"""Where the entries of training rows lie, and the one way to read them."""

from __future__ import annotations

import torch
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
TURN_RETURNS = ("rewards", "to_go")
EPISODE = "episode"
EPISODE_INDEX = "episode_index"
FORK = "fork"
GROUP = "group"


def read_entry(rows: TensorDictBase, key: NestedKey, hint: str = "") -> Tensor:
    """Read an entry, or say which one is missing and who makes it."""
    value = rows.get(key, None)
    if value is None:
        found = sorted(map(str, rows.keys(include_nested=True, leaves_only=True)))
        raise KeyError(f"rows lack the entry {key!r}{hint}; found {', '.join(found)}.")
    return value


def read_episode(rows: TensorDictBase) -> Tensor:
    """Read which rows are one episode; copies of an episode in one batch are episodes of their own.

    Refuses a row that is there twice: its rewards would count twice in one episode.
    """
    episode = read_entry(rows, EPISODE)
    copy, fork = rows.get(EPISODE_INDEX, None), rows.get(FORK, None)
    if copy is not None:
        name = torch.unique(torch.stack([episode, copy]), dim=1, return_inverse=True)[1]
    else:
        name = episode
    if fork is not None:
        _, place, count = torch.unique(
            torch.stack([name, fork]), dim=1, return_inverse=True, return_counts=True
        )
        twice = (count[place] > 1).nonzero()
        if len(twice):
            n = int(twice[0])
            raise ValueError(
                f"rows have fork {int(fork[n])} of episode {int(episode[n])} (row {n}) more than once: "
                "give MergeTurns all episodes in one call, which tells copies of an episode apart, "
                f"or make {EPISODE_INDEX!r} differ between the copies."
            )
    return name
