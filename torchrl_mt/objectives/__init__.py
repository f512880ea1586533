"""Learning from training rows: experience (scores, KL, advantages) and the multi-turn loss."""

from torchrl_mt.objectives.experience import ExperienceMaker
from torchrl_mt.objectives.loss import MultiTurnLoss
from torchrl_mt.objectives.row_log_probs import row_log_probs

__all__ = ["ExperienceMaker", "MultiTurnLoss", "row_log_probs"]
