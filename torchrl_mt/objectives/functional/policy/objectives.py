"""The policy objectives by name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

from torch import Tensor

from torchrl_mt.checks import check_clip_epsilon
from torchrl_mt.objectives.functional.policy.cispo import cispo
from torchrl_mt.objectives.functional.policy.covariance import clip_cov, kl_cov
from torchrl_mt.objectives.functional.policy.decoupled_ppo import decoupled_ppo
from torchrl_mt.objectives.functional.policy.dppo import dppo_kl, dppo_tv
from torchrl_mt.objectives.functional.policy.gmpo import gmpo
from torchrl_mt.objectives.functional.policy.gspo import gspo, gspo_token
from torchrl_mt.objectives.functional.policy.ppo import ppo
from torchrl_mt.objectives.functional.policy.reinforce import reinforce
from torchrl_mt.objectives.functional.policy.sapo import sapo
from torchrl_mt.objectives.functional.policy.sft import sft
from torchrl_mt.objectives.functional.policy.vespo import vespo

Objective = Callable[..., tuple[Tensor, Tensor]]
"""``(log_prob, old_log_prob, advantage, mask, clip_epsilon) -> (loss, clipped)``, all ``[N, S]``.

``clipped`` is int8: -1 where a ratio is below its bounds, 1 above, else 0 (a bool's true counts as
above). ``clip_epsilon`` is passed by keyword; its default is ``None`` if the objective does not clip.
An objective with a keyword ``sampler_log_prob`` gets the sampler's log-probabilities; one with a
keyword ``turns`` gets the turn ids if a sequence is a turn. One whose ``advantage`` has a default gets
``None`` as ``old_log_prob`` and ``advantage``. Bind other hyperparameters with ``functools.partial``."""

OBJECTIVES: dict[str, Objective] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "decoupled_ppo": decoupled_ppo,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "gmpo": gmpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "kl_cov": kl_cov,
    "ppo": ppo,
    "reinforce": reinforce,
    "sapo": sapo,
    "sft": sft,
    "vespo": vespo,
}
"""Objectives by their names in :class:`~torchrl_mt.objectives.MultiTurnLoss`."""


def takes(function: Callable, name: str) -> bool:
    """Whether a function or a ``functools.partial`` has a parameter of this name.

    Examples:
        >>> takes(gspo, "turns"), takes(ppo, "turns")
        (True, False)
    """
    return name in inspect.signature(function).parameters


def compares(objective: Objective) -> bool:
    """Whether an objective reads old log-probabilities and advantages: ``advantage`` has no default.

    Examples:
        >>> compares(ppo), compares(sft)
        (True, False)
    """
    third = list(inspect.signature(objective).parameters.values())[2:3]
    return all(parameter.default is parameter.empty for parameter in third)


def clip_bounds(
    objective: Objective, clip_epsilon: float | tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Find the clip bounds of an objective.

    Args:
        objective: See :data:`Objective`.
        clip_epsilon: A number for both sides, or ``(low, high)``. By default the bounds in
            ``functools.partial``, else the objective's own, else PPO's.

    Returns:
        ``(low, high)``; ``None`` for an objective that does not clip.

    Raises:
        ValueError: If bounds are out of range or given twice, or the objective has none.
        TypeError: If the objective has no keyword ``clip_epsilon``.

    Examples:
        >>> clip_bounds(gspo), clip_bounds(gspo, 0.1), clip_bounds(sapo)
        ((0.0003, 0.0004), (0.1, 0.1), None)
    """
    function, bound = objective, None
    while isinstance(function, functools.partial):
        bound = function.keywords.get("clip_epsilon") if bound is None else bound
        function = function.func
    given = clip_epsilon if bound is None else bound
    parameter = inspect.signature(function).parameters.get("clip_epsilon")
    if parameter is None or parameter.kind is parameter.POSITIONAL_ONLY:
        raise TypeError(
            "objective must be a function (log_prob, old_log_prob, advantage, mask, clip_epsilon) whose "
            f"clip_epsilon can be given by keyword, got {objective!r}."
        )
    if bound is not None and clip_epsilon is not None:
        raise ValueError(
            f"clip_epsilon is bound to the objective as {bound!r} and given as {clip_epsilon!r}; give "
            "it once."
        )
    if parameter.default is None:
        if given is not None:
            raise ValueError(
                f"clip_epsilon must be None for {getattr(function, '__name__', function)!r}, which does "
                f"not clip, got {given!r}."
            )
        return None
    if given is None:
        own = parameter.default
        given = (0.2, 0.2) if own is inspect.Parameter.empty else own
    return check_clip_epsilon(given, math.inf if function is gmpo else 1.0)
