"""Log-probabilities of training rows under a model that servers hold.

They are those of the same model here, at temperature 1: servers get each row's attended tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchrl_mt.scoring.distillation import check_same_tokens
from torchrl_mt.scoring.log_probs import causal_lm, scored_tokens
from torchrl_mt.threads import run_all


@runtime_checkable
class TokenScorer(Protocol):
    """What scores given tokens, such as :class:`~torchrl_mt.engines.CompletionsEngine`."""

    async def score(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute each token's log-probability after those before it, ``[n]`` for each sequence."""
        ...


def check_teacher(teacher: nn.Module | TokenScorer, actor: nn.Module, temperature: float) -> None:
    """Refuse what cannot score rows as a teacher, or has other tokens than the actor.

    Raises:
        TypeError: If ``teacher`` is neither a language model nor scores given tokens.
        ValueError: If its tokens are not the actor's, or it is a server's at another temperature than 1.
    """
    if isinstance(teacher, nn.Module):
        causal_lm(teacher)
    elif not isinstance(teacher, TokenScorer):
        raise TypeError(
            "teacher must be a causal language model, or an engine that scores given tokens, such as "
            f"CompletionsEngine; got {type(teacher).__name__}. If it has a model, give that."
        )
    elif temperature != 1:
        raise ValueError(
            "passes.temperature must be 1 with an engine as teacher, because servers score given tokens "
            f"at temperature 1 whatever they are asked; got {temperature}. Sample at temperature 1, or "
            "give the teacher's model."
        )
    check_same_tokens(actor, teacher)


def served_log_probs(
    teacher: TokenScorer, tokens: Tensor, attention_mask: Tensor, mask: Tensor
) -> Tensor:
    """Compute what :func:`~torchrl_mt.scoring.row_log_probs` does of the same rows.

    The teacher gets each row up to its last sampled token; rows without any are left out.

    Raises:
        ValueError: If the teacher does not return a log-probability for each token.
    """
    scored = scored_tokens(attention_mask, mask)
    sent = attention_mask & (scored.flip(-1).cumsum(-1).flip(-1) > 0)
    asked = [row[place].tolist() for row, place in zip(tokens, sent, strict=True) if place.any()]
    out = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    if asked:
        said = run_all([teacher.score(asked)])[0]
        sizes = [list(each.shape) for each in said]
        if sizes != [[len(each)] for each in asked]:
            raise ValueError(
                f"{type(teacher).__name__}.score must return one log-probability for each token, got "
                f"{sizes!r:.100} for sequences of {[len(each) for each in asked]!r:.100}."
            )
        out[sent] = torch.cat(said).to(out)
    return torch.where(scored, out, 0.0)
