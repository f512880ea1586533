"""Transforms of whole episodes (returns, training rows, images), and statistics of stored returns."""

from torchrl_mt.transforms.discounted_return import DiscountedReturn
from torchrl_mt.transforms.merge_turns import MergeTurns
from torchrl_mt.transforms.return_balance import ReturnBalance
from torchrl_mt.transforms.vision_inputs import VisionInputs

__all__ = ["DiscountedReturn", "MergeTurns", "ReturnBalance", "VisionInputs"]
