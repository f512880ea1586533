"""Data sets in Lance, a column store."""

from torchrl_mt.bridges.lance.format import FORMAT

__all__ = ["FORMAT"]
