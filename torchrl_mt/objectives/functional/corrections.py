"""Off-policy corrections by name: weights of tokens that another policy than the old one sampled.

A correction reads the old and the sampler's log-probabilities alone, so it is a constant of the
rows. Its weights multiply the loss; what is divided by stays the count of all sampled tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrl_mt.checks import check_choice
from torchrl_mt.objectives.functional.correction_geometric import geometric
from torchrl_mt.objectives.functional.correction_metrics import correction_metrics
from torchrl_mt.objectives.functional.correction_mis import icepop, sequence_mis
from torchrl_mt.objectives.functional.correction_tis import sequence_tis, token_tis
from torchrl_mt.objectives.functional.policy.objectives import takes

Correction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""``(old_log_prob, sampler_log_prob, mask) -> (weight, metrics)``: ``[N, S]`` float32 without
gradient, zero on masked tokens, and scalars of which ``"ess"``, ``"clip_fraction"`` and
``"mask_fraction"`` are there. One that has a keyword ``turns`` is given the turn ids where a
sequence is to be a turn. Bind hyperparameters with ``functools.partial``."""

CORRECTIONS: dict[str, Correction] = {
    "geometric": geometric,
    "icepop": icepop,
    "sequence_mis": sequence_mis,
    "sequence_tis": sequence_tis,
    "token_tis": token_tis,
}
"""Name to correction, as :class:`~torchrl_mt.objectives.MultiTurnLoss` takes it."""


WEIGHING = (icepop, sequence_mis, sequence_tis, token_tis)
"""The corrections that multiply by the ratio of the old policy to the sampler; others leave out."""


def weighs(correction: Correction) -> bool:
    """Say whether a correction multiplies by the ratio of the old policy to the sampler.

    Args:
        correction: A function, bound with ``functools.partial`` or not, compiled or not.

    Returns:
        Whether it is one of those here that do.

    Examples:
        >>> weighs(token_tis), weighs(torch.compile(token_tis)), weighs(geometric)
        (True, True, False)
    """
    while isinstance(correction, functools.partial):
        correction = correction.func
    return inspect.unwrap(correction) in [inspect.unwrap(known) for known in WEIGHING]


def find_corrections(
    correction: str | Correction | Sequence[str | Correction] | None,
) -> tuple[Correction, ...]:
    """Look up corrections by name.

    Args:
        correction: A name, a function, several of these, or ``None``.

    Returns:
        The functions, in order.

    Raises:
        ValueError: If a name is unknown.
        TypeError: If one is neither a name nor a function.

    Examples:
        >>> find_corrections(["geometric", token_tis]) == (geometric, token_tis)
        True
    """
    if correction is None:
        return ()
    if isinstance(correction, str) or not isinstance(correction, Sequence):
        correction = [correction]
    found = []
    for item in correction:
        if isinstance(item, str):
            check_choice("correction", item, CORRECTIONS)
            item = CORRECTIONS[item]
        if not callable(item):
            raise TypeError(
                f"correction must be a name, a function or several of these, got {correction!r}."
            )
        found.append(item)
    return tuple(found)


@torch.no_grad()
def correct(
    corrections: Sequence[Correction],
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multiply the weights of several corrections.

    Args:
        corrections: One or more.
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        turns: ``[N, S]`` int64 turn id of each token, for a sequence to be a turn and not a row.

    Returns:
        The product ``[N, S]`` float32, and ``"ess"`` and ``"mask_fraction"`` of it; its
        ``"clip_fraction"`` is the largest one of the corrections.

    Raises:
        ValueError: If there is no correction.

    Examples:
        >>> old, mask = torch.tensor([[9.0, 1 / 9]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> correct([geometric, token_tis], old, torch.zeros(1, 2), mask)[0]
        tensor([[2.0000, 0.1111]])
    """
    if not corrections:
        raise ValueError("corrections must be one or more, got none.")
    weight = mask.float()
    clip_fractions = []
    for correction in corrections:
        options = {"turns": turns} if turns is not None and takes(correction, "turns") else {}
        factor, metrics = correction(old_log_prob, sampler_log_prob, mask, **options)
        weight = torch.where(mask, weight * factor, 0.0)
        clip_fractions.append(metrics["clip_fraction"])
    metrics = correction_metrics(weight, mask, torch.zeros_like(mask))
    metrics["clip_fraction"] = torch.stack(clip_fractions).amax()
    return weight, metrics
