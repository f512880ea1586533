"""Log-probabilities and entropies of tokens from logits, in float32 and bounded memory.

Float32 copies of the logits are made in chunks, and again in the backward pass: beyond the logits and
their gradient, no more than one chunk is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_mt.checks import check_positive, check_shape

CHUNK_ELEMENTS = 1 << 24
"""Logits (tokens times vocabulary) per chunk."""


def log_probs_at(
    logits: Tensor,
    position: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    barred: Sequence[int] = (),
    norms: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probabilities and entropies (or ``None``) of tokens at chosen positions.

    ``tokens`` and ``position`` are ``[K]``, without duplicate positions; ``logits`` are ``[T, V]``.
    ``temperature`` divides the logits, in float32. ``barred`` tokens of the vocabulary have probability
    0; ``norms`` is that of :func:`~torchrl_mt.scoring.linear_log_probs.linear_log_probs`. Results are
    ``[K]`` float32 (float64 for float64 logits).

    Examples:
        >>> log_probs_at(torch.zeros(3, 4), torch.tensor([2]), torch.tensor([1]))[0].exp()
        tensor([0.2500])
    """
    check_shape("tokens", tokens, position.shape)
    check_positive("temperature", temperature)
    log_prob, entropy = _LogProbs.apply(
        logits, tokens, position, temperature, with_entropy, barred, norms
    )
    return log_prob, entropy if with_entropy else None


class _LogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of ``K`` targets at ``K`` of ``T`` positions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        position: Tensor,
        temperature: float,
        with_entropy: bool,
        barred: Sequence[int],
        norms: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        log_prob, log_sum, entropy = empty_scores(logits, len(target), with_entropy)
        for part in chunks(len(target), logits.shape[-1], CHUNK_ELEMENTS):
            x = bar(_select(logits, position, part, temperature), barred)
            score_chunk(x, target, part, log_prob, log_sum, entropy, norms)
        ctx.save_for_backward(logits, target, position, log_sum, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.temperature, ctx.barred = temperature, barred
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, target, position, log_sum, entropy = ctx.saved_tensors
        if not ctx.needs_input_grad[0] or (grad_log_prob is None and grad_entropy is None):
            return (None,) * 7
        grad = torch.zeros_like(logits)
        for part in chunks(len(target), logits.shape[-1], CHUNK_ELEMENTS):
            x = bar(_select(logits, position, part, ctx.temperature), ctx.barred)
            out = chunk_gradient(x, target, part, log_sum, entropy, grad_log_prob, grad_entropy)
            out = bar(out, ctx.barred, 0.0)
            if ctx.temperature != 1.0:
                out /= ctx.temperature
            grad[position[part]] = out.to(grad.dtype)
        return grad, *(None,) * 6


def chunks(size: int, vocabulary: int, elements: int) -> list[slice]:
    """Split ``size`` positions into parts of at most ``elements`` logits, at least one position each."""
    step = max(1, elements // max(1, vocabulary))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def bar(x: Tensor, tokens: Sequence[int], value: float = -torch.inf) -> Tensor:
    """Write a value for barred tokens into ``x`` ``[K, V]``, and return it."""
    for token in tokens:
        x[:, token] = value
    return x


def empty_scores(like: Tensor, size: int, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate log-probabilities, normalisers and entropies (empty if not asked for)."""
    log_prob = like.new_empty(size, dtype=wide(like.dtype))
    entropy = torch.empty_like(log_prob) if with_entropy else log_prob.new_empty(0)
    return log_prob, torch.empty_like(log_prob), entropy


def score_chunk(
    x: Tensor,
    target: Tensor,
    part: slice,
    log_prob: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    norms: list[Tensor] | None = None,
) -> None:
    """Write the scores of one part; its logits ``x`` are overwritten."""
    log_sum[part] = x.logsumexp(-1)
    log_prob[part] = x.gather(-1, target[part, None]).squeeze(-1) - log_sum[part]
    if not len(entropy) and norms is None:
        return
    x -= log_sum[part, None]
    p = x.exp()
    if norms is not None:
        # d log p[y] / dx = onehot(y) - p, without a second copy of p.
        own = p.gather(-1, target[part, None])
        p.scatter_(-1, target[part, None], log_prob[part, None].expm1())
        norms.append(torch.linalg.vector_norm(p, dim=-1).square())
        p.scatter_(-1, target[part, None], own)
    if len(entropy):
        entropy[part] = -p.mul_(_finite_(x)).sum(-1)


def chunk_gradient(
    x: Tensor,
    target: Tensor,
    part: slice,
    log_sum: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Compute the gradient by the logits ``x`` of one part, which are overwritten."""
    x -= log_sum[part, None]
    p = x.exp()
    if grad_entropy is not None and len(entropy):
        # dH/dx = -p (log p + H); p comes first because it turns -inf into 0.
        out = _finite_(x).add_(entropy[part, None]).mul_(p).mul_(-grad_entropy[part, None])
        if grad_log_prob is not None:
            out -= p.mul_(grad_log_prob[part, None])
    elif grad_log_prob is not None:
        out = p.mul_(-grad_log_prob[part, None])
    else:
        return torch.zeros_like(p)
    if grad_log_prob is not None:
        # d log p[y] / dx = onehot(y) - p
        out.scatter_add_(-1, target[part, None], grad_log_prob[part, None])
    return out


def _select(logits: Tensor, position: Tensor, part: slice, temperature: float) -> Tensor:
    """Copy one part of the logits in float32, divided by the temperature."""
    x = logits[position[part]]
    x = x.to(wide(x.dtype))
    return x if temperature == 1.0 else x.div_(temperature)


def _finite_(log_p: Tensor) -> Tensor:
    """Replace ``-inf`` so that its product with a probability of 0 is 0."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)
