"""Off-policy corrections: weights for tokens sampled by another policy than the old one.

A correction depends only on the old and the sampler's log-probabilities and, if asked, the advantages,
which are constants of the rows. Its weights multiply the loss and leave its divisor unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchrl_mt.checks import check_finite, check_positive, check_shape, find_functions
from torchrl_mt.objectives.functional.importance import (
    MAX_RATIO,
    effective_sample_size,
    sampler_log_ratio,
    sequence_mean,
    sequence_sum,
)
from torchrl_mt.objectives.functional.policy.objectives import takes
from torchrl_mt.objectives.functional.time.recurrence import accumulation_dtype

Correction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""``(old_log_prob, sampler_log_prob, mask) -> (weight, metrics)``.

``weight`` is ``[N, S]`` float32 without gradient, zero on masked tokens. ``metrics`` has scalars, among
them ``"ess"``, ``"clip_fraction"`` and ``"mask_fraction"``. A function with a keyword ``turns`` gets the
turn ids if a sequence is a turn, one with a keyword ``advantage`` the advantages. Bind hyperparameters
with ``functools.partial``."""


@torch.no_grad()
def token_tis(
    old_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor, *, cap: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight each token by ``min(w, cap)``, with ``w = exp(old_log_prob - sampler_log_prob)``.

    From Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (https://fengyao.notion.site/off-policy-rl).

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        cap: Largest weight.

    Returns:
        Weights ``[N, S]`` float32 without gradient, zero on masked tokens, and
        :func:`~torchrl_mt.objectives.functional.corrections.correction_metrics` of them.

    Examples:
        >>> old, mask = torch.tensor([[0.5, 9.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> token_tis(old, torch.zeros(1, 2), mask)[0]
        tensor([[0.5000, 2.0000]])
    """
    return _truncate(sampler_log_ratio(old_log_prob, sampler_log_prob, mask), mask, cap)


@torch.no_grad()
def sequence_tis(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight each sequence by ``min(w, cap)``, with ``w`` the product of its tokens' ratios.

    From Liu et al., 2025, "When speed kills stability" (https://richardli.xyz/rl-collapse). A
    sequence is a row, or with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        cap: Largest weight.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        As :func:`token_tis`; the tokens of a sequence have one weight.

    Examples:
        >>> old, mask = torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> sequence_tis(old, torch.zeros(1, 2), mask)[0]
        tensor([[0.2500, 0.2500]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    return _truncate(sequence_sum(difference, mask, turns), mask, cap)


@torch.no_grad()
def icepop(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.5, 5.0),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight each token by ``w = exp(old_log_prob - sampler_log_prob)`` within bounds, else by 0.

    IcePop of Ring-1T (https://arxiv.org/abs/2510.18855), also known as token-level masked importance
    sampling.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Smallest and largest ratio to keep, inclusive.

    Returns:
        Weights ``[N, S]`` float32 without gradient, zero on masked and on dropped tokens, and
        :func:`~torchrl_mt.objectives.functional.corrections.correction_metrics` of them.

    Examples:
        >>> old, mask = torch.tensor([[0.4, 2.0]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> icepop(old, torch.zeros(1, 2), mask)[0]
        tensor([[0., 2.]])
    """
    ratio = sampler_log_ratio(old_log_prob, sampler_log_prob, mask).exp()
    return _keep_within(ratio, ratio, mask, bounds)


@torch.no_grad()
def sequence_mis(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight each sequence by the product of its tokens' ratios within bounds, else by 0.

    From Liu et al., 2025, "When speed kills stability" (https://richardli.xyz/rl-collapse). A
    sequence is a row, or with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Smallest and largest product to keep, inclusive; the source has no lower bound.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        As :func:`icepop`; the tokens of a sequence have one weight.

    Examples:
        >>> old = torch.tensor([[0.5, 2.0], [2.0, 2.0]]).log()
        >>> sequence_mis(old, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))[0]
        tensor([[1., 1.],
                [0., 0.]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    ratio = sequence_sum(difference, mask, turns).exp()
    return _keep_within(ratio, ratio, mask, bounds)


@torch.no_grad()
def geometric(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    bounds: tuple[float, float] = (0.999, 1.001),
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight sequences by 1 if the geometric mean of their tokens' ratios is within bounds, else by 0.

    A product of ratios leaves any bounds as sequences grow; its ``L``-th root does not (Liu et al.,
    2025, "When speed kills stability", https://richardli.xyz/rl-collapse). To weight the kept
    sequences as well, give :class:`~torchrl_mt.objectives.MultiTurnLoss` this and :func:`token_tis`.
    A sequence is a row, or with ``turns`` a turn of a row.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        bounds: Smallest and largest geometric mean to keep, inclusive.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.

    Returns:
        Weights ``[N, S]`` float32, 1 on tokens of kept sequences, else 0, and
        :func:`~torchrl_mt.objectives.functional.corrections.correction_metrics` of them.

    Examples:
        >>> old = torch.tensor([[0.5, 2.0], [2.0, 2.0]]).log()
        >>> geometric(old, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool))[0]
        tensor([[1., 1.],
                [0., 0.]])
    """
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    ratio = sequence_mean(difference, mask, turns).exp()
    return _keep_within(torch.ones_like(ratio), ratio, mask, bounds)


@torch.no_grad()
def off_policy_mask(
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    advantage: Tensor,
    delta: float = 0.5,
    turns: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight tokens of negative advantage by 0 in sequences that are unlikely by now, else by 1.

    Off-policy sequence masking of DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): 0 where the
    advantage is negative and the mean of ``sampler_log_prob - old_log_prob`` over the sequence is above
    ``delta``. A policy learns from its own mistakes; those of another one mislead it. The paper measures
    with the policy being trained, and names no ``delta``; the default is TRL's proposal.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        advantage: ``[N, S]`` floating.
        delta: Largest mean of a sequence that is kept whole.
        turns: ``[N, S]`` int64 turn id of each token, if a sequence is a turn; by default a row.

    Returns:
        Weights ``[N, S]`` float32 of 0 and 1, zero on masked tokens, and
        :func:`~torchrl_mt.objectives.functional.corrections.correction_metrics` of them.

    Examples:
        >>> sampler, mask = torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> off_policy_mask(torch.zeros(1, 2), sampler, mask, advantage=torch.tensor([[-1.0, 2.0]]))[0]
        tensor([[0., 1.]])
    """
    check_finite("delta", delta)
    check_shape("advantage", advantage, mask.shape)
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    stale = -sequence_mean(difference, mask, turns) > delta
    weight = (mask & ~(stale & (advantage < 0))).float()
    return weight, correction_metrics(weight, mask, torch.zeros_like(mask))


@torch.no_grad()
def m2po(
    old_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor, *, threshold: float = 0.04
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight the tokens with the largest ratios by 0 until the second moment is small, else by 1.

    Second-moment trust region (M2PO, https://arxiv.org/abs/2510.01161): of all sampled tokens of this
    call, those with the largest ``(old_log_prob - sampler_log_prob) ** 2`` are dropped until the mean of
    the rest is below ``threshold``. The ratio is that of AReaL; the paper's is of the policy being
    trained to the sampler. Shards of a batch have thresholds of their own.

    Args:
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        threshold: Bound of the second moment.

    Returns:
        As :func:`off_policy_mask`. Tokens of equal ratios are kept or dropped together.

    Examples:
        >>> old, mask = torch.tensor([[0.1, -0.2, 0.6]]), torch.ones(1, 3, dtype=torch.bool)
        >>> m2po(old, torch.zeros(1, 3), mask)[0]
        tensor([[1., 1., 0.]])
    """
    check_positive("threshold", threshold)
    difference = sampler_log_ratio(old_log_prob, sampler_log_prob, mask)
    square = difference.to(accumulation_dtype(mask.device)).square()
    ordered = square[mask].sort().values
    count = torch.arange(1, len(ordered) + 1, device=mask.device)
    dropped = ordered[ordered.cumsum(0) / count >= threshold]
    kept = square < dropped[0] if len(dropped) else torch.ones_like(mask)
    weight = (mask & kept).float()
    return weight, correction_metrics(weight, mask, torch.zeros_like(mask))


def _truncate(log_weight: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncate weights at the cap, and at exp(20) in any case."""
    check_positive("cap", cap)
    ratio = log_weight.exp()
    weight = torch.where(mask, ratio.clamp(max=min(cap, MAX_RATIO)), 0.0)
    return weight, correction_metrics(weight, mask, ratio > cap)


def _keep_within(
    weight: Tensor, ratio: Tensor, mask: Tensor, bounds: tuple[float, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep the weights whose ratio lies within inclusive bounds; the others become 0."""
    low, high = bounds
    if not 0.0 <= low <= high:
        raise ValueError(f"bounds must be (low, high) with 0 <= low <= high, got {bounds}.")
    kept = mask & (ratio >= low) & (ratio <= high)
    weight = torch.where(kept, weight.clamp(max=MAX_RATIO), 0.0)
    return weight, correction_metrics(weight, mask, torch.zeros_like(mask))


CORRECTIONS: dict[str, Correction] = {
    "geometric": geometric,
    "icepop": icepop,
    "m2po": m2po,
    "off_policy_mask": off_policy_mask,
    "sequence_mis": sequence_mis,
    "sequence_tis": sequence_tis,
    "token_tis": token_tis,
}
"""Corrections by their names in :class:`~torchrl_mt.objectives.MultiTurnLoss`."""

WEIGHING = (icepop, sequence_mis, sequence_tis, token_tis)
"""Corrections that multiply by the ratio of the old policy to the sampler; the others only mask."""


def weighs(correction: Correction) -> bool:
    """Whether a correction, bound or compiled or not, multiplies by the ratio to the sampler."""
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
        TypeError: If an item is neither a name nor a function.

    Examples:
        >>> find_corrections(["geometric", token_tis]) == (geometric, token_tis)
        True
    """
    if correction is None:
        return ()
    return find_functions("correction", correction, CORRECTIONS)


@torch.no_grad()
def correct(
    corrections: Sequence[Correction],
    old_log_prob: Tensor,
    sampler_log_prob: Tensor,
    mask: Tensor,
    *,
    turns: Tensor | None = None,
    advantage: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multiply the weights of several corrections.

    Args:
        corrections: One or more.
        old_log_prob: ``[N, S]`` floating, under the actor before its updates on these rows.
        sampler_log_prob: ``[N, S]`` floating, as sampled.
        mask: ``[N, S]`` bool, true on sampled tokens; nothing else is read.
        turns: ``[N, S]`` int64 turn id of each token, if a sequence is a turn.
        advantage: ``[N, S]`` floating; needed by ``off_policy_mask``.

    Returns:
        The product ``[N, S]`` float32, and its ``"ess"`` and ``"mask_fraction"``; its
        ``"clip_fraction"`` is the largest of the corrections'.

    Examples:
        >>> old, mask = torch.tensor([[9.0, 1 / 9]]).log(), torch.ones(1, 2, dtype=torch.bool)
        >>> correct([geometric, token_tis], old, torch.zeros(1, 2), mask)[0]
        tensor([[2.0000, 0.1111]])
    """
    if not corrections:
        raise ValueError("corrections must be one or more, got none.")
    weight = mask.float()
    clip_fractions = []
    given = {"turns": turns, "advantage": advantage}
    for correction in corrections:
        options = {k: v for k, v in given.items() if v is not None and takes(correction, k)}
        factor, metrics = correction(old_log_prob, sampler_log_prob, mask, **options)
        weight = torch.where(mask, weight * factor, 0.0)
        clip_fractions.append(metrics["clip_fraction"])
    metrics = correction_metrics(weight, mask, torch.zeros_like(mask))
    metrics["clip_fraction"] = torch.stack(clip_fractions).amax()
    return weight, metrics


@torch.no_grad()
def correction_metrics(weight: Tensor, mask: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    """Summarise weights over the sampled tokens.

    Args:
        weight: ``[N, S]`` floating, not negative; zero on masked tokens.
        mask: ``[N, S]`` bool, true on sampled tokens.
        clipped: ``[N, S]`` bool, true on clipped weights; not read on masked tokens.

    Returns:
        Float32 scalars: ``"ess"``, the effective share of the samples; ``"clip_fraction"``, the share of
        clipped weights; ``"mask_fraction"``, the share of weights that are 0.

    Examples:
        >>> weight, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> correction_metrics(weight, mask, weight >= 2)
        {'ess': tensor(0.5000), 'clip_fraction': tensor(0.5000), 'mask_fraction': tensor(0.5000)}
    """
    count = mask.count_nonzero()
    share = 1.0 / count.clamp(min=1)
    return {
        "ess": effective_sample_size(weight, mask),
        "clip_fraction": (clipped & mask).count_nonzero() * share,
        "mask_fraction": (count - weight.count_nonzero()) * share,
    }
