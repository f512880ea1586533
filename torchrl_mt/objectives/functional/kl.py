"""Single-sample estimates of the Kullback-Leibler divergence, per sampled token."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from torchrl_mt.checks import check_choice, check_shape

KLKind = Literal["k1", "k2", "k3", "k3+", "k3_is"]
"""Kinds of estimator; see :func:`kl_estimate`."""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated, so that one extreme token cannot make the loss or
its gradient infinite."""


def kl_estimate(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    kind: KLKind = "k3",
    *,
    old_log_prob: Tensor | None = None,
) -> Tensor:
    """Estimate ``KL(p || ref)`` at tokens sampled from ``p``.

    With ``d = ref_log_prob - log_prob`` (http://joschu.net/blog/kl-approx.html):

    - ``"k1"``: ``-d``, unbiased, of either sign;
    - ``"k2"``: ``d ** 2 / 2``, biased, never negative; its gradient estimates the KL's without bias;
    - ``"k3"``: ``exp(d) - 1 - d``, unbiased, never negative (``d`` is clamped at 20, with gradient 0
      beyond); as a loss, its gradient is that of ``KL(ref || p)``;
    - ``"k3+"``: the value of k3 with the gradient of k2 (https://arxiv.org/abs/2510.01555; named as
      in verl);
    - ``"k3_is"``: for tokens sampled from an older policy ``q``: ``w * (exp(d) - 1 - d)`` with
      ``w = exp(log_prob - old_log_prob)`` clamped to exp(±20), and its derivative ``-w * d``: both
      unbiased (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    Args:
        log_prob: Log-probabilities under ``p``, any shape.
        ref_log_prob: Log-probabilities under ``ref``, the same shape.
        kind: See above.
        old_log_prob: Log-probabilities under ``q``, the same shape; needed by ``"k3_is"`` alone.

    Returns:
        The estimate per token, float32.

    Examples:
        >>> import torch
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), "k1")
        tensor([1.])
    """
    check_choice("kind", kind, get_args(KLKind))
    check_shape("ref_log_prob", ref_log_prob, log_prob.shape)
    if kind == "k1":
        return log_prob.float() - ref_log_prob.float()
    difference = ref_log_prob.float() - log_prob.float()
    if kind == "k2":
        return difference.square().mul_(0.5)
    if kind == "k3":
        return _k3(difference)
    value = difference.detach()
    estimate = _k3(value).add_(value * (difference - value))
    if kind == "k3+":
        return estimate
    if old_log_prob is None:
        raise ValueError("old_log_prob must be given for kind 'k3_is', got None.")
    check_shape("old_log_prob", old_log_prob, log_prob.shape)
    log_ratio = log_prob.detach().float() - old_log_prob.float()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_() * estimate


def _k3(difference: Tensor) -> Tensor:
    """``exp(d) - 1 - d``."""
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference
