"""Parts that are found by name, so that the packages that use them need not import them.

- ``players``: ``agent`` plays agents;
- ``results``: read what workflows of other projects return as turns;
- ``formats``: formats of data sets, see :func:`~torchrl_mt.datasets.register_format`.

Other packages add theirs as entry points of the groups ``torchrl_mt.players`` and so on.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

__all__ = ["load_plugin", "plugin_names"]

_OWN = {
    "players": {"agent": "torchrl_mt.agents.agent:AgentPlayer"},
    "results": {"areal": "torchrl_mt.bridges.areal:read_result"},
    "formats": {
        name: f"torchrl_mt.bridges.{name}:FORMAT"
        for name in ("lance", "lerobot", "minari", "video")
    },
}
"""Those of this package: known also where it is not installed but only lies on the path."""


@lru_cache
def _places(group: str) -> dict[str, str]:
    """Return where the parts of a group are, by name; reading all entry points takes milliseconds."""
    added = {each.name: each.value for each in entry_points(group=f"torchrl_mt.{group}")}
    return added | _OWN[group]


def plugin_names(group: str) -> list[str]:
    """Return the names of a group, in order."""
    return sorted(_places(group))


def load_plugin(group: str, name: str) -> Any:
    """Import what a name stands for.

    Examples:
        >>> plugin_names("results")
        ['areal']
        >>> load_plugin("results", "areal").__module__
        'torchrl_mt.bridges.areal.result'
    """
    return resolve_name(_places(group)[name])
