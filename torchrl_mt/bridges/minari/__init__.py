"""Data sets of Minari."""

from torchrl_mt.bridges.minari.format import FORMAT

__all__ = ["FORMAT"]
