"""Transforms of whole episodes: credit and training rows."""

from torchrl_mt.transforms.merge_turns import MergeTurns

__all__ = ["MergeTurns"]
