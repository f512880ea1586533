"""An engine whose weight versions continue those of an earlier process.

Versions count the updates of a training run, so two sets of weights never share a version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchrl_mt.engines import Completion, Engine

__all__ = ["VersionOffset", "count_update"]


class VersionOffset:
    """An engine whose versions start at ``offset``, the number of updates before it was made."""

    def __init__(self, engine: Engine, offset: int) -> None:
        self._engine = engine
        self._offset = offset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":  # Looked up while this is copied.
            raise AttributeError(name)
        return getattr(self._engine, name)

    @property
    def version(self) -> int:
        """Number of weight updates in all."""
        return self._offset + self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._offset = version - self._engine.version

    def update_weights(self, source: Any) -> int:
        """Update the engine's weights; return the new version."""
        return self._offset + self._engine.update_weights(source)

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Completion:
        """Sample a completion from the engine."""
        answer = await self._engine.generate(prompt_ids, **arguments)
        return replace(answer, versions=[self._offset + version for version in answer.versions])


def count_update(engine: Any) -> None:
    """Count an update of an engine's weights that was made elsewhere."""
    if hasattr(engine, "count_update"):
        engine.count_update()
    else:
        engine.update_weights(None)
