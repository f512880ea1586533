"""Learning from training rows: experience (scores, KL, advantages) and the multi-turn loss."""

from torchrl_mt.objectives.experience import ExperienceMaker
from torchrl_mt.objectives.experience_data import Experience
from torchrl_mt.objectives.loss import MultiTurnLoss
from torchrl_mt.objectives.remote_reward import RemoteReward, RewardError
from torchrl_mt.objectives.reward_model import ModelReward
from torchrl_mt.objectives.rewards import RewardMix
from torchrl_mt.objectives.row_log_probs import row_log_probs

__all__ = [
    "Experience",
    "ExperienceMaker",
    "ModelReward",
    "MultiTurnLoss",
    "RemoteReward",
    "RewardError",
    "RewardMix",
    "row_log_probs",
]
