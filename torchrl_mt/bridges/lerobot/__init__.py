"""Data sets of LeRobot."""

from torchrl_mt.bridges.lerobot.format import FORMAT

__all__ = ["FORMAT"]
