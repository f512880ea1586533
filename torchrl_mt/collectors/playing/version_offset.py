"""An engine whose weight versions go on from those of an earlier run.

Versions count the updates of a training run, not of a process: none is given to two sets of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchrl_mt.engines import Completion, Engine

__all__ = ["VersionOffset"]


class VersionOffset:
    """Another engine, with higher versions.

    Args:
        engine: who answers.
        offset: how many updates there were before the engine was made.
    """

    def __init__(self, engine: Engine, offset: int) -> None:
        self._engine = engine
        self._offset = offset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":  # asked for while it is copied
            raise AttributeError(name)
        return getattr(self._engine, name)

    @property
    def version(self) -> int:
        """How many times the weights were updated, in all."""
        return self._offset + self._engine.version

    def update_weights(self, source: Any) -> int:
        """Hand on new weights; returns the new version."""
        return self._offset + self._engine.update_weights(source)

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Completion:
        """What the engine answers."""
        answer = await self._engine.generate(prompt_ids, **arguments)
        return replace(answer, versions=[self._offset + version for version in answer.versions])
