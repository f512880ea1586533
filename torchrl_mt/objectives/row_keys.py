"""Where the entries of training rows lie, and who writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import combinations

from tensordict import NestedKey, unravel_key

from torchrl_mt.checks import check_choice

TOKENS = ("tokens", "full")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
SAMPLER_LOG_PROBS = ("log_probs", "full")
VERSIONS = ("versions", "full")
OLD_LOG_PROBS = ("log_probs", "old")
REF_LOG_PROBS = ("log_probs", "ref")
TURNS = ("turns", "full")
REWARDS = ("rewards", "full")
TURN_RETURNS = ("rewards", "to_go")
SHAPED_REWARDS = ("rewards", "shaped")
EPISODE_SCORE = ("rewards", "episode")
EPISODE = "episode"
EPISODE_INDEX = "episode_index"
FORK = "fork"
GROUP = "group"
LABEL = "label"
VALID = "valid"
KL = "kl"
ENTROPY = "entropy"
VALUES = "values"
RETURNS = "returns"
ADVANTAGE = "advantage"
WEIGHTS = ("weights", "full")
SAMPLING_TEMPERATURE = ("sampling", "temperature")

_MERGED = "MergeTurns writes it"
_MADE = "ExperienceMaker writes it"
WRITERS: dict[NestedKey, str] = {
    TOKENS: f"{_MERGED} from the turns' ('tokens', 'prompt') and ('tokens', 'response')",
    ATTENTION_MASK: _MERGED,
    ASSISTANT_MASK: _MERGED,
    SAMPLER_LOG_PROBS: f"{_MERGED} where the turns have the engine's ('log_probs', 'response')",
    TURNS: _MERGED,
    REWARDS: f"{_MERGED} where the turns have ('next', 'reward')",
    EPISODE: _MERGED,
    GROUP: f"{_MERGED} from the turns' 'group', which the collector writes",
    OLD_LOG_PROBS: _MADE,
    REF_LOG_PROBS: f"{_MADE} when it has a ref",
    ENTROPY: f"{_MADE} when it has with_entropy=True",
    VALUES: f"{_MADE} when it has a critic",
    RETURNS: _MADE,
    ADVANTAGE: _MADE,
}
"""Who should have written an entry that is missing."""


@dataclass
class ExperienceKeys:
    """Where the entries of rows lie, by the names that TorchRL's losses have for them.

    :meth:`~torchrl_mt.objectives.ExperienceMaker.set_keys` changes them.
    """

    action: NestedKey = TOKENS
    attention_mask: NestedKey = ATTENTION_MASK
    assistant_mask: NestedKey = ASSISTANT_MASK
    sampler_log_prob: NestedKey = SAMPLER_LOG_PROBS
    versions: NestedKey = VERSIONS
    turns: NestedKey = TURNS
    reward: NestedKey = REWARDS
    turn_return: NestedKey = TURN_RETURNS
    episode: NestedKey = EPISODE
    episode_index: NestedKey = EPISODE_INDEX
    fork: NestedKey = FORK
    group: NestedKey = GROUP
    label: NestedKey = LABEL
    valid: NestedKey = VALID
    sampling_temperature: NestedKey = SAMPLING_TEMPERATURE
    sample_log_prob: NestedKey = OLD_LOG_PROBS
    ref_log_probs: NestedKey = REF_LOG_PROBS
    kl: NestedKey = KL
    entropy: NestedKey = ENTROPY
    value: NestedKey = VALUES
    shaped_reward: NestedKey = SHAPED_REWARDS
    value_target: NestedKey = RETURNS
    advantage: NestedKey = ADVANTAGE
    weight: NestedKey = WEIGHTS

    def change(self, given: Mapping[str, NestedKey | None]) -> None:
        """Set keys by name, all of them or, where one cannot be, none; ``None`` sets the default."""
        names = [field.name for field in fields(self)]
        keys: dict[str, NestedKey] = {name: getattr(self, name) for name in names}
        for name, key in given.items():
            check_choice("set_keys", name, names)
            if not (key is None or isinstance(key, (str, tuple))):
                raise TypeError(f"{name} must be a key (a str or a tuple of str), got {key!r}.")
            keys[name] = getattr(ExperienceKeys, name) if key is None else unravel_key(key)
        check_distinct(keys)
        for name, key in keys.items():
            setattr(self, name, key)


def as_path(key: NestedKey) -> tuple[str, ...]:
    """A key as the names on the way to its entry."""
    return (key,) if isinstance(key, str) else key


def check_distinct(keys: Mapping[str, NestedKey]) -> None:
    """Refuse keys, by name, of which two are the same or one lies below the other.

    Examples:
        >>> check_distinct({"kl": "kl", "weight": ("kl", "full")})
        Traceback (most recent call last):
        ValueError: kl and weight must have keys of which none lies in the other, got ...
    """
    for (one, a), (other, b) in combinations(keys.items(), 2):
        if all(x == y for x, y in zip(as_path(a), as_path(b), strict=False)):
            raise ValueError(
                f"{one} and {other} must have keys of which none lies in the other, got {a!r} and "
                f"{b!r}."
            )
