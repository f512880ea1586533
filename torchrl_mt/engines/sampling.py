"""Drawing tokens: each request has its own sampling parameters and random numbers.

Two promises: a log-probability is that of the distribution that the token was drawn from; and a draw
depends only on that distribution, the request's seed and the token's position. No global generator is
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch.nn.functional import pad

from torchrl_mt.devices import upload

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
_BLOCK = 256
"""Tokens in a block. A block is drawn by the sum of its probabilities, then a token in it."""


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
    probs = probabilities(logits.float(), params)
    missing = -probs.shape[-1] % _BLOCK
    blocks = (pad(probs, (0, missing)) if missing else probs).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1).to(_precision(logits))
    cumulative = sums.cumsum(-1)
    bits = upload([word >> 32 for word in words], logits.device, sums.dtype)
    uniform = ((bits + 0.5) / 2**32)[:, None]
    block = _first_above(cumulative, uniform)
    within = uniform * cumulative[:, -1:] - (cumulative - sums).gather(1, block)
    inner = blocks[torch.arange(len(blocks), device=logits.device), block[:, 0]].to(sums.dtype)
    token = _first_above(inner.cumsum(-1), within / sums.gather(1, block))
    tokens = (block * _BLOCK + token).clamp_(max=probs.shape[-1] - 1)
    log_probs = probs.gather(1, tokens).to(sums.dtype).log() - cumulative[:, -1:].log()
    return tokens[:, 0], log_probs[:, 0].float()


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _first_above(cumulative: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Index ``[B, 1]`` of the first sum that exceeds a share of the last; its own part is never 0."""
    bound = share.clamp(0, 1 - torch.finfo(share.dtype).eps) * cumulative[:, -1:]
    last = cumulative.shape[-1] - 1  # nothing exceeds what is no number
    return torch.searchsorted(cumulative, bound, right=True).clamp_(max=last)


def probabilities(scores: torch.Tensor, params: Sequence[Sampling]) -> torch.Tensor:
    """Probabilities ``[B, V]`` of tokens by their logits ``[B, V]`` and each row's parameters.

    Those of truncated tokens are 0; the others are not normalised again. Of equally likely tokens the
    first are kept.
    """
    size, device = scores.shape[-1], scores.device
    if any(row.temperature not in (0, 1) for row in params):
        temperature = upload([row.temperature or 1.0 for row in params], device)
        # The highest logit is 0 before the division, so a low temperature does not overflow.
        scores = (scores - scores.amax(-1, keepdim=True)).div_(temperature[:, None])
    probs = scores.softmax(-1)
    counts = [row.top_k if row.temperature else 1 for row in params]
    top_k = {i: count for i, count in enumerate(counts) if 0 < count < size}
    top_p = {i: row.top_p for i, row in enumerate(params) if row.top_p < 1}
    for truncate, wanted in ((_top_k, top_k), (_top_p, top_p)):
        if wanted:
            rows = upload(list(wanted), device)
            probs.index_copy_(0, rows, truncate(probs.index_select(0, rows), [*wanted.values()]))
    if any(row.min_p for row in params):
        shares = upload([row.min_p for row in params], device)[:, None]
        probs.masked_fill_(probs < shares * probs.amax(-1, keepdim=True), 0)
    return probs


def _top_k(probs: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    kept = upload(top_k, probs.device)[:, None]
    least = probs.topk(max(top_k), -1).values.gather(1, kept - 1)
    return _truncated(probs, least, kept - (probs > least).sum(-1, keepdim=True))


def _top_p(probs: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    def units(probs: torch.Tensor) -> torch.Tensor:
        # Integers: their sums are exact, in any order.
        return (probs * 2.0**50).floor_().to(_precision(probs))

    mass = units(probs)
    share = upload(top_p, probs.device, mass.dtype)[:, None]
    target = (share * mass.sum(-1, keepdim=True)).ceil_().clamp_(min=1)
    # The least probability that is kept, ten bits at a time: the bits of a float have its order.
    bits, digits = probs.view(torch.int32), torch.empty_like(probs, dtype=torch.int32)
    least, index = torch.zeros_like(bits[:, :1]), torch.empty_like(probs, dtype=torch.int64)
    for shift in (20, 10, 0):
        # What is below all that these ten bits can be counts as 0, what is above as 1025.
        torch.sub(bits, least - (1 << shift), out=digits)
        index.copy_(digits.bitwise_right_shift_(shift).clamp_(0, 1025))
        sums = mass.new_zeros(len(mass), 1026).scatter_add_(1, index, mass).flip(-1).cumsum(-1)
        reached = (sums < target).sum(-1, keepdim=True).clamp_(1, 1024)
        least += ((1024 - reached) << shift).int()
    smallest = least.view(torch.float32)
    ties = (target - sums.gather(1, reached - 1)) / units(smallest)
    return _truncated(probs, smallest, ties.ceil_())


def _truncated(probs: torch.Tensor, least: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    """Keep what is above ``least`` and the first ``ties`` of what equals it."""
    equal = probs == least
    equal &= equal.cumsum(-1, dtype=torch.int32) <= ties.int()
    return torch.where(equal | (probs > least), probs, probs.new_zeros(()))
