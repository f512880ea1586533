"""The policy objectives by name; each is a function of the same arguments, in its own file."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchrl_mt.objectives.functional.objective_ppo import ppo
from torchrl_mt.objectives.functional.objective_reinforce import reinforce

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, float]], tuple[Tensor, Tensor]]
"""``(log_prob, old_log_prob, advantage, mask, clip_epsilon) -> (loss, clipped)``; ``[N, S]``."""

OBJECTIVES: dict[str, Objective] = {"ppo": ppo, "reinforce": reinforce}
"""Name to objective, as :class:`~torchrl_mt.objectives.MultiTurnLoss` takes it."""
