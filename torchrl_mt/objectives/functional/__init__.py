"""Pure, vectorised, mask-aware building blocks of losses and advantages.

Shapes are ``[N, S]`` (rows, tokens) unless stated. Masks are boolean, true on tokens that the policy
sampled; they may have holes, and padding anywhere. Any floating type in, float32 out.

All functions raise ``ValueError`` if shapes differ, a number is out of range, a name is unknown, a
needed argument is missing or a sampled token has no turn, and ``TypeError`` if a mask is not boolean or
ids are not integers. Their docstrings list only other errors.
"""

from torchrl_mt.objectives.functional.aggregation import aggregate, merge_totals
from torchrl_mt.objectives.functional.corrections import (
    CORRECTIONS,
    Correction,
    correct,
    geometric,
    icepop,
    m2po,
    off_policy_mask,
    sequence_mis,
    sequence_tis,
    token_tis,
)
from torchrl_mt.objectives.functional.critic import value_loss
from torchrl_mt.objectives.functional.gdpo import gdpo_advantage
from torchrl_mt.objectives.functional.gigpo import gigpo_advantage, message_states
from torchrl_mt.objectives.functional.group import GROUP_ESTIMATORS, group_advantage
from torchrl_mt.objectives.functional.kl import kl_estimate
from torchrl_mt.objectives.functional.otb import otb_advantage
from torchrl_mt.objectives.functional.outcome import outcome_advantage
from torchrl_mt.objectives.functional.policy.cispo import cispo
from torchrl_mt.objectives.functional.policy.covariance import clip_cov, kl_cov
from torchrl_mt.objectives.functional.policy.decoupled_ppo import decoupled_ppo
from torchrl_mt.objectives.functional.policy.dppo import dppo_kl, dppo_tv
from torchrl_mt.objectives.functional.policy.gmpo import gmpo
from torchrl_mt.objectives.functional.policy.gspo import gspo, gspo_token
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES, Objective
from torchrl_mt.objectives.functional.policy.ppo import ppo
from torchrl_mt.objectives.functional.policy.reinforce import reinforce
from torchrl_mt.objectives.functional.policy.sapo import sapo
from torchrl_mt.objectives.functional.policy.sft import sft
from torchrl_mt.objectives.functional.policy.vespo import vespo
from torchrl_mt.objectives.functional.reward_shaping import (
    RewardNormalizer,
    clip_reward,
    overlong_penalty,
)
from torchrl_mt.objectives.functional.selection import (
    clip_filter_weight,
    dynamic_sampling_mask,
    entropy_mask,
)
from torchrl_mt.objectives.functional.time.gae import (
    bilevel_gae,
    episode_gae,
    masked_gae,
    turn_gae,
)
from torchrl_mt.objectives.functional.time.returns import (
    masked_returns,
    turn_normalize,
    turn_returns,
)
from torchrl_mt.objectives.functional.whitening import Moments, masked_whiten

__all__ = [
    "CORRECTIONS",
    "GROUP_ESTIMATORS",
    "OBJECTIVES",
    "Correction",
    "Moments",
    "Objective",
    "RewardNormalizer",
    "aggregate",
    "bilevel_gae",
    "cispo",
    "clip_cov",
    "clip_filter_weight",
    "clip_reward",
    "correct",
    "decoupled_ppo",
    "dppo_kl",
    "dppo_tv",
    "dynamic_sampling_mask",
    "entropy_mask",
    "episode_gae",
    "gdpo_advantage",
    "geometric",
    "gigpo_advantage",
    "gmpo",
    "group_advantage",
    "gspo",
    "gspo_token",
    "icepop",
    "kl_cov",
    "kl_estimate",
    "m2po",
    "masked_gae",
    "masked_returns",
    "masked_whiten",
    "merge_totals",
    "message_states",
    "off_policy_mask",
    "otb_advantage",
    "outcome_advantage",
    "overlong_penalty",
    "ppo",
    "reinforce",
    "sapo",
    "sequence_mis",
    "sequence_tis",
    "sft",
    "token_tis",
    "turn_gae",
    "turn_normalize",
    "turn_returns",
    "value_loss",
    "vespo",
]
