"""Data sets of episodes on disk, and checkpoints of whole runs."""

from torchrl_mt.datasets.run_checkpoint import RunCheckpoint

__all__ = ["RunCheckpoint"]
