"""Keys of the entries of training rows, and who writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import combinations

from tensordict import NestedKey, unravel_key

from torchrl_mt.checks import check_choice

EPISODE_SCORE = ("rewards", "episode")
"""Key of each row's episode score, which filters read."""


@dataclass
class ExperienceKeys:
    """Key of each entry of the rows, named as in TorchRL's losses.

    :meth:`~torchrl_mt.objectives.ExperienceMaker.set_keys` changes them.
    """

    action: NestedKey = ("tokens", "full")
    attention_mask: NestedKey = ("masks", "all_attention_mask")
    assistant_mask: NestedKey = ("masks", "all_assistant_mask")
    sampler_log_prob: NestedKey = ("log_probs", "full")
    versions: NestedKey = ("versions", "full")
    turns: NestedKey = ("turns", "full")
    reward: NestedKey = ("rewards", "full")
    turn_return: NestedKey = ("rewards", "to_go")
    episode: NestedKey = "episode"
    episode_index: NestedKey = "episode_index"
    fork: NestedKey = "fork"
    group: NestedKey = "group"
    label: NestedKey = "label"
    valid: NestedKey = "valid"
    truncated: NestedKey = ("next", "truncated")
    sampling_temperature: NestedKey = ("sampling", "temperature")
    sample_log_prob: NestedKey = ("log_probs", "old")
    ref_log_probs: NestedKey = ("log_probs", "ref")
    teacher_log_probs: NestedKey = ("log_probs", "teacher")
    kl: NestedKey = "kl"
    entropy: NestedKey = "entropy"
    value: NestedKey = "values"
    shaped_reward: NestedKey = ("rewards", "shaped")
    value_target: NestedKey = "returns"
    advantage: NestedKey = "advantage"
    weight: NestedKey = ("weights", "full")
    sft_mask: NestedKey = ("masks", "sft")

    def change(self, given: Mapping[str, NestedKey | None]) -> None:
        """Set keys by name, all or none; ``None`` restores the default."""
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


_MERGED = "MergeTurns writes it"
_MADE = "ExperienceMaker writes it"
WRITERS: dict[NestedKey, str] = {
    ExperienceKeys.action: (
        f"{_MERGED} from the turns' ('tokens', 'prompt') and ('tokens', 'response')"
    ),
    ExperienceKeys.attention_mask: _MERGED,
    ExperienceKeys.assistant_mask: _MERGED,
    ExperienceKeys.sampler_log_prob: (
        f"{_MERGED} where the turns have the engine's ('log_probs', 'response')"
    ),
    ExperienceKeys.turns: _MERGED,
    ExperienceKeys.reward: f"{_MERGED} where the turns have ('next', 'reward')",
    ExperienceKeys.episode: _MERGED,
    ExperienceKeys.group: f"{_MERGED} from the turns' 'group', which the collector writes",
    ExperienceKeys.truncated: "MergeTurns(carry=(('next', 'truncated'),)) writes it",
    ExperienceKeys.sample_log_prob: _MADE,
    ExperienceKeys.ref_log_probs: f"{_MADE} when it has a ref",
    ExperienceKeys.entropy: f"{_MADE} with passes=Passes(with_entropy=True)",
    ExperienceKeys.value: f"{_MADE} when it has a critic",
    ExperienceKeys.value_target: _MADE,
    ExperienceKeys.advantage: _MADE,
}
"""Who writes each entry, for errors about missing ones."""


def as_path(key: NestedKey) -> tuple[str, ...]:
    """Convert a key to a tuple of names."""
    return (key,) if isinstance(key, str) else key


def check_distinct(keys: Mapping[str, NestedKey]) -> None:
    """Refuse named keys if one equals or contains another.

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
