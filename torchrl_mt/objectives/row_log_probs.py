"""Log-probabilities of training rows under a language model, wherever their padding lies.

The score of a token is conditioned on the attended tokens before it and on nothing else: padding
before, after or between them, and its amount, change nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper

from torchrl_mt.objectives.functional._checks import check_mask
from torchrl_mt.objectives.functional.log_probs import log_probs_and_entropy, token_log_probs


def causal_lm(actor: nn.Module) -> nn.Module:
    """Find the language model in an actor.

    Args:
        actor: A causal language model that is called with ``input_ids`` and ``attention_mask`` and
            returns logits ``[N, L, V]`` or an object that has them as ``logits``; or TorchRL's
            ``TransformersWrapper`` around one.

    Returns:
        The language model itself, not a copy.

    Raises:
        TypeError: If ``actor`` is another kind of policy.
    """
    if isinstance(actor, TransformersWrapper) and isinstance(actor.model, nn.Module):
        return actor.model
    if isinstance(actor, LLMWrapperBase) or not isinstance(actor, nn.Module):
        raise TypeError(
            "actor must be a causal language model (nn.Module called with input_ids and "
            f"attention_mask) or a TransformersWrapper around one, got {type(actor).__name__}."
        )
    return actor


def scored_tokens(attention_mask: Tensor, mask: Tensor) -> Tensor:
    """Find the sampled tokens that have a score: all but the first of a row, which nothing predicts.

    Args:
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens.

    Returns:
        ``[N, S]`` bool.

    Raises:
        ValueError: If shapes differ.
        TypeError: If a mask is not boolean.

    Examples:
        >>> mask = torch.tensor([[False, True, True]])
        >>> scored_tokens(mask, mask)
        tensor([[False, False,  True]])
    """
    check_mask("attention_mask", attention_mask, attention_mask.shape)
    check_mask("mask", mask, attention_mask.shape)
    return mask & (attention_mask.cumsum(-1) > 1)


def row_log_probs(
    actor: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Score the sampled tokens of rows.

    Args:
        actor: See :func:`causal_lm`.
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens: the ones to score.
        temperature: What the logits are divided by, in float32.
        with_entropy: Whether to compute the entropy at the sampled tokens as well.

    Returns:
        Log-probabilities, and entropies or ``None``: ``[N, S]`` float32 on the device of ``tokens``,
        zero on masked tokens and on the first token of a row, which nothing predicts.

    Raises:
        ValueError: If shapes differ, a sampled token lies on padding or ``temperature`` is not
            positive.
        TypeError: If a mask is not boolean or ``actor`` is no language model.
    """
    model = causal_lm(actor)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have shape [N, S], got {tuple(tokens.shape)}.")
    check_mask("attention_mask", attention_mask, tokens.shape)
    check_mask("mask", mask, tokens.shape)
    if bool((mask & ~attention_mask).any()):
        raise ValueError("mask must be false on padding, but some sampled tokens are not attended.")
    if not tokens.numel():
        empty = torch.zeros(tokens.shape, device=tokens.device)
        return empty, empty if with_entropy else None
    parameter = next(model.parameters(), None)
    device = tokens.device if parameter is None else parameter.device

    length = attention_mask.sum(-1, keepdim=True)
    width = max(1, int(length.max()))
    # Attended tokens move to the left, in order; padding goes to one spare column.
    column = torch.where(attention_mask, attention_mask.cumsum(-1) - 1, width)
    blank = tokens.new_zeros(tokens.shape[0], width + 1)
    packed = blank.scatter(1, column, tokens).to(device)
    sampled = blank.bool().scatter(1, column, mask).to(device)
    # A row of padding alone attends to one dummy token: attention over nothing is not a number.
    attended = torch.arange(width, device=tokens.device) < length.clamp(min=1)

    logits = _forward(model, packed[:, :width], attended.long().to(device))
    score = log_probs_and_entropy if with_entropy else _log_probs_only
    scores = score(logits, packed[:, 1:], sampled[:, 1:], temperature=temperature)
    log_prob, entropy = (
        None if x is None else nn.functional.pad(x.to(tokens.device), (1, 0)).gather(1, column)
        for x in scores
    )
    assert log_prob is not None
    return log_prob, entropy


def _log_probs_only(
    logits: Tensor, tokens: Tensor, mask: Tensor, *, temperature: float
) -> tuple[Tensor, None]:
    """Leave the entropy out."""
    return token_log_probs(logits, tokens, mask, temperature=temperature), None


def _forward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Call the model without a cache, which training rows never use."""
    accepted = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in accepted else {}
    output = model(input_ids=input_ids, attention_mask=attention_mask, **options)
    return output if isinstance(output, Tensor) else output.logits


@contextmanager
def scoring_mode(*models: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; give back every submodule's mode and the random state as they were.

    Args:
        *models: The models that are used inside.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    devices = {p.device.index for m in models for p in m.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def micro_batches(
    lengths: Tensor, max_rows: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Cut rows into batches of similar length.

    Args:
        lengths: ``[N]`` int64 tokens of each row.
        max_rows: Most rows of a batch; no limit by default.
        max_tokens: Most tokens of a batch, padding included; no limit by default. A longer row is a
            batch of its own.

    Returns:
        Row indices of each batch, int64, longest rows first; together they are all rows, once.

    Examples:
        >>> micro_batches(torch.tensor([2, 9, 3]), max_tokens=8)
        [tensor([1]), tensor([2, 0])]
    """
    count = len(lengths)
    if max_tokens is None:
        order = torch.arange(count) if max_rows is None else lengths.cpu().argsort(descending=True)
        return list(order.split(max_rows or max(1, count)))
    order = lengths.cpu().argsort(descending=True)
    batches, start = [], 0
    while start < count:
        longest = max(1, int(lengths[order[start]]))
        size = max(1, max_tokens // longest)
        size = size if max_rows is None else min(size, max_rows)
        batches.append(order[start : start + size])
        start += size
    return batches
