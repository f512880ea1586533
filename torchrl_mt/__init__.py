"""Multi-turn reinforcement learning in TorchRL.

The parts live in subpackages that mirror TorchRL's: ``torchrl_mt.data``, ``.transforms``, ``.envs``,
``.chat``, ``.engines``, ``.collectors``, ``.agents``, ``.datasets``, ``.scoring``, ``.objectives``,
``.vision``, ``.view``, ``.audit``, ``.pretrained`` and ``.trainers``; bridges to other projects in
``.bridges``. Each is imported at its first use.
"""

from __future__ import annotations

import importlib
from functools import cache
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_mt import agents as agents
    from torchrl_mt import audit as audit
    from torchrl_mt import bridges as bridges
    from torchrl_mt import chat as chat
    from torchrl_mt import collectors as collectors
    from torchrl_mt import data as data
    from torchrl_mt import datasets as datasets
    from torchrl_mt import engines as engines
    from torchrl_mt import envs as envs
    from torchrl_mt import objectives as objectives
    from torchrl_mt import pretrained as pretrained
    from torchrl_mt import scoring as scoring
    from torchrl_mt import testing as testing
    from torchrl_mt import trainers as trainers
    from torchrl_mt import transforms as transforms
    from torchrl_mt import view as view
    from torchrl_mt import vision as vision

__version__ = "0.2.0"


@cache
def _subpackages() -> frozenset[str]:
    """Return the names of the public subpackages; of the modules, ``pretrained`` counts as one."""
    packages = {each.name for each in iter_modules(__path__) if each.ispkg}
    return frozenset({"pretrained", *packages} - {"_hosts"})


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage at its first use, so that ``import torchrl_mt`` itself stays quick."""
    if name in _subpackages():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_subpackages()})
