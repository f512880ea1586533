"""Detects misspelt keys of episode data.

Data may have keys that the environment does not read (labels, ids). Without this check, a misspelt key
would be ignored and the task drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = ["refuse_misspelt_keys"]

_SIMILARITY = 0.7
"""Cutoff of ``difflib``: one letter missing, doubled or changed, or two swapped, in such words."""


def refuse_misspelt_keys(data: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Refuse a key that is close to an accepted key which the data lacks.

    Args:
        data: an episode's data.
        accepted: keys that the environment reads.

    Raises:
        ValueError: names such a key and the accepted ones.

    Examples:
        >>> refuse_misspelt_keys({"number": 7, "numbers": 16, "label": 3}, ["number", "seed"])
        >>> refuse_misspelt_keys({"nubmer": 7}, ["number", "seed"])
        Traceback (most recent call last):
            ...
        ValueError: data has 'nubmer', nearly 'number': the keys that are read are 'number', 'seed'.
    """
    missing = [name for name in accepted if name not in data]
    for key in data:
        if isinstance(key, str) and key not in accepted:
            for meant in get_close_matches(key.lower(), missing, n=1, cutoff=_SIMILARITY):
                raise ValueError(
                    f"data has {key!r}, nearly {meant!r}: the keys that are read are "
                    f"{', '.join(map(repr, accepted))}."
                )
