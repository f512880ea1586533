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

from torchrl_mt.checks import check_mask, check_positive, check_shape

CHUNK_ELEMENTS = 1 << 24
"""Logits (tokens times vocabulary) per chunk."""


def token_log_probs(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Compute the log-probability of each token.

    Args:
        logits: ``[..., V]`` floating; logits at a position predict the token at the same position.
        tokens: ``[...]`` int64; not read where masked.
        mask: ``[...]`` bool: positions to compute; all by default.
        temperature: Divisor of the logits, in float32.

    Returns:
        ``[...]`` float32 (float64 for float64 logits), zero where masked.

    Examples:
        >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])).exp()
        tensor([[0.2500, 0.2500]])
    """
    return _apply(logits, tokens, mask, temperature, with_entropy=False)[0]


def token_entropy(
    logits: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Compute the entropy, in nats, at each position.

    Args:
        logits: ``[..., V]`` floating; ``-inf`` for impossible tokens.
        mask: ``[...]`` bool: positions to compute; all by default.
        temperature: Divisor of the logits, in float32.

    Returns:
        ``[...]`` float32 (float64 for float64 logits), zero where masked.

    Examples:
        >>> token_entropy(torch.zeros(1, 2, 4)).exp()
        tensor([[4., 4.]])
    """
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _apply(logits, tokens, mask, temperature, with_entropy=True)[1]


def log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute :func:`token_log_probs` and :func:`token_entropy` from one softmax.

    Args:
        logits: ``[..., V]`` floating, aligned with ``tokens``.
        tokens: ``[...]`` int64; not read where masked.
        mask: ``[...]`` bool: positions to compute; all by default.
        temperature: Divisor of the logits, in float32.

    Returns:
        Log-probabilities and entropies, ``[...]`` float32 (float64 for float64 logits), zero where
        masked.

    Examples:
        >>> log_prob, entropy = log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([2]))
        >>> log_prob == -entropy
        tensor([True])
    """
    return _apply(logits, tokens, mask, temperature, with_entropy=True)


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
    ``barred`` tokens of the vocabulary have probability 0; ``norms`` is that of
    :func:`~torchrl_mt.scoring.linear_log_probs.linear_log_probs`.

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


def _apply(
    logits: Tensor, tokens: Tensor, mask: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Check the arguments and compute log-probabilities and entropies at unmasked positions."""
    shape = logits.shape[:-1]
    check_shape("tokens", tokens, shape)
    check_positive("temperature", temperature)
    flat, target = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    if mask is None:
        log_prob, entropy = _LogProbs.apply(flat, target, None, temperature, with_entropy, (), None)
        return log_prob.view(shape), entropy.view(shape if with_entropy else -1)
    check_mask("mask", mask, shape)
    position = mask.reshape(-1).nonzero().squeeze(-1)
    log_prob, entropy = _LogProbs.apply(
        flat, target[position], position, temperature, with_entropy, (), None
    )
    zeros = log_prob.new_zeros(flat.shape[0])
    log_prob = zeros.index_copy(0, position, log_prob).view(shape)
    if with_entropy:
        entropy = zeros.index_copy(0, position, entropy).view(shape)
    return log_prob, entropy


class _LogProbs(torch.autograd.Function):
    """Log-probabilities and entropies of ``K`` targets at ``K`` of ``T`` positions."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        position: Tensor | None,
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
        grad = torch.empty_like(logits) if position is None else torch.zeros_like(logits)
        for part in chunks(len(target), logits.shape[-1], CHUNK_ELEMENTS):
            x = bar(_select(logits, position, part, ctx.temperature), ctx.barred)
            out = chunk_gradient(x, target, part, log_sum, entropy, grad_log_prob, grad_entropy)
            out = bar(out, ctx.barred, 0.0)
            if ctx.temperature != 1.0:
                out /= ctx.temperature
            grad[part if position is None else position[part]] = out.to(grad.dtype)
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


def _select(logits: Tensor, position: Tensor | None, part: slice, temperature: float) -> Tensor:
    """Copy one part of the logits in float32, divided by the temperature."""
    x = logits[part] if position is None else logits[position[part]]
    x = x.to(wide(x.dtype), copy=position is None)
    return x if temperature == 1.0 else x.div_(temperature)


def _finite_(log_p: Tensor) -> Tensor:
    """Replace ``-inf`` so that its product with a probability of 0 is 0."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)
