"""Single-sample estimates of the Kullback-Leibler divergence, per sampled token."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from torchrl_mt.checks import check_choice, check_shape

KLKind = Literal["k1", "k2", "k3", "k3+"]
"""Kinds of estimator; see :func:`kl_estimate`."""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated, so that one extreme token cannot make the loss or
its gradient infinite."""


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: KLKind = "k3") -> Tensor:
    """Estimate ``KL(p || ref)`` at tokens sampled from ``p``.

    With ``d = ref_log_prob - log_prob`` (http://joschu.net/blog/kl-approx.html):

    - ``"k1"``: ``-d``, unbiased, of either sign;
    - ``"k2"``: ``d ** 2 / 2``, biased, never negative; its gradient estimates the KL's without bias;
    - ``"k3"``: ``exp(d) - 1 - d``, unbiased, never negative (``d`` is clamped at 20, with gradient 0
      beyond); as a loss, its gradient is that of ``KL(ref || p)``;
    - ``"k3+"``: the value of k3 with the gradient of k2 (https://arxiv.org/abs/2510.01555; named as
      in verl).

    Args:
        log_prob: Log-probabilities under ``p``, any shape.
        ref_log_prob: Log-probabilities under ``ref``, the same shape.
        kind: See above.

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
    return _k3(value).add_(value * (difference - value))


def _k3(difference: Tensor) -> Tensor:
    """``exp(d) - 1 - d``."""
    difference = difference.clamp(max=MAX_LOG_RATIO)
    return difference.expm1() - difference
