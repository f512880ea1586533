"""How a token is drawn: each request has its own distribution and its own random numbers.

Two promises: a log-probability is that of the distribution that the token was drawn from, and the draw
depends on that distribution, the request's seed and the token's position alone; no global generator
is read or moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

__all__ = ["Processors", "Runner", "Sampling", "random_word"]

_MASK = 2**64 - 1


def random_word(seed: int, index: int) -> int:
    """The ``index``-th number of 64 random bits from a seed.

    Args:
        seed: an integer; its lowest 64 bits count.
        index: which number, from 0.

    Returns:
        An integer in ``[0, 2**64)``: SplitMix64 (Steele, Lea and Flood, 2014).

    Examples:
        >>> hex(random_word(0, 0))
        '0xe220a8397b1dcdaf'
    """
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What shapes the distribution that tokens are drawn from.

    Args:
        temperature: divides the logits; at 0 the likeliest token is taken.
        top_k: only the ``top_k`` likeliest tokens are drawn; 0 is all of them.
        top_p: only the likeliest tokens that together have this probability are drawn.

    Raises:
        ValueError: if an argument is out of range.
        TypeError: if an argument is no number.

    Examples:
        >>> Sampling(temperature=0.5).changed(top_k=3).record()
        {'temperature': 0.5, 'top_k': 3}
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("temperature", (int, float), "a number"),
            ("top_k", int, "an integer"),
            ("top_p", (int, float), "a number"),
        ):
            value = getattr(self, name)
            if not isinstance(value, cast(Any, kind)) or isinstance(value, bool):
                raise TypeError(f"{name} must be {expected}, got {value!r}.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be finite and not negative, got {self.temperature}."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative (0 keeps all tokens), got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")

    def changed(
        self,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Sampling:
        """The same, but for what is not ``None``."""
        if temperature is None and top_k is None and top_p is None:
            return self
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_k if top_k is None else top_k,
            self.top_p if top_p is None else top_p,
        )

    def record(self) -> dict[str, Any]:
        """The arguments that make a difference to plain sampling at temperature 1."""
        if self.temperature == 0:
            return {"temperature": 0.0}
        record: dict[str, Any] = {}
        if self.temperature != 1:
            record["temperature"] = float(self.temperature)
        if self.top_k:
            record["top_k"] = self.top_k
        if self.top_p < 1:
            record["top_p"] = float(self.top_p)
        return record


_ALL = 2**31 - 1
"""A ``top_k`` that keeps every token."""


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    """Divide the logits; at temperature 0 leave the likeliest token only."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        temperatures = tensor_arg[: scores.size(0)].view(torch.float32)[:, None]
        # The highest logit is 0 before the division: however low the temperature, none overflows.
        highest, likeliest = scores.max(-1, keepdim=True)
        others = torch.arange(scores.size(-1), device=scores.device) != likeliest
        greedy = torch.zeros_like(scores).masked_fill(others, -math.inf)
        return torch.where(temperatures > 0, (scores - highest) / temperatures, greedy)


class _TopK(ContinuousBatchingTopKLogitsWarper):
    """Leave the likeliest tokens, however many are asked for."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        return super().__call__(scores, tensor_arg.clamp(max=scores.size(-1)))


class _TopP(ContinuousBatchingTopPLogitsWarper):
    """Leave the likeliest tokens of a total probability."""


class _Uniform(ContinuousBatchingLogitsProcessor):
    """Hand each token's random number to the draw; the logits stay as they are."""

    supported_kwargs: dict[str, type] = {"seed": int}  # noqa: RUF012 - as the host declares it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.bits = torch.zeros(0, dtype=torch.int32)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(
        self, requests_with_new_token: list[FutureRequestState]
    ) -> torch.Tensor:
        # The token that is sampled comes right after those in the cache, whatever was computed anew.
        words = [
            (random_word(state.logit_processor_kwargs.get("seed", 0), state.position_offset) >> 32)
            - 2**31
            for state in (request.state for request in requests_with_new_token)
        ]
        return torch.tensor(words, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.bits = tensor_arg[: scores.size(0)]
        return scores


class Processors(ContinuousBatchingLogitsProcessorList):
    """Temperature, top-k, top-p and random numbers, each request's own.

    Args:
        truncation: whether requests may be truncated at all.
        fixed: run every processor at every step, needed or not, as a captured graph must.
    """

    def __init__(self, *, truncation: bool, fixed: bool) -> None:
        self.uniform = _Uniform()
        processors: list[Any] = [_Temperature(TemperatureLogitsWarper(1.0))]
        if truncation:
            processors += [_TopK(TopKLogitsWarper(_ALL)), _TopP(TopPLogitsWarper(1.0))]
        super().__init__(LogitsProcessorList([*processors, self.uniform]))
        self.tensors_required = len(self.logits_processor)
        self.truncation = truncation
        self.fixed = fixed
        self._needed = set(range(self.tensors_required))

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Lay out the arguments of the processors that this step needs."""
        futures = [future for future in requests_in_batch if future.has_new_token]
        # A request has an argument only where it differs from plain sampling. The draw takes place even
        # if no token comes of it.
        given = {name for future in futures for name in future.state.logit_processor_kwargs} | {
            "seed"
        }
        for row, processor in enumerate(cast(Sequence[Any], self.logits_processor)):
            if self.fixed or not given.isdisjoint(processor.supported_kwargs):
                arguments = processor.prepare_tensor_args(futures)
                arg_storage[row, : len(futures)] = arguments.to(arg_storage.device)
                self._needed.add(row)
            else:
                self._needed.discard(row)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """Apply what this step needs to the logits."""
        processors = cast(Sequence[Any], self.logits_processor)
        for row in sorted(self._needed):
            scores = processors[row](scores, logits_processor_args[row])
        return scores


class Runner(ModelRunner):
    """The host's runner, which draws each token with the random number of its request."""

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Draw the next tokens by inverting their distributions' cumulative sums."""
        bits = cast(Processors, self.logit_processor).uniform.bits
        precision = torch.float32 if scores.device.type == "mps" else torch.float64
        log_probs = scores[0].log_softmax(-1)
        cumulative = log_probs.exp().cumsum(-1, dtype=precision)
        uniform = (bits.to(precision)[:, None] + (2**31 + 0.5)) / 2**32
        # The first token whose sum exceeds the number: never one of probability 0.
        tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens.clamp_(max=scores.size(-1) - 1)
        count = tokens.size(0)
        output_ids[0, :count].copy_(tokens[:, 0])
        output_ids[1, :count].copy_(log_probs.gather(1, tokens)[:, 0].view(torch.int32))
