"""An open episode as earlier versions kept it: what their pickles and checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_mt.data._store.schema import Schema
from torchrl_mt.data._store.steps import Steps

__all__ = ["OpenEpisode"]


@dataclass(frozen=True)
class OpenEpisode:
    """The steps of an unfinished episode."""

    schema: Schema
    parts: tuple[Steps, ...]

    @property
    def steps(self) -> Steps:
        """The steps that came so far."""
        return Steps.concat(self.parts)
