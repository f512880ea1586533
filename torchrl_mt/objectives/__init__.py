"""Training on rows: the experience maker (scores, KL, advantages) and the multi-turn loss."""

from torchrl_mt.objectives.credit import Advantage
from torchrl_mt.objectives.entropy import EntropyController
from torchrl_mt.objectives.experience import ExperienceMaker
from torchrl_mt.objectives.loss import MultiTurnLoss, ValueLoss
from torchrl_mt.objectives.pipeline import ExperiencePipeline
from torchrl_mt.objectives.rewards.lengths import LengthPenalty, OverlongPenalty
from torchrl_mt.objectives.rewards.mix import RewardMix
from torchrl_mt.objectives.rewards.model import ModelReward
from torchrl_mt.objectives.rewards.remote import RemoteReward, RewardError
from torchrl_mt.objectives.rewards.text import TextReward
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.splitting import micro_batches, split_rows
from torchrl_mt.scoring.distillation import Distillation
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.values import ValueModel, row_values

__all__ = [
    "Advantage",
    "Distillation",
    "EntropyController",
    "ExperienceKeys",
    "ExperienceMaker",
    "ExperiencePipeline",
    "LengthPenalty",
    "ModelReward",
    "MultiTurnLoss",
    "OverlongPenalty",
    "Passes",
    "RemoteReward",
    "RewardError",
    "RewardMix",
    "TextReward",
    "ValueLoss",
    "ValueModel",
    "micro_batches",
    "row_log_probs",
    "row_values",
    "split_rows",
]
