"""Log-probabilities and entropies of tokens from hidden states and the output layer's weights.

Logits are computed in chunks, and again in the backward pass: no more than one chunk is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_mt.checks import check_positive, check_shape
from torchrl_mt.scoring.token_log_probs import (
    bar,
    chunk_gradient,
    chunks,
    empty_scores,
    score_chunk,
    wide,
)

CHUNK_ELEMENTS = 1 << 25
"""Logits (tokens times vocabulary) per chunk; each chunk reads the weights once."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    dtype: torch.dtype | None = None,
    barred: Sequence[int] = (),
    norms: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Score tokens under ``softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)``.

    Without ``softcap`` the logits are ``scale * (hidden @ weight.T + bias)``. Soft-capping is Gemma
    2's (https://arxiv.org/abs/2408.00118, section 2).

    Args:
        hidden: ``[K, H]`` floating.
        weight: ``[V, H]`` floating.
        tokens: ``[K]`` int64.
        bias: ``[V]`` floating.
        scale: Factor of the layer's output.
        softcap: Bound of the logits; ``None`` for no bound.
        temperature: Divisor of the logits, in float32.
        with_entropy: Whether to compute the entropies as well.
        dtype: Type of the matrix products; by default autocast's where it is on, else that of
            ``hidden``. All else is in float32.
        barred: Tokens in [0, V) that are never sampled: their probability is 0.
        norms: A list to which each chunk's squared norms ``[k]`` of the log-probabilities' gradients by
            the logits are added: ``1 - 2 p[y] + sum of p ** 2``, without gradient.

    Returns:
        Log-probabilities, and entropies or ``None``: ``[K]`` float32 (float64 if computed in it).

    Raises:
        ValueError: If shapes differ or ``temperature`` or ``softcap`` is not positive.

    Examples:
        >>> hidden, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> linear_log_probs(hidden, weight, torch.tensor([0, 3]))[0].exp()
        tensor([0.2500, 0.2500])
    """
    check_shape("weight", weight, torch.Size((len(weight), hidden.shape[-1])))
    check_shape("tokens", tokens, hidden.shape[:-1])
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1])
    check_positive("temperature", temperature)
    if softcap is not None:
        check_positive("softcap", softcap)
    device = hidden.device.type
    if dtype is None:
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    options = dtype, scale, softcap, temperature, with_entropy, barred, norms
    log_prob, entropy = _LinearLogProbs.apply(hidden, weight, bias, tokens, *options)
    return log_prob, entropy if with_entropy else None


class _LinearLogProbs(torch.autograd.Function):
    """Scores of ``K`` targets, for :func:`linear_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float | None,
        temperature: float,
        with_entropy: bool,
        barred: Sequence[int],
        norms: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        log_prob, log_sum, entropy = empty_scores(
            hidden.new_empty(0, dtype=dtype), len(target), with_entropy
        )
        ctx.dtype, ctx.scale, ctx.softcap, ctx.temperature = dtype, scale, softcap, temperature
        ctx.barred = barred
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
            for part in chunks(len(target), len(weight), CHUNK_ELEMENTS):
                x, _ = _logits(ctx, hidden[part].to(dtype), w, b, with_slope=False)
                score_chunk(x, target, part, log_prob, log_sum, entropy, norms)
        ctx.save_for_backward(hidden, weight, bias, target, log_sum, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, log_sum, entropy = ctx.saved_tensors
        if grad_log_prob is None and grad_entropy is None:
            return (None,) * 11
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        total = wide(ctx.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks are in float32: half precision would lose small terms.
        grad_weight = torch.zeros_like(weight, dtype=total) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=total) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            w, b = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            for part in chunks(len(target), len(weight), CHUNK_ELEMENTS):
                h = hidden[part].to(ctx.dtype)
                x, slope = _logits(ctx, h, w, b, with_slope=True)
                grad = chunk_gradient(
                    x, target, part, log_sum, entropy, grad_log_prob, grad_entropy
                )
                grad *= ctx.scale / ctx.temperature if slope is None else slope
                bar(grad, ctx.barred, 0.0)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(ctx.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (grad @ w).to(hidden.dtype)
                if grad_weight is not None and total is ctx.dtype:
                    grad_weight.addmm_(grad.t(), h)
                elif grad_weight is not None:
                    grad_weight += grad.t() @ h
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 8


def _logits(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute logits over the temperature, and their derivative by the layer's output if soft-capped."""
    x = torch.nn.functional.linear(hidden, weight, bias)
    x = x.to(wide(ctx.dtype))
    slope = None
    if ctx.softcap is not None:
        x.mul_(ctx.scale / ctx.softcap).tanh_()
        if with_slope:
            slope = (1 - x.square()).mul_(ctx.scale / ctx.temperature)
        x.mul_(ctx.softcap / ctx.temperature)
    elif ctx.scale != ctx.temperature:
        x.mul_(ctx.scale).div_(ctx.temperature)
    return bar(x, ctx.barred), slope
