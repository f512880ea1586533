"""The policy objectives by name; each is a function of the same arguments, in its own file."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor

from torchrl_mt.objectives.functional.objective_cispo import cispo
from torchrl_mt.objectives.functional.objective_decoupled_ppo import decoupled_ppo
from torchrl_mt.objectives.functional.objective_gmpo import gmpo
from torchrl_mt.objectives.functional.objective_gspo import gspo, gspo_token
from torchrl_mt.objectives.functional.objective_ppo import ppo
from torchrl_mt.objectives.functional.objective_reinforce import reinforce
from torchrl_mt.objectives.functional.objective_sapo import sapo

Objective = Callable[..., tuple[Tensor, Tensor]]
"""``(log_prob, old_log_prob, advantage, mask, clip_epsilon) -> (loss, clipped)``, all ``[N, S]``.

``clipped`` is int8: -1 where a ratio lies below its bounds, 1 above, else 0 (of a bool, true counts
as above). An objective that has a keyword ``sampler_log_prob`` is given the sampler's
log-probabilities by it, one that has a keyword ``turns`` the turn ids where a sequence is to be a
turn. Bind hyperparameters of its own with ``functools.partial``."""

OBJECTIVES: dict[str, Objective] = {
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "gmpo": gmpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "ppo": ppo,
    "reinforce": reinforce,
    "sapo": sapo,
}
"""Name to objective, as :class:`~torchrl_mt.objectives.MultiTurnLoss` takes it."""


def takes(function: Callable, name: str) -> bool:
    """Say whether a function has a parameter of this name.

    Args:
        function: Any callable, a ``functools.partial`` too.
        name: Of the parameter.

    Returns:
        Whether it can be given by keyword.

    Examples:
        >>> takes(gspo, "turns"), takes(ppo, "turns")
        (True, False)
    """
    return name in inspect.signature(function).parameters


def default_clip_epsilon(objective: Objective) -> tuple[float, float]:
    """Bounds that an objective has by itself, or PPO's if it names none.

    Args:
        objective: See :data:`Objective`.

    Returns:
        ``(low, high)``.

    Examples:
        >>> default_clip_epsilon(gspo)
        (0.0003, 0.0004)
    """
    given = inspect.signature(objective).parameters.get("clip_epsilon")
    if given is None or given.default is inspect.Parameter.empty:
        return (0.2, 0.2)
    return given.default
