"""Are the log-probabilities that a sampler reports those of the model that is trained?

One plain forward pass is the measure. Numbers that it contradicts are never handed on: they are
recomputed where enough of them show that the model is the right one, and refused otherwise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from torchrl_mt.objectives.row_log_probs import micro_batches, row_log_probs

__all__ = ["LogProbCheck", "LogProbError", "agrees", "plain_log_probs", "shows_the_model"]

_logger = logging.getLogger("torchrl_mt")

_TOLERANCE = 0.05
"""Nats. What differs from a plain pass by rounding alone stays below; twice that in half precision."""
_CERTAIN = 1e-6
"""Nats. Closer to 0 than this, rounding alone makes a log-probability 0."""
_WORST = 5.0
"""How many times the tolerance a single number may be off."""


class LogProbError(RuntimeError):
    """A sampler's log-probabilities are not those of the model, and cannot be put right."""


class LogProbCheck:
    """Decide which log-probabilities answers get: the reported, or those of plain forward passes.

    Args:
        model: what the answers are said to be sampled from, in the mode that it samples in; ``None``
            if it is out of reach.
        temperature: what the sampler divides the logits by.
        check: compare the reported numbers with plain ones; otherwise they pass as they are.
        tolerance: as in :func:`agrees`; by the model's precision if ``None``.
        max_tokens: most tokens of one forward pass, padding included.
    """

    def __init__(
        self,
        model: nn.Module | None,
        temperature: float,
        check: bool,
        tolerance: float | None,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._temperature = temperature
        self._check = check
        self._tolerance = tolerance
        self._max_tokens = max_tokens
        self._recompute: bool | None = None
        self._said = False

    def recheck(self) -> None:
        """Compare again with the next answers."""
        self._recompute = None

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        reported: Sequence[list[float] | None],
    ) -> list[list[float]]:
        """Find the log-probabilities of a batch's answers.

        Args:
            prompts: at least one token each.
            answers: the sampled tokens.
            reported: what the sampler reports for each answer, if it does.

        Raises:
            LogProbError: if what is reported is wrong, or missing, and cannot be recomputed.
        """
        given = [row for row in reported if row is not None]
        complete = len(given) == len(reported)
        if complete and (not self._check or self._recompute is False):
            return given
        if self._model is None:
            raise LogProbError(
                f"the policy reports {_shown(given[0]) if given else 'no log-probabilities'}, and there "
                "is no model to check them with (policy.model is no nn.Module): pass model=, a model "
                "with the same weights, or check=False if nothing is trained on the answers."
            )
        plain = self._plain(prompts, answers, self._temperature)
        if not self._check or not complete or self._recompute:
            return plain
        if agrees(_flat(given), _flat(plain), self._limit):
            if self._is_telling(prompts, answers, given):
                self._recompute = False
            return plain
        if not _flat(plain).isfinite().all() or not self._sampled_by_model(
            prompts, answers, given, plain
        ):
            raise LogProbError(
                f"the policy's log-probabilities are not its model's: {_describe(given, plain)} at "
                f"temperature={self._temperature}. Does it sample with other weights or another "
                "temperature? If the difference is rounding, raise tolerance "
                f"({self._limit}); with check=False they are handed on as they are."
            )
        self._recompute = True
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
    ) -> bool:
        """Whether numbers that agree would not agree if they were wrong as samplers' numbers often are.

        If the model is sure of its answers, a 0.0 that stands for "none" and numbers at another
        temperature look right; the next answers are compared as well then.
        """
        if all(row[0] == 0 for row in given):
            return False
        if self._temperature == 1:
            return True
        unscaled = self._plain(prompts, answers, 1.0)
        return not agrees(_flat(given), _flat(unscaled), self._limit)

    def _sampled_by_model(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        given: list[list[float]],
        plain: list[list[float]],
    ) -> bool:
        """Whether what is right of the reported numbers shows that the model sampled the answers."""
        if shows_the_model(_flat(given), _flat(plain), self._limit):
            return True
        if self._temperature == 1:
            return False
        unscaled = self._plain(prompts, answers, 1.0)
        return shows_the_model(_flat(given), _flat(unscaled), self._limit)

    def _plain(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        temperature: float,
    ) -> list[list[float]]:
        """Log-probabilities by plain forward passes."""
        assert self._model is not None
        return plain_log_probs(
            self._model, prompts, answers, temperature=temperature, max_tokens=self._max_tokens
        )


def plain_log_probs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
) -> list[list[float]]:
    """Score answers with plain forward passes, without gradients.

    Args:
        model: a causal language model, in the mode that it samples in.
        prompts: at least one token each.
        answers: the sampled tokens.
        temperature: what the logits are divided by.
        max_tokens: most tokens of one forward pass, padding included.

    Returns:
        A log-probability for every sampled token.
    """
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
            log_probs, _ = row_log_probs(model, tokens, attended, sampled, temperature=temperature)
        for i, row, mask in zip(batch.tolist(), log_probs, sampled, strict=True):
            scores[i] = row[mask].tolist()
    return scores


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
