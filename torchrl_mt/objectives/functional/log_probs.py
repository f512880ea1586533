"""Log-probability and entropy of tokens from logits, in float32 and in bounded memory.

No float32 copy of the logits outlives a chunk: the backward pass recomputes it from the logits, so
the peak above the logits and their gradient is one chunk whatever the batch and the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchrl_mt.objectives.functional._checks import check_mask, check_positive, check_shape

CHUNK_ELEMENTS = 1 << 24
"""Logits (tokens times vocabulary) in float32 at any one time."""


def token_log_probs(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Log-probability of each token under the logits at its position.

    Args:
        logits: ``[..., V]`` floating, aligned: those at a position predict the token at it.
        tokens: ``[...]`` int64; not read where masked.
        mask: ``[...]`` bool: which positions to compute. All by default.
        temperature: What the logits are divided by, in float32.

    Returns:
        ``[...]`` float32, zero where masked.

    Raises:
        ValueError: If shapes differ or ``temperature`` is not positive.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[0, 3]])).exp()
        tensor([[0.2500, 0.2500]])
    """
    return _apply(logits, tokens, mask, temperature, with_entropy=False)[0]


def token_entropy(
    logits: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """Entropy, in nats, of the distribution at each position.

    Args:
        logits: ``[..., V]`` floating; ``-inf`` for impossible tokens.
        mask: ``[...]`` bool: which positions to compute. All by default.
        temperature: What the logits are divided by, in float32.

    Returns:
        ``[...]`` float32, zero where masked.

    Raises:
        ValueError: If shapes differ or ``temperature`` is not positive.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> token_entropy(torch.zeros(1, 2, 4)).exp()
        tensor([[4., 4.]])
    """
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _apply(logits, tokens, mask, temperature, with_entropy=True)[1]


def log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:func:`token_log_probs` and :func:`token_entropy` from one softmax.

    Args:
        logits: ``[..., V]`` floating, aligned with ``tokens``.
        tokens: ``[...]`` int64; not read where masked.
        mask: ``[...]`` bool: which positions to compute. All by default.
        temperature: What the logits are divided by, in float32.

    Returns:
        Log-probabilities and entropies, ``[...]`` float32, zero where masked.

    Raises:
        ValueError: If shapes differ or ``temperature`` is not positive.
        TypeError: If ``mask`` is not boolean.

    Examples:
        >>> log_prob, entropy = log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([2]))
        >>> log_prob == -entropy
        tensor([True])
    """
    return _apply(logits, tokens, mask, temperature, with_entropy=True)


def _apply(
    logits: Tensor, tokens: Tensor, mask: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Check the arguments, compute at the unmasked positions, put the results in place."""
    shape = logits.shape[:-1]
    check_shape("tokens", tokens, shape)
    check_positive("temperature", temperature)
    flat, target = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    if mask is None:
        log_prob, entropy = _LogProbs.apply(flat, target, None, temperature, with_entropy)
        return log_prob.view(shape), entropy.view(shape if with_entropy else -1)
    check_mask("mask", mask, shape)
    position = mask.reshape(-1).nonzero().squeeze(-1)
    log_prob, entropy = _LogProbs.apply(flat, target[position], position, temperature, with_entropy)
    zeros = torch.zeros(flat.shape[0], dtype=torch.float32, device=logits.device)
    log_prob = zeros.index_copy(0, position, log_prob).view(shape)
    if with_entropy:
        entropy = zeros.index_copy(0, position, entropy).view(shape)
    return log_prob, entropy


class _LogProbs(torch.autograd.Function):
    """Log-probabilities (and entropies) of ``K`` targets at ``K`` of the ``T`` rows of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        position: Tensor | None,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        size = target.shape[0]
        log_prob = logits.new_empty(size, dtype=torch.float32)
        log_sum = torch.empty_like(log_prob)
        entropy = torch.empty_like(log_prob) if with_entropy else log_prob.new_empty(0)
        for part in _chunks(size, logits.shape[-1]):
            x = _select(logits, position, part, temperature)
            log_sum[part] = x.logsumexp(-1)
            log_prob[part] = x.gather(-1, target[part, None]).squeeze(-1) - log_sum[part]
            if with_entropy:
                x = x - log_sum[part, None]
                entropy[part] = -_finite(x).mul(x.exp()).sum(-1)
        ctx.save_for_backward(logits, target, position, log_sum, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits, target, position, log_sum, entropy = ctx.saved_tensors
        if not ctx.needs_input_grad[0] or (grad_log_prob is None and grad_entropy is None):
            return None, None, None, None, None
        grad = torch.empty_like(logits) if position is None else torch.zeros_like(logits)
        for part in _chunks(target.shape[0], logits.shape[-1]):
            log_p = _select(logits, position, part, ctx.temperature) - log_sum[part, None]
            p = log_p.exp()
            out = torch.zeros_like(p)
            if grad_entropy is not None and ctx.with_entropy:
                # dH/dx = -p (log p + H)
                out -= grad_entropy[part, None] * p * (_finite(log_p) + entropy[part, None])
            if grad_log_prob is not None:
                # d log p[y] / dx = onehot(y) - p
                out -= grad_log_prob[part, None] * p
                out.scatter_add_(-1, target[part, None], grad_log_prob[part, None])
            if ctx.temperature != 1.0:
                out /= ctx.temperature
            if position is None:
                grad[part] = out.to(grad.dtype)
            else:
                grad[position[part]] = out.to(grad.dtype)
        return grad, None, None, None, None


def _chunks(size: int, vocabulary: int) -> list[slice]:
    """Cut ``size`` positions so that one part's logits fit the budget."""
    step = max(1, CHUNK_ELEMENTS // max(1, vocabulary))
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _select(logits: Tensor, position: Tensor | None, part: slice, temperature: float) -> Tensor:
    """Float32 logits of one part, divided by the temperature."""
    x = (logits[part] if position is None else logits[position[part]]).float()
    return x if temperature == 1.0 else x / temperature


def _finite(log_p: Tensor) -> Tensor:
    """Replace ``-inf``, whose product with a probability of 0 must be 0."""
    return log_p.clamp(min=torch.finfo(log_p.dtype).min)
