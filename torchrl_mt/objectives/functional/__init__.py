"""Pure, vectorised, mask-aware functions that the losses and advantages are made of.

Shapes are ``[N, S]`` (rows, tokens) unless said; masks are boolean, true on the tokens that the
policy sampled, and may have holes and padding anywhere. Any floating type in, float32 out.
"""

from torchrl_mt.objectives.functional.aggregation import aggregate, aggregation_total
from torchrl_mt.objectives.functional.bilevel_gae import bilevel_gae
from torchrl_mt.objectives.functional.gae import masked_gae
from torchrl_mt.objectives.functional.group import group_advantage
from torchrl_mt.objectives.functional.kl import kl_estimate
from torchrl_mt.objectives.functional.log_probs import (
    log_probs_and_entropy,
    token_entropy,
    token_log_probs,
)
from torchrl_mt.objectives.functional.objective_ppo import ppo
from torchrl_mt.objectives.functional.objective_reinforce import reinforce
from torchrl_mt.objectives.functional.objectives import OBJECTIVES, Objective
from torchrl_mt.objectives.functional.outcome import outcome_advantage
from torchrl_mt.objectives.functional.recurrence import (
    reverse_linear_recurrence,
    sampled_recurrence,
)
from torchrl_mt.objectives.functional.returns import masked_returns
from torchrl_mt.objectives.functional.sampled import next_sampled, rewards_on_sampled
from torchrl_mt.objectives.functional.turn_gae import turn_gae
from torchrl_mt.objectives.functional.turns import (
    TurnIndex,
    index_turns,
    turn_normalize,
    turn_returns,
)

__all__ = [
    "OBJECTIVES",
    "Objective",
    "TurnIndex",
    "aggregate",
    "aggregation_total",
    "bilevel_gae",
    "group_advantage",
    "index_turns",
    "kl_estimate",
    "log_probs_and_entropy",
    "masked_gae",
    "masked_returns",
    "next_sampled",
    "outcome_advantage",
    "ppo",
    "reinforce",
    "reverse_linear_recurrence",
    "rewards_on_sampled",
    "sampled_recurrence",
    "token_entropy",
    "token_log_probs",
    "turn_gae",
    "turn_normalize",
    "turn_returns",
]
