"""Parts that are found by name, so that the packages that use them know nothing of them.

They are entry points of installed packages, this one and others:

- ``torchrl_mt.players``: ``agent``, a function that makes the player of agents;
- ``torchrl_mt.results``: functions that read what workflows of other projects return as turns;
- ``torchrl_mt.formats``: formats of data sets, see :func:`~torchrl_mt.datasets.register_format`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

__all__ = ["load_plugin", "plugin_names"]


@lru_cache
def _plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; reading them all takes milliseconds."""
    return {each.name: each for each in entry_points(group=f"torchrl_mt.{group}")}


def plugin_names(group: str) -> list[str]:
    """Return the names of a group in order."""
    return sorted(_plugins(group))


def load_plugin(group: str, name: str) -> Any:
    """Import what a name stands for.

    Raises:
        ImportError: if there is no such name, or importing it fails.

    Examples:
        >>> plugin_names("results")
        ['areal']
        >>> load_plugin("results", "areal").__module__
        'torchrl_mt.bridges.areal.result'
    """
    found = _plugins(group).get(name)
    if found is None:
        raise ImportError(
            f"torchrl_mt has no {name!r} among its {group}: install it with pip, from its folder or "
            f"anew, as its entry points are missing or those of another release."
        )
    return found.load()
