"""Are the log-probabilities that a sampler reports those of the model that is trained?

One plain forward pass is the measure. Numbers that it contradicts are never handed on: they are
recomputed where enough of them show that the model is the right one, and refused otherwise.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import TopKLogitsWarper, TopPLogitsWarper

from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.scoring.log_probs import row_log_probs
from torchrl_mt.scoring.packing import micro_batches

__all__ = ["LogProbCheck", "LogProbError", "agrees", "plain_log_probs", "shows_the_model"]

_logger = logging.getLogger("torchrl_mt")

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
    """A sampler's log-probabilities are not those of the model, and cannot be put right."""


class LogProbCheck:
    """Decide which log-probabilities answers get: the reported, or those of plain forward passes.

    Those of a forward pass are of the distribution that was sampled from: after temperature and
    truncation. Each such law is checked by itself, as a sampler may report for one what is right for
    another.

    Args:
        model: what the answers are said to be sampled from, in the mode that it samples in; ``None``
            if it is out of reach.
        check: compare the reported numbers with plain ones; otherwise they pass as they are.
        tolerance: as in :func:`agrees`; by the model's precision if ``None``.
        max_tokens: most tokens of one forward pass, padding included.
    """

    def __init__(
        self,
        model: nn.Module | None,
        check: bool,
        tolerance: float | None,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._check = check
        self._tolerance = tolerance
        self._max_tokens = max_tokens
        self._recompute: dict[Sampling, bool] = {}
        self._said = False

    def recheck(self) -> None:
        """Compare again with the next answers."""
        self._recompute.clear()

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
            reported: what the sampler reports for each answer, if it does.
            law: what they were sampled with.

        Raises:
            LogProbError: if what is reported is wrong, or missing, and cannot be recomputed.
        """
        given = [row for row in reported if row is not None]
        complete = len(given) == len(reported)
        recompute = self._recompute.get(law)
        if complete and (not self._check or recompute is False):
            return given
        if law.temperature == 0:
            return [[0.0] * len(answer) for answer in answers]  # the likeliest token is certain
        if self._model is None:
            raise LogProbError(
                f"the policy reports {_shown(given[0]) if given else 'no log-probabilities'}, and there "
                "is no model to check them with (policy.model is no nn.Module): pass model=, a model "
                "with the same weights, or check=False if nothing is trained on the answers."
            )
        plain = self._plain(prompts, answers, law)
        if not self._check or not complete or recompute:
            return plain
        if agrees(_flat(given), _flat(plain), self._limit):
            if self._is_telling(prompts, answers, given, law):
                self._recompute[law] = False
            return plain
        if not _flat(plain).isfinite().all() or not self._sampled_by_model(
            prompts, answers, given, plain, law
        ):
            raise LogProbError(
                f"the policy's log-probabilities are not its model's: {_describe(given, plain)} with "
                f"{law.record() or 'plain sampling'}. Does it sample with other weights, or in another "
                "way? If the difference is rounding, raise tolerance "
                f"({self._limit}); with check=False they are handed on as they are."
            )
        self._recompute[law] = True
        if not self._said:
            self._said = True
            _logger.warning(
                "the policy's log-probabilities are wrong (%s): they are recomputed from now on, with "
                "forward passes of its model.",
                _describe(given, plain),
            )
        return plain

    @property
    def _limit(self) -> float:
        """The tolerance, by the model's precision if none was given."""
        if self._tolerance is not None:
            return self._tolerance
        parameter = None if self._model is None else next(self._model.parameters(), None)
        half = parameter is not None and parameter.dtype.itemsize < 4
        return 2 * _TOLERANCE if half else _TOLERANCE

    def _is_telling(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        given: list[list[float]],
        law: Sampling,
    ) -> bool:
        """Whether numbers that agree would not agree if they were wrong as samplers' numbers often are.

        If the model is sure of its answers, a 0.0 that stands for "none" and numbers of plain
        sampling look right; the next answers are compared as well then.
        """
        if all(row[0] == 0 for row in given):
            return False
        if law == _PLAIN:
            return True
        unscaled = self._plain(prompts, answers, _PLAIN)
        return not agrees(_flat(given), _flat(unscaled), self._limit)

    def _sampled_by_model(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        given: list[list[float]],
        plain: list[list[float]],
        law: Sampling,
    ) -> bool:
        """Whether what is right of the reported numbers shows that the model sampled the answers."""
        if shows_the_model(_flat(given), _flat(plain), self._limit):
            return True
        if law == _PLAIN:
            return False
        unscaled = self._plain(prompts, answers, _PLAIN)
        return shows_the_model(_flat(given), _flat(unscaled), self._limit)

    def _plain(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        law: Sampling,
    ) -> list[list[float]]:
        """Log-probabilities by plain forward passes."""
        assert self._model is not None
        return plain_log_probs(self._model, prompts, answers, law=law, max_tokens=self._max_tokens)


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


def shows_the_model(reported: Tensor, plain: Tensor, tolerance: float) -> bool:
    """Whether reported log-probabilities, though some are wrong, are evidently of this model.

    Numbers that stand for "none" (exactly 0, or not finite) are no evidence; of the rest, at least
    half must agree.

    Args:
        reported: ``[n]`` float.
        plain: ``[n]`` float, from a plain forward pass.
        tolerance: as in :func:`agrees`.

    Examples:
        >>> plain = torch.tensor([-1.0, -2.0, -3.0])
        >>> shows_the_model(torch.tensor([0.0, -2.0, -3.0]), plain, 0.05)
        True
        >>> shows_the_model(torch.tensor([0.0, -5.0, -6.0]), plain, 0.05)
        False
    """
    evidence = reported.isfinite() & (reported != 0)
    if not evidence.any():
        return True
    off = (reported - plain)[evidence].abs()
    return bool((off <= _WORST * tolerance).float().mean() >= 0.5)


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
