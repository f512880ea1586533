"""Data sets whose images are MP4 files."""

from torchrl_mt.bridges.video.format import FORMAT

__all__ = ["FORMAT"]
