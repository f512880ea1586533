"""Drawing tokens: each request has its own sampling parameters and random numbers.

Two promises: a log-probability is that of the distribution that the token was drawn from; and a draw
depends only on that distribution, the request's seed and the token's position. No global generator is
used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch

__all__ = ["BOUNDS", "Sampling", "checked_number", "draw", "random_word"]

_MASK = 2**64 - 1
BOUNDS: dict[str, tuple[Any, float, float]] = {
    "temperature": (Real, 0, 10**6),
    "top_k": (Integral, -1, 2**31 - 1),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "n": (Integral, 1, 128),
    "seed": (Integral, -(2**63), 2**63 - 1),
    "max_new_tokens": (Integral, 1, 2**31 - 1),
    "presence_penalty": (Real, -2, 2),
    "frequency_penalty": (Real, -2, 2),
    "repetition_penalty": (Real, 0, 10**6),
}
"""Of each parameter of a request: its kind, its least and its greatest value."""
_OFF = {"temperature": 1e-5, "top_k": 0}
"""What is below is 0. So is it in vLLM: logits divided by less may overflow."""
_ABOVE = ("top_p", "repetition_penalty")
"""Parameters that must be above their least value."""


def checked_number(name: str, value: Any) -> Any:
    """Check a parameter of a request that is in :data:`BOUNDS`; returns an ``int`` or a ``float``.

    Raises:
        TypeError: if it is no number of its kind.
        ValueError: if it is out of bounds.

    Examples:
        >>> checked_number("top_p", 1), checked_number("seed", 7)
        (1.0, 7)
    """
    kind, least, most = BOUNDS[name]
    expected = "an integer" if kind is Integral else "a number"
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be {expected}, got {value!r}.")
    # A NaN is in no interval.
    if not least <= value <= most or (name in _ABOVE and value == least):
        opening = "(" if name in _ABOVE else "["
        raise ValueError(f"{name} must be {expected} in {opening}{least}, {most}], got {value!r}.")
    return int(value) if kind is Integral else float(value)


def random_word(seed: int, index: int) -> int:
    """The ``index``-th 64-bit random number of a seed, by SplitMix64 (Steele, Lea and Flood, 2014).

    Args:
        seed: an integer; its lowest 64 bits count.
        index: place in the sequence, from 0.

    Returns:
        An integer in ``[0, 2**64)``.

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
    """Sampling parameters of a request.

    Args:
        temperature: divides the logits; at 0, and below 1e-5, the likeliest token is chosen.
        top_k: draw from the ``top_k`` likeliest tokens only; 0 and -1 keep all.
        top_p: draw from the fewest likeliest tokens whose probabilities sum to at least this; 1 keeps
            all.
        min_p: draw from the tokens only whose probability is at least this share of the likeliest
            one's; 0 keeps all.

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
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = checked_number(field.name, getattr(self, field.name))
            value = type(value)() if value < _OFF.get(field.name, 0) else value
            object.__setattr__(self, field.name, value)

    def changed(self, **asked: Any) -> Sampling:
        """Copy with the arguments that are not ``None``."""
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(self, **given) if given else self

    def record(self) -> dict[str, Any]:
        """The parameters that differ from plain sampling at temperature 1."""
        if self.temperature == 0:
            return {"temperature": 0.0}
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value != getattr(_PLAIN, name)}


_PLAIN = Sampling()


def draw(
    logits: torch.Tensor, params: Sequence[Sampling], words: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token per row, by inverse transform sampling.

    Args:
        logits: ``[B, V]``.
        params: sampling parameters of each row.
        words: a 64-bit random number for each row.

    Returns:
        Tokens ``[B]`` int64 and their log-probabilities ``[B]`` float32.

    Examples:
        >>> tokens, log_probs = draw(torch.tensor([[0.0, 9.0]]), [Sampling(temperature=0)], [7])
        >>> tokens.tolist(), log_probs.tolist()
        ([1], [0.0])
    """
    log_probs = _adjusted(logits.float(), params).log_softmax(-1)
    precision = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = log_probs.exp().cumsum(-1, dtype=precision)
    bits = torch.tensor([word >> 32 for word in words], dtype=precision, device=logits.device)
    uniform = ((bits + 0.5) / 2**32)[:, None]
    # The first token whose cumulative probability exceeds the number never has probability 0.
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]


def _adjusted(scores: torch.Tensor, params: Sequence[Sampling]) -> torch.Tensor:
    """Apply each row's temperature and truncation to logits ``[B, V]``."""
    size, device = scores.shape[-1], scores.device
    if any(row.temperature != 1 for row in params):
        temperature = torch.tensor([row.temperature for row in params], device=device)[:, None]
        # The highest logit is 0 before the division, so a low temperature does not overflow.
        highest, likeliest = scores.max(-1, keepdim=True)
        greedy = torch.full_like(scores, -math.inf).scatter_(1, likeliest, 0.0)
        scores = torch.where(temperature > 0, (scores - highest) / temperature, greedy)
    rows = [i for i, row in enumerate(params) if row.top_k or row.top_p < 1]
    if rows:
        kept = [min(params[i].top_k or size, size) for i in rows]
        top_k = torch.tensor(kept, device=device)[:, None]
        top_p = torch.tensor([params[i].top_p for i in rows], device=device)[:, None]
        ranked, order = scores[rows].sort(-1, descending=True)
        ranked = ranked.masked_fill(torch.arange(size, device=device) >= top_k, -math.inf)
        probs = ranked.softmax(-1)
        before = probs.cumsum(-1) - probs
        # The likeliest token stays, even if rounding makes top_p 0.
        ranked[:, 1:].masked_fill_(((before >= top_p) & (top_p < 1))[:, 1:], -math.inf)
        cut = torch.full_like(ranked, -math.inf).scatter_(1, order, ranked)
        scores = scores.index_copy(0, torch.tensor(rows, device=device), cut)
    if any(row.min_p for row in params):
        shares = [math.log(row.min_p) if row.min_p else -math.inf for row in params]
        least = scores.amax(-1, keepdim=True) + torch.tensor(shares, device=device)[:, None]
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores
