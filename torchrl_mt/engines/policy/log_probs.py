"""Log-probabilities of a policy's responses, consistent with a plain forward pass of its model.

For policies known to report wrong numbers, a plain forward pass computes them. What other policies
report is compared with such a pass at first use, and refused if it differs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrl.modules.llm import SGLangWrapper, TransformersWrapper, vLLMWrapper
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.packing import micro_batches
from torchrl_mt.scoring.passes import Passes

__all__ = ["LogProbError", "LogProbs", "agrees", "plain_log_probs"]

_TOLERANCE = 0.05
"""Mean difference that rounding may cause, in nats; twice that in half precision."""
_CERTAIN = 1e-6
"""Nats. Rounding may turn a log-probability closer to 0 than this into 0."""
_WORST = 5.0
"""How many times the tolerance a single number may differ by."""
_ROWS = 256
"""Number of distributions that are truncated at once."""
_PLAIN = Sampling()


class LogProbError(RuntimeError):
    """A policy's log-probabilities are not those of its model."""


def reports_wrong(policy: Any, params: Sampling) -> bool:
    """Whether a policy is known to report log-probabilities of another distribution."""
    # TorchRL's wrapper reports 0.0 for the first token of every response.
    if isinstance(policy, TransformersWrapper):
        return True
    # By default, both report log-probabilities before temperature and truncation.
    return isinstance(policy, (vLLMWrapper, SGLangWrapper)) and params != _PLAIN


class LogProbs:
    """Checks or computes the log-probabilities of a policy's responses.

    Args:
        policy: the policy that samples.
        model: the policy's model, in evaluation mode; ``None`` if it is out of reach.
        check: compare or compute log-probabilities; if false, reported ones pass unchecked.
        tolerance: as in :func:`agrees`; if ``None``, by the model's precision.
        max_tokens: maximum number of tokens in a forward pass, including padding.
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
        """Compare the next responses with a forward pass again."""
        self._trusted = not self._check

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        reported: Sequence[list[float] | None],
        params: Sampling,
    ) -> list[list[float]]:
        """Get the log-probabilities of a batch's responses.

        Args:
            prompts: at least one token each.
            answers: the sampled tokens.
            reported: log-probabilities that the policy reports for each response, or ``None``.
            params: sampling parameters of all responses.

        Raises:
            LogProbError: if reported numbers are wrong, or there is no model to compare or compute with.
        """
        given = [row for row in reported if row is not None]
        complete = len(given) == len(reported)
        if complete and self._trusted:
            return given
        if params.temperature == 0:
            return [[0.0] * len(answer) for answer in answers]  # the likeliest token is certain
        if self._model is None:
            raise LogProbError(
                f"the policy reports {_shown(given[0]) if given else 'no log-probabilities'}, and there "
                "is no model to check them with (policy.model is no nn.Module): pass model=, a model "
                "with the same weights, or check=False if nothing is trained on the responses."
            )
        plain = plain_log_probs(
            self._model, prompts, answers, params=params, max_tokens=self._max_tokens
        )
        if not complete or reports_wrong(self._policy, params):
            return plain
        if not agrees(_flat(given), _flat(plain), self._tolerance):
            raise LogProbError(
                f"the policy's log-probabilities are not its model's: {_describe(given, plain)} with "
                f"{params.record() or 'plain sampling'}. Does it sample with other weights, or in "
                "another way? If the difference is rounding, raise tolerance "
                f"({self._tolerance}); with check=False they are handed on as they are."
            )
        # A first 0 may mean "not reported", which agrees with a model that is certain of that token.
        self._trusted = any(row[0] != 0 for row in given)
        return given


def plain_log_probs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    params: Sampling,
    max_tokens: int,
) -> list[list[float]]:
    """Score responses with plain forward passes, without gradients.

    Args:
        model: causal language model in evaluation mode.
        prompts: at least one token each.
        answers: the sampled tokens.
        params: sampling parameters of all responses, with a temperature above 0.
        max_tokens: maximum number of tokens in a forward pass, including padding.

    Returns:
        The log-probability of every sampled token, after temperature and truncation. Truncation always
        keeps the sampled token, even if rounding would remove it.
    """
    if params.top_k or params.top_p < 1 or params.min_p:
        model, params = _Truncated(model, params), _PLAIN
    rows = [
        torch.tensor([*prompt, *answer], device="cpu")
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    starts = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    scores: list[list[float]] = [[] for _ in rows]
    for batch in micro_batches(lengths, max_tokens=max_tokens):
        tokens = nn.utils.rnn.pad_sequence([rows[i] for i in batch], batch_first=True)
        position = torch.arange(tokens.shape[1], device="cpu")
        attended = position < lengths[batch, None]
        sampled = attended & (position >= starts[batch, None])
        with torch.no_grad():
            log_probs, _ = row_log_probs(
                model, tokens, attended, sampled, passes=Passes(temperature=params.temperature)
            )
        for i, row, mask in zip(batch.tolist(), log_probs, sampled, strict=True):
            scores[i] = row[mask].tolist()
    return scores


class _Truncated(nn.Module):
    """Applies temperature and truncation to a model's logits; keeps each next token of the input."""

    def __init__(self, model: nn.Module, params: Sampling) -> None:
        super().__init__()
        self.model = model
        self.params = params

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits ``[N, L, V]``."""
        accepted = inspect.signature(self.model.forward).parameters
        options = {"use_cache": False} if "use_cache" in accepted else {}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        following = input_ids.roll(-1, 1).reshape(-1, 1)
        rows = logits.reshape(-1, logits.shape[-1]).float() / self.params.temperature
        for scores, token in zip(rows.split(_ROWS), following.split(_ROWS), strict=True):
            kept = scores
            if self.params.top_k:
                kept = TopKLogitsWarper(self.params.top_k)(input_ids, kept)
            if self.params.top_p < 1:
                kept = TopPLogitsWarper(self.params.top_p)(input_ids, kept)
            if self.params.min_p:
                kept = MinPLogitsWarper(self.params.min_p)(cast(Any, input_ids), kept)
            scores.copy_(kept.scatter(1, token, scores.gather(1, token)))
        return rows.view(logits.shape)


def agrees(reported: Tensor, plain: Tensor, tolerance: float) -> bool:
    """Whether reported log-probabilities equal those of a plain forward pass, up to rounding.

    A reported 0 means "not reported" and agrees only with 0.

    Args:
        reported: ``[n]`` float.
        plain: ``[n]`` float, from a plain forward pass.
        tolerance: largest mean absolute difference in nats; five times as much for a single number.

    Examples:
        >>> plain = torch.tensor([-1.0, -2.0, -3.0])
        >>> agrees(plain + 0.001, plain, 0.05), agrees(torch.tensor([0.0, -2.0, -3.0]), plain, 0.05)
        (True, False)
    """
    off = (reported - plain).abs()
    if ((reported == 0) & (plain < -_CERTAIN)).any():
        return False
    # A NaN compares false, so it does not agree.
    return bool((off <= _WORST * tolerance).all() and off.mean() <= tolerance)


def _describe(reported: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> str:
    """Both kinds of numbers for the response that differs most, for an error."""
    worst = max(
        range(len(reported)),
        key=lambda i: max(
            (math.inf if math.isnan(a) else abs(a - b))
            for a, b in zip(reported[i], plain[i], strict=True)
        ),
    )
    return f"reported {_shown(reported[worst])}, a plain forward pass gives {_shown(plain[worst])}"


def _shown(log_probs: Sequence[float]) -> str:
    """The first numbers, for an error."""
    ellipsis = ", ..." if len(log_probs) > 6 else ""
    return f"[{', '.join(f'{value:.3f}' for value in log_probs[:6])}{ellipsis}]"


def _flat(log_probs: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(log_probs)), dtype=torch.float64, device="cpu")
