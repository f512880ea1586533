"""Transforms of whole episodes: credit and training rows."""

from torchrl_mt.transforms.discounted_return import DiscountedReturn
from torchrl_mt.transforms.merge_turns import MergeTurns

__all__ = ["DiscountedReturn", "MergeTurns"]
