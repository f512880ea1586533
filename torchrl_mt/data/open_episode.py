"""An episode that has not ended yet, in pieces that are cheap to add to."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_mt.data.schema import Schema
from torchrl_mt.data.steps import Steps

__all__ = ["OpenEpisode"]


@dataclass(frozen=True)
class OpenEpisode:
    """The steps of an unfinished episode."""

    schema: Schema
    parts: tuple[Steps, ...]
    """Each longer than the next, so that they are few and adding one costs O(log T) on average."""

    def join(self, schema: Schema, part: Steps) -> OpenEpisode:
        """The episode with one more part."""
        parts = self.parts
        while parts and parts[-1].length <= part.length:
            part, parts = Steps.concat([parts[-1], part]), parts[:-1]
        return OpenEpisode(schema, (*parts, part))

    @property
    def length(self) -> int:
        """How many steps came so far."""
        return sum(part.length for part in self.parts)

    @property
    def steps(self) -> Steps:
        """The steps that came so far."""
        return Steps.concat(self.parts)
