"""Divergence of a policy from a teacher at the sampled tokens of rows, over the teacher's top tokens.

Teacher and policy are compared on the teacher's ``k`` likeliest tokens and on all others together, which
never exceeds their divergence over the whole vocabulary, and is 0 where they agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_mt.checks import check_choice, check_finite, check_positive_integer
from torchrl_mt.devices import sent
from torchrl_mt.scoring.forward import text_config
from torchrl_mt.scoring.output_head import OutputStates
from torchrl_mt.scoring.token_log_probs import bar, chunks, wide

DivergenceKind = Literal["reverse", "forward", "jsd"]
"""KL from policy to teacher, KL from teacher to policy, and the Jensen-Shannon divergence."""

CHUNK_ELEMENTS = 1 << 23
"""Logits (tokens times vocabulary) per chunk."""
_PADDING = 1024
"""Rows by which output layers of one tokenizer may differ, as they are padded."""
_SMALLEST = 1e-7
"""Least probability of all other tokens together, so that its logarithm is finite."""


@dataclass(frozen=True)
class Distillation:
    """A teacher, and how a policy is drawn to it.

    Args:
        teacher: A causal language model of the policy's tokenizer, in evaluation mode and on its own
            device. The loss computes it without gradient, and does not train, move or save it.
        kind: ``"reverse"``: KL of the policy to the teacher, as on-policy distillation has it
            (https://arxiv.org/abs/2306.08543); ``"forward"``: KL of the teacher to the policy;
            ``"jsd"``: the mean of both to their mean (https://arxiv.org/abs/2306.13649, beta 0.5).
        coef: Weight of the loss.
        top_k: Number of the teacher's tokens to compare.

    Raises:
        ValueError: If ``kind`` is unknown or ``top_k`` below 1.
        TypeError: If ``teacher`` is no module or a number is none.
    """

    teacher: nn.Module
    kind: DivergenceKind = "reverse"
    coef: float = 1.0
    top_k: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.teacher, nn.Module):
            raise TypeError(
                "teacher must be a causal language model, whose whole distributions the loss compares, "
                f"got {type(self.teacher).__name__}. An engine can teach as an advantage: "
                "ExperienceMaker(teacher=engine, advantage='distill')."
            )
        check_choice("kind", self.kind, get_args(DivergenceKind))
        check_finite("coef", self.coef)
        check_positive_integer("top_k", self.top_k)


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest tokens at the scored tokens of rows."""

    ids: Tensor
    """``[M, k]`` int64."""
    log_probs: Tensor
    """``[M, k]`` float32."""
    line: Tensor
    """``[N * S]`` int64, the line of each scored token."""

    def at(self, place: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities at some places ``[K]``, each ``[K, k]``."""
        line = sent(self.line[place], self.ids.device)
        return self.ids[line].to(device), self.log_probs[line].to(device)


def check_same_tokens(actor: nn.Module, teacher: Any) -> None:
    """Refuse a teacher, a model or an engine, whose tokens are not the actor's.

    Sizes of vocabularies are compared, and what tokenizers say where both have one.

    Raises:
        ValueError: If they differ.
    """
    names = type(teacher).__name__, type(actor).__name__
    mine, theirs = (getattr(model, "tokenizer", None) for model in (actor, teacher))
    if mine is not None and theirs is not None and mine.get_vocab() != theirs.get_vocab():
        raise ValueError(
            f"teacher must have the actor's tokenizer, got a {names[0]} with another than the "
            f"{names[1]}'s."
        )
    own, other = (
        getattr(text_config(getattr(model, "model", model)), "vocab_size", None)
        for model in (actor, teacher)
    )
    if own and other and abs(own - other) > _PADDING:
        raise ValueError(
            f"teacher must have the actor's tokenizer, got a {names[0]} with {other:,} tokens for a "
            f"{names[1]} with {own:,}."
        )


def log_probs_of(
    found: OutputStates | Tensor,
    state: Tensor,
    wanted: Tensor | int,
    *,
    temperature: float,
    barred: Sequence[int],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of several tokens after each state, in chunks that backward computes again.

    Args:
        found: States, or logits ``[B, L, V]``.
        state: ``[K]`` int64 positions in ``[B * L]``.
        wanted: ``[K, k]`` int64 tokens; or ``k``, for the likeliest.
        temperature: Divisor of the logits.
        barred: Tokens of the vocabulary that have probability 0.
        dtype: Type of the output layer's products; that of the states by default.

    Returns:
        Tokens ``[K, k]`` int64 and their log-probabilities ``[K, k]`` float32.
    """
    head = found if isinstance(found, OutputStates) else None
    rows = (found.hidden if isinstance(found, OutputStates) else found).flatten(0, 1)[state]
    size = rows.shape[-1] if head is None else len(head.weight)

    def score(rows: Tensor, wanted: Tensor | int) -> tuple[Tensor, Tensor]:
        logits = rows if head is None else head.logits(rows.to(dtype or rows.dtype))
        logits = logits.to(wide(logits.dtype)) / temperature
        log_probs = bar(logits, barred).log_softmax(-1)
        if isinstance(wanted, int):
            values, ids = log_probs.topk(min(wanted, size))
            return ids, values
        # Output layers may be padded to other sizes.
        known = wanted < size
        values = log_probs.gather(-1, torch.where(known, wanted, 0))
        return wanted, torch.where(known, values, math.log(_SMALLEST))

    out = [
        checkpoint(
            score,
            rows[part],
            wanted if isinstance(wanted, int) else wanted[part],
            use_reentrant=False,
        )
        for part in chunks(len(state), size, CHUNK_ELEMENTS)
    ]
    if not out:
        k = min(wanted, size) if isinstance(wanted, int) else wanted.shape[-1]
        return state.new_zeros(0, k), rows.new_zeros(0, k).float()
    return torch.cat([token for token, _ in out]), torch.cat([value for _, value in out]).float()


def top_divergence(policy: Tensor, teacher: Tensor, kind: DivergenceKind) -> Tensor:
    """Divergence over some tokens and all others together.

    Args:
        policy: ``[K, k]`` floating, log-probabilities of the teacher's top tokens under the policy.
        teacher: ``[K, k]`` floating, the same under the teacher.
        kind: See :class:`Distillation`.

    Returns:
        ``[K]``, 0 or more up to rounding.

    Examples:
        >>> halves = torch.tensor([[0.5, 0.5]]).log()
        >>> top_divergence(torch.tensor([[0.25, 0.75]]).log(), halves, "forward")
        tensor([0.1438])
    """
    p, q = _with_rest(policy), _with_rest(teacher)
    if kind == "reverse":
        return _kl(p, q)
    if kind == "forward":
        return _kl(q, p)
    mean = torch.logaddexp(p, q) - torch.log(p.new_tensor(2.0))
    return (_kl(q, mean) + _kl(p, mean)) / 2


def _with_rest(log_probs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: ``[K, k + 1]``."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST).log()
    return torch.cat([log_probs, rest], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
