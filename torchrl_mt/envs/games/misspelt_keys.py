"""Refuses misspelt keys of episode data.

Data may hold more than an environment reads (labels, ids). So a misspelt key would be passed over in
silence, and the episode drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = ["refuse_misspelt_keys"]

_ALIKE = 0.7
"""Of ``difflib``: one letter lost, doubled or changed, or two exchanged, in words as long as these."""


def refuse_misspelt_keys(data: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Refuse a key that is nearly one that the environment reads and the data lacks.

    Args:
        data: an episode's data.
        accepted: the keys that the environment reads.

    Raises:
        ValueError: if there is such a key; names it and those that are read.

    Examples:
        >>> refuse_misspelt_keys({"number": 7, "numbers": 16, "label": 3}, ["number", "seed"])
        >>> refuse_misspelt_keys({"nubmer": 7}, ["number", "seed"])
        Traceback (most recent call last):
            ...
        ValueError: data has 'nubmer', nearly 'number': the keys that are read are 'number', 'seed'.
    """
    lacking = [name for name in accepted if name not in data]
    for key in data:
        if isinstance(key, str) and key not in accepted:
            for meant in get_close_matches(key.lower(), lacking, n=1, cutoff=_ALIKE):
                raise ValueError(
                    f"data has {key!r}, nearly {meant!r}: the keys that are read are "
                    f"{', '.join(map(repr, accepted))}."
                )
