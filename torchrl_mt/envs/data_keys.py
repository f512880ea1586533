"""Keys of episode data that nobody reads, but that look like one that somebody would.

Data may hold more than an environment needs (labels, ids), so that a slip of the pen would pass for such
and the episode be drawn at random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

__all__ = ["check_keys"]

_ALIKE = 0.7
"""Of ``difflib``: one letter lost, doubled or changed, or two exchanged, in words as long as these."""


def check_keys(data: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Refuse a key that is nearly one that is read and that the data lacks.

    Args:
        data: an episode's data.
        accepted: the keys that the environment reads.

    Raises:
        ValueError: if there is such a key; names it and those that are read.

    Examples:
        >>> check_keys({"number": 7, "numbers": 16, "label": 3}, ["number", "seed"])
        >>> check_keys({"nubmer": 7}, ["number", "seed"])
        Traceback (most recent call last):
            ...
        ValueError: data has 'nubmer', nearly 'number': the keys that are read are 'number', 'seed'.
    """
    lacking = [name for name in accepted if name not in data]
    for key in data:
        if key in accepted or not isinstance(key, str):
            continue
        meant = get_close_matches(key.lower(), lacking, n=1, cutoff=_ALIKE)
        if meant:
            raise ValueError(
                f"data has {key!r}, nearly {meant[0]!r}: the keys that are read are "
                f"{', '.join(map(repr, accepted))}."
            )
