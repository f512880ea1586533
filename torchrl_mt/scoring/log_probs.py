"""Log-probabilities of training rows under a language model.

A token's score depends only on the attended tokens before it: padding anywhere, and other rows of the
batch, padded or packed, change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper

from torchrl_mt.checks import check_mask
from torchrl_mt.ranks import is_sharded
from torchrl_mt.scoring.linear_log_probs import linear_log_probs
from torchrl_mt.scoring.output_head import OutputStates, output_states, whole_logits
from torchrl_mt.scoring.packing import ForwardPass, put_back
from torchrl_mt.scoring.packing_check import passes_over
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_vision import vision_model
from torchrl_mt.scoring.sharded_head import scores_inside
from torchrl_mt.scoring.token_log_probs import log_probs_at
from torchrl_mt.vision import RowImages


def causal_lm(actor: nn.Module) -> nn.Module:
    """Return the language model inside an actor, without copying.

    Args:
        actor: A causal language model, called with ``input_ids`` and ``attention_mask``, that returns
            logits ``[N, L, V]`` or an object with ``logits``; or a ``TransformersWrapper`` around one.

    Raises:
        TypeError: If ``actor`` is neither.
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
    """Select the sampled tokens that are not the first of their row, which nothing predicts.

    Examples:
        >>> import torch
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
    full_logits: bool = False,
    images: RowImages | None = None,
    passes: Passes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probabilities of the sampled tokens of rows.

    Logits are computed in chunks and for sampled tokens only
    (:func:`~torchrl_mt.scoring.linear_log_probs.linear_log_probs`) if the model's output layer allows
    it (:func:`~torchrl_mt.scoring.output_head.output_states`). A model that bounds its logits by other
    means than soft-capping needs ``full_logits``.

    Tokens that stand for images or videos in a vision-language model's prompts are never sampled: the
    distribution is the one without them.

    Args:
        actor: See :func:`causal_lm`.
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding.
        mask: ``[N, S]`` bool, true on sampled tokens: the ones to score.
        full_logits: Compute all logits of a pass at once, as the model itself does.
        images: The rows' images, ``RowImages.of(rows)``; none by default.
        passes: How rows are cut into forward passes, the temperature, and whether the entropy at the
            sampled tokens is computed as well.

    Returns:
        Log-probabilities, and entropies or ``None``: ``[N, S]`` float32 on the device of ``tokens``,
        zero on masked tokens and on a row's first token, which nothing predicts.

    Raises:
        ValueError: If shapes differ, a sampled token is padding, a number is out of range, the model
            does not support packing, or its logits are not one distribution per token; if a row's
            image tokens do not fit its images, or an image token is sampled.
        TypeError: If a mask is not boolean, ``actor`` is no language model, it returns no logits or
            takes no ``images``.
    """
    model = causal_lm(actor)
    passes = Passes.checked(passes)
    vision = vision_model(model)
    barred = () if vision is None else vision.barred
    places, scores = [], []
    for step in passes_over(model, tokens, attention_mask, mask, passes, images):
        places.append(step.place)
        scores.append(_score(model, step, passes, full_logits, barred))
    log_prob = put_back([x for x, _ in scores], places, tokens)
    if not passes.with_entropy:
        return log_prob, None
    return log_prob, put_back([x for _, x in scores if x is not None], places, tokens)


def _score(
    model: nn.Module,
    step: ForwardPass,
    passes: Passes,
    full_logits: bool,
    barred: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    def score(states: OutputStates) -> tuple[Tensor, Tensor | None]:
        hidden = states.hidden.flatten(0, 1)
        return linear_log_probs(
            hidden[step.state.to(hidden.device)],
            states.weight,
            step.target.to(hidden.device),
            states.bias,
            scale=states.scale,
            softcap=states.softcap,
            temperature=passes.temperature,
            with_entropy=passes.with_entropy,
            dtype=passes.dtype,
            barred=[token for token in barred if token < len(states.weight)],
        )

    if full_logits:
        found: Any = whole_logits(model, step.inputs, passes.dtype)
    elif is_sharded(model):
        found = scores_inside(model, step.inputs, passes.dtype, score)
    else:
        found = output_states(model, step.inputs, passes.dtype)
    if isinstance(found, OutputStates):
        return score(found)
    if isinstance(found, tuple):
        return found
    logits, state = found.flatten(0, 1), step.state.to(found.device)
    if passes.packed == "tree":  # Several tokens may follow one state.
        logits, state = logits[state], torch.arange(len(state), device=found.device)
    return log_probs_at(
        logits,
        state,
        step.target.to(found.device),
        temperature=passes.temperature,
        with_entropy=passes.with_entropy,
        barred=[token for token in barred if token < found.shape[-1]],
    )
