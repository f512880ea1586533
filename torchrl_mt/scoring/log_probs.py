"""Log-probabilities of training rows under a language model.

A token's score depends only on the attended tokens before it: padding anywhere, and other rows of the
batch, padded or packed, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchrl.modules.llm import LLMWrapperBase, TransformersWrapper

from torchrl_mt.checks import check_mask
from torchrl_mt.devices import sent
from torchrl_mt.ranks import is_sharded
from torchrl_mt.scoring.distillation import (
    Distillation,
    TopTokens,
    log_probs_of,
    top_divergence,
)
from torchrl_mt.scoring.forward import scoring_mode
from torchrl_mt.scoring.linear_log_probs import linear_log_probs
from torchrl_mt.scoring.output_head import OutputStates, output_states, whole_logits
from torchrl_mt.scoring.packing import ForwardPass, put_back
from torchrl_mt.scoring.packing_check import passes_over
from torchrl_mt.scoring.passes import Passes
from torchrl_mt.scoring.row_vision import vision_model
from torchrl_mt.scoring.sharded_head import Scores, scores_inside
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
    return row_scores(
        actor, tokens, attention_mask, mask, full_logits=full_logits, images=images, passes=passes
    )[:2]


def row_scores(
    actor: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    full_logits: bool = False,
    images: RowImages | None = None,
    passes: Passes | None = None,
    distillation: Distillation | None = None,
    with_norms: bool = False,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute :func:`row_log_probs`, and two further scores or ``None``, all ``[N, S]`` on ``device``.

    These are the divergence from a teacher, and the squared norms of the log-probabilities' gradients by
    the logits (``norms`` of :func:`~torchrl_mt.scoring.linear_log_probs.linear_log_probs`).
    """
    model = causal_lm(actor)
    passes = Passes.checked(passes)
    top = None
    if distillation is not None:
        top = _top_tokens(distillation, tokens, attention_mask, mask, images, passes)
        full_logits |= is_sharded(model)
    scorer = _Scorer(model, passes, full_logits)
    places: list[Tensor] = []
    scores: list[list[Tensor]] = [[], [], [], []]
    for step in passes_over(model, tokens, attention_mask, mask, passes, images):
        places.append(step.place)
        norms: list[Tensor] | None = [] if with_norms else None
        found = scorer.run(step, norms)
        log_prob, entropy = scorer.score(step, found, norms)
        scores[0].append(log_prob)
        if entropy is not None:
            scores[1].append(entropy)
        if top is not None and distillation is not None:
            ids, teacher = top.at(step.place, log_prob.device)
            _, policy = scorer.score_several(step, found, ids)
            scores[2].append(top_divergence(policy, teacher, distillation.kind))
        if norms is not None:
            scores[3].append(torch.cat([log_prob.new_empty(0), *norms]))
    log_prob, *others = (put_back(each, places, tokens, device) for each in scores)
    asked = passes.with_entropy, top is not None, with_norms
    entropy, divergence, norm = (
        x if wanted else None for x, wanted in zip(others, asked, strict=True)
    )
    return log_prob, entropy, divergence, norm


def _top_tokens(
    distillation: Distillation,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    images: RowImages | None,
    passes: Passes,
) -> TopTokens:
    """Find the teacher's likeliest tokens at the sampled tokens of rows."""
    teacher = causal_lm(distillation.teacher)
    scorer = _Scorer(teacher, passes, full_logits=is_sharded(teacher))
    parts, places = [], []
    with scoring_mode(teacher):
        for step in passes_over(teacher, tokens, attention_mask, mask, passes, images):
            parts.append(scorer.score_several(step, scorer.run(step), distillation.top_k))
            places.append(step.place)
    place = torch.cat(places)
    line = place.new_zeros(tokens.numel())
    line[place] = torch.arange(len(place), device=place.device)
    ids, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
    return TopTokens(ids, log_probs, line)


_Found = OutputStates | Tensor | Scores
"""States, logits, or the scores of a model that is whole only inside its pass."""


@dataclass(frozen=True)
class _Scorer:
    """A model whose passes are scored."""

    model: nn.Module
    passes: Passes
    full_logits: bool

    def run(self, step: ForwardPass, norms: list[Tensor] | None = None) -> _Found:
        """Run a pass."""
        dtype = self.passes.dtype
        if self.full_logits:
            return whole_logits(self.model, step.inputs, dtype)
        if is_sharded(self.model):
            score = partial(self._score_states, step, norms=norms)
            return scores_inside(self.model, step.inputs, dtype, score)
        return output_states(self.model, step.inputs, dtype)

    def score(self, step: ForwardPass, found: _Found, norms: list[Tensor] | None = None) -> Scores:
        """Score the sampled tokens of a pass: ``[K]`` log-probabilities, and entropies if asked for."""
        if isinstance(found, tuple):
            return found
        if norms:
            norms.clear()  # Of states that were not those of the model's logits.
        if isinstance(found, OutputStates):
            return self._score_states(step, found, norms)
        logits, state = found.flatten(0, 1), sent(step.state, found.device)
        if self.passes.packed == "tree":  # Several tokens may follow one state.
            logits, state = logits[state], torch.arange(len(state), device=found.device)
        return log_probs_at(
            logits,
            state,
            sent(step.target, found.device),
            temperature=self.passes.temperature,
            with_entropy=self.passes.with_entropy,
            barred=self._barred(found.shape[-1]),
            norms=norms,
        )

    def _score_states(
        self, step: ForwardPass, states: OutputStates, norms: list[Tensor] | None
    ) -> Scores:
        hidden, passes = states.hidden.flatten(0, 1), self.passes
        return linear_log_probs(
            hidden[sent(step.state, hidden.device)],
            states.weight,
            sent(step.target, hidden.device),
            states.bias,
            scale=states.scale,
            softcap=states.softcap,
            temperature=passes.temperature,
            with_entropy=passes.with_entropy,
            dtype=passes.head_dtype or passes.dtype,
            barred=self._barred(len(states.weight)),
            norms=norms,
        )

    def score_several(
        self, step: ForwardPass, found: _Found, wanted: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Score several tokens at each sampled token's place, as :func:`log_probs_of` takes them."""
        assert not isinstance(found, tuple)
        hidden = found.hidden if isinstance(found, OutputStates) else found
        size = len(found.weight) if isinstance(found, OutputStates) else found.shape[-1]
        return log_probs_of(
            found,
            sent(step.state, hidden.device),
            wanted,
            temperature=self.passes.temperature,
            barred=self._barred(size),
            dtype=self.passes.head_dtype,
        )

    def _barred(self, size: int) -> list[int]:
        """Tokens below ``size`` that the model never samples."""
        vision = vision_model(self.model)
        return [] if vision is None else [token for token in vision.barred if token < size]
