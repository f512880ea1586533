"""The log-probabilities of a policy's answers: none leaves here that a plain forward pass contradicts.

Those of a policy that is known to report wrong numbers are computed by one plain forward pass. What
another policy reports is compared with such a pass when it is first used, and refused if it differs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules.llm import SGLangWrapper, TransformersWrapper, vLLMWrapper
from transformers import TopKLogitsWarper, TopPLogitsWarper

from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.packing import micro_batches

__all__ = ["LogProbError", "LogProbs", "agrees", "plain_log_probs"]

_TOLERANCE = 0.05
"""Nats. What differs from a plain pass by rounding alone stays below; twice that in half precision."""
_CERTAIN = 1e-6
"""Nats. Closer to 0 than this, rounding alone makes a log-probability 0."""
_WORST = 5.0
"""How many times the tolerance a single number may be off."""
_ROWS = 256
"""How many distributions are truncated at once."""
_PLAIN = Sampling()


class LogProbError(RuntimeError):
    """A policy's log-probabilities are not those of its model."""


def reports_wrong(policy: Any, law: Sampling) -> bool:
    """Whether a policy is known to report other log-probabilities than those of what it sampled from."""
    # TorchRL's wrapper reports 0.0 for the first token of every answer.
    if isinstance(policy, TransformersWrapper):
        return True
    # Unless they are started otherwise, both report those before temperature and truncation.
    return isinstance(policy, (vLLMWrapper, SGLangWrapper)) and law != _PLAIN


class LogProbs:
    """Give answers the log-probabilities of what they were sampled from.

    Args:
        policy: what samples; :func:`reports_wrong` says whether its numbers are of use.
        model: what the answers are said to be sampled from, in the mode that it samples in; ``None``
            if it is out of reach.
        check: compare or compute; otherwise what is reported passes as it is.
        tolerance: as in :func:`agrees`; by the model's precision if ``None``.
        max_tokens: most tokens of one forward pass, padding included.
    """

    def __init__(
        self,
        policy: Any,
        model: nn.Module | None,
        *,
        check: bool,
        tolerance: float | None,
        max_tokens: int,
    ) -> None:
        self._policy = policy
        self._model = model
        self._check = check
        self._max_tokens = max_tokens
        self._trusted = not check
        if tolerance is None:
            parameter = None if model is None else next(model.parameters(), None)
            half = parameter is not None and parameter.dtype.itemsize < 4
            tolerance = 2 * _TOLERANCE if half else _TOLERANCE
        self._tolerance = tolerance

    def compare_again(self) -> None:
        """Compare the next answers, as at first."""
        self._trusted = not self._check

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        reported: Sequence[list[float] | None],
        law: Sampling = _PLAIN,
    ) -> list[list[float]]:
        """Find the log-probabilities of a batch's answers.

        Args:
            prompts: at least one token each.
            answers: the sampled tokens.
            reported: what the policy reports for each answer, if it does.
            law: what they were sampled with.

        Raises:
            LogProbError: if what is reported is wrong, or there is no model to compare or compute with.
        """
        given = [row for row in reported if row is not None]
        complete = len(given) == len(reported)
        if complete and self._trusted:
            return given
        if law.temperature == 0:
            return [[0.0] * len(answer) for answer in answers]  # the likeliest token is certain
        if self._model is None:
            raise LogProbError(
                f"the policy reports {_shown(given[0]) if given else 'no log-probabilities'}, and there "
                "is no model to check them with (policy.model is no nn.Module): pass model=, a model "
                "with the same weights, or check=False if nothing is trained on the answers."
            )
        plain = plain_log_probs(self._model, prompts, answers, law=law, max_tokens=self._max_tokens)
        if not complete or reports_wrong(self._policy, law):
            return plain
        if not agrees(_flat(given), _flat(plain), self._tolerance):
            raise LogProbError(
                f"the policy's log-probabilities are not its model's: {_describe(given, plain)} with "
                f"{law.record() or 'plain sampling'}. Does it sample with other weights, or in another "
                "way? If the difference is rounding, raise tolerance "
                f"({self._tolerance}); with check=False they are handed on as they are."
            )
        # Where all answers begin with 0, that may stand for "none" with a model that is sure of them.
        self._trusted = any(row[0] != 0 for row in given)
        return given


def plain_log_probs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    law: Sampling = _PLAIN,
    max_tokens: int,
) -> list[list[float]]:
    """Score answers with plain forward passes, without gradients.

    Args:
        model: a causal language model, in the mode that it samples in.
        prompts: at least one token each.
        answers: the sampled tokens.
        law: what they were sampled with, at a temperature above 0.
        max_tokens: most tokens of one forward pass, padding included.

    Returns:
        A log-probability for every sampled token, after temperature and truncation. A sampled token
        counts as one that truncation left, whatever rounding makes of it.
    """
    if law.top_k or law.top_p < 1:
        model, law = _Truncated(model, law), _PLAIN
    rows = [
        torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(row) for row in rows])
    scores: list[list[float]] = [[] for _ in rows]
    for batch in micro_batches(lengths, max_tokens=max_tokens):
        tokens = nn.utils.rnn.pad_sequence([rows[i] for i in batch], batch_first=True)
        position = torch.arange(tokens.shape[1])
        attended = position < lengths[batch, None]
        sampled = attended & (position >= starts[batch, None])
        with torch.no_grad():
            log_probs, _ = row_log_probs(
                model, tokens, attended, sampled, temperature=law.temperature
            )
        for i, row, mask in zip(batch.tolist(), log_probs, sampled, strict=True):
            scores[i] = row[mask].tolist()
    return scores


class _Truncated(nn.Module):
    """A model whose logits are those that are sampled from; the token that follows is left in."""

    def __init__(self, model: nn.Module, law: Sampling) -> None:
        super().__init__()
        self.model = model
        self.law = law

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits ``[N, L, V]``."""
        accepted = inspect.signature(self.model.forward).parameters
        options = {"use_cache": False} if "use_cache" in accepted else {}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        following = input_ids.roll(-1, 1).reshape(-1, 1)
        rows = logits.reshape(-1, logits.shape[-1]).float() / self.law.temperature
        for scores, token in zip(rows.split(_ROWS), following.split(_ROWS), strict=True):
            kept = scores
            if self.law.top_k:
                kept = TopKLogitsWarper(self.law.top_k)(input_ids, kept)
            if self.law.top_p < 1:
                kept = TopPLogitsWarper(self.law.top_p)(input_ids, kept)
            scores.copy_(kept.scatter(1, token, scores.gather(1, token)))
        return rows.view(logits.shape)


def agrees(reported: Tensor, plain: Tensor, tolerance: float) -> bool:
    """Whether reported log-probabilities are the plain ones, up to rounding.

    Args:
        reported: ``[n]`` float.
        plain: ``[n]`` float, from a plain forward pass.
        tolerance: largest mean absolute difference, in nats; a single one may be five times that.

    A number that is exactly 0 does not agree with one that is not: it stands for "none".

    Examples:
        >>> plain = torch.tensor([-1.0, -2.0, -3.0])
        >>> agrees(plain + 0.001, plain, 0.05), agrees(torch.tensor([0.0, -2.0, -3.0]), plain, 0.05)
        (True, False)
    """
    off = (reported - plain).abs()
    if ((reported == 0) & (plain < -_CERTAIN)).any():
        return False
    # Written so that a NaN, which compares false with everything, does not agree.
    return bool((off <= _WORST * tolerance).all() and off.mean() <= tolerance)


def _describe(reported: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> str:
    """The numbers side by side, for a message: the beginning of the answer that is off the most."""
    worst = max(
        range(len(reported)),
        key=lambda i: max(
            (math.inf if math.isnan(a) else abs(a - b))
            for a, b in zip(reported[i], plain[i], strict=True)
        ),
    )
    return f"reported {_shown(reported[worst])}, a plain forward pass gives {_shown(plain[worst])}"


def _shown(log_probs: Sequence[float]) -> str:
    """The first numbers, for a message."""
    ellipsis = ", ..." if len(log_probs) > 6 else ""
    return f"[{', '.join(f'{value:.3f}' for value in log_probs[:6])}{ellipsis}]"


def _flat(log_probs: Sequence[Sequence[float]]) -> Tensor:
    """All numbers in one tensor."""
    return torch.tensor(list(chain.from_iterable(log_probs)), dtype=torch.float64)
