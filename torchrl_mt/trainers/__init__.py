"""The whole training loop, for those who want one; each of its parts is also available apart."""

from torchrl_mt.trainers.trainer import MultiTurnTrainer

__all__ = ["MultiTurnTrainer"]
