"""Argument checks of this package. Every error names the argument."""

from __future__ import annotations

import ctypes
import inspect
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

LOG_PROB_ROUNDING = 0.5
"""Largest log-probability that is not refused: half precision may round one above 0."""
_SIMILARITY = 0.7
"""Cutoff of ``difflib``: one letter missing, doubled or changed, or two swapped, in a key of data."""


def check_mask(name: str, mask: Tensor, shape: torch.Size) -> None:
    """Refuse a mask that is not boolean or not of ``shape``."""
    if isinstance(mask, Tensor) and mask.dtype is not torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {mask.dtype}; convert it with .bool().")
    check_shape(name, mask, shape)


def check_rows(mask: Tensor) -> None:
    """Refuse a mask that is not boolean or not of shape ``[N, S]``."""
    if mask.ndim != 2:
        raise ValueError(f"mask must have shape [N, S], got {tuple(mask.shape)}.")
    check_mask("mask", mask, mask.shape)


def check_sampled_turns(turns: Tensor) -> None:
    """Refuse negative turn ids; ``turns`` are those of sampled tokens."""
    if turns.numel() and int(turns.min()) < 0:
        raise ValueError(
            f"turns must be 0 or more on every sampled token, got {int(turns.min())}; "
            "a negative turn id means padding, which is never sampled."
        )


def check_ids(name: str, ids: Tensor) -> None:
    """Refuse ids that are not integers."""
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(
            f"{name} must hold integer ids, got {ids.dtype}; are the arguments in another order?"
        )


def check_shape(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Refuse anything but a tensor of shape ``shape``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor of shape {tuple(shape)}, got {tensor!r}.")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}.")


def as_tensor(name: str, given: Any) -> Tensor:
    """Convert real numbers to a detached tensor: a tensor stays where it is, others are on the CPU."""
    try:
        value = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor or numbers, got {type(given).__name__}: {error}."
        ) from error
    if value.is_complex():
        raise TypeError(f"{name} must be real numbers, got {value.dtype}.")
    return value.detach() if value.requires_grad else value


def check_unit_interval(name: str, value: float) -> None:
    """Refuse a number outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}.")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not above 0."""
    if not value > 0.0:
        raise ValueError(f"{name} must be positive, got {value}.")


def check_class(name: str, value: object, cls: type) -> None:
    """Check that a record is of a class."""
    if not isinstance(value, cls):
        raise TypeError(
            f"{name} must be of class {cls.__name__}, got {value!r}: give {cls.__name__}(...)."
        )


def check_integer(name: str, value: object) -> None:
    """Check that an argument is an ``int``, and no ``bool``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")


def check_at_least(name: str, value: float, least: int = 1) -> None:
    """Refuse a number below ``least``."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_positive_integer(name: str, value: object) -> int:
    """Refuse anything but an integer above 0 (bools too); return it as an ``int``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def check_integer_within(name: str, value: object, least: int, most: int) -> None:
    """Refuse anything but an integer in ``[least, most]`` (bools too)."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}.")


def check_clip_epsilon(
    clip_epsilon: float | tuple[float, float], most: float = 1.0
) -> tuple[float, float]:
    """Refuse clip bounds that are out of range; return them as ``(low, high)``.

    ``most`` is the largest lower bound.
    """
    pair = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon,) * 2
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in pair)
    if len(pair) != 2 or not numbers or not 0 <= pair[0] <= most or not pair[1] >= 0:
        lowest = "not negative" if most == math.inf else "in [0, 1]"
        raise ValueError(
            f"clip_epsilon must be a number {lowest}, or (low, high) with low {lowest} and high >= 0, "
            f"got {clip_epsilon!r}."
        )
    return float(pair[0]), float(pair[1])


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}."
            f"{did_you_mean(value, choices)}"
        )


def did_you_mean(given: object, known: Iterable[str] | Callable[..., object]) -> str:
    """A question for the end of an error, if a name is like a known one or like an argument's.

    Examples:
        >>> did_you_mean("objektive", ["objective", "gamma"]), did_you_mean("x", ["objective"])
        (" Did you mean 'objective'?", '')
    """
    names = inspect.signature(known).parameters if callable(known) else known
    found = get_close_matches(given, list(names), 1) if isinstance(given, str) else []
    return f" Did you mean {found[0]!r}?" if found else ""


def check_is_batch(name: str, value: object) -> None:
    """Refuse what is no TensorDict, such as what a collector with a replay buffer yields."""
    if not isinstance(value, TensorDictBase):
        advice = ""
        if value is None:
            advice = ": a collector with a replay_buffer yields None, so sample from the buffer"
        raise TypeError(f"{name} must be a TensorDict, got {type(value).__name__}{advice}.")


def check_finite(name: str, value: float) -> None:
    """Refuse anything but a finite number (bools too)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}.")


def check_positive_finite(name: str, value: float) -> None:
    """Refuse anything but a finite number above 0."""
    check_finite(name, value)
    check_positive(name, value)


def check_list(expected: str, value: object) -> None:
    """Refuse a text, a mapping, and what cannot be iterated over: ``expected`` begins the error.

    Examples:
        >>> check_list("tools must be a list", "add")
        Traceback (most recent call last):
            ...
        TypeError: tools must be a list, got str (add).
    """
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{expected}, got {shown(value)}.")


def shown(value: object, limit: int = 80) -> str:
    """Type and beginning of a value, for errors."""
    return f"{type(value).__name__} ({str(value)[:limit]})"


def find_functions(
    name: str, given: str | Callable | Sequence[str | Callable], known: Mapping[str, Callable]
) -> tuple[Callable, ...]:
    """Look up one or several functions by name; functions are returned as they are.

    Examples:
        >>> find_functions("norm", ["abs", max], {"abs": abs})
        (<built-in function abs>, <built-in function max>)
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    found = []
    for one in given if several else [given]:  # type: ignore[union-attr]
        if isinstance(one, str):
            check_choice(name, one, known)
            one = known[one]
        if not callable(one):
            raise TypeError(
                f"{name} must be a name, a function or several of these, got {given!r}."
            )
        found.append(one)
    return tuple(found)


def import_extra(module: str, extra: str) -> Any:
    """Import a library that an extra of this package installs.

    Args:
        module: what to import.
        extra: the extra of this package that installs it.

    Raises:
        ImportError: if it is not installed; names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this needs the package {error.name or module}: pip install 'torchrl-mt[{extra}]'."
        ) from error


def refuse_misspelt_keys(data: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Refuse a key that is close to an accepted key which the data lacks; others may be labels or ids.

    Args:
        data: an episode's data.
        accepted: keys that the environment reads.

    Raises:
        ValueError: names such a key and the accepted ones.

    Examples:
        >>> refuse_misspelt_keys({"number": 7, "numbers": 16, "label": 3}, ["number", "seed"])
        >>> refuse_misspelt_keys({"nubmer": 7}, ["number", "seed"])
        Traceback (most recent call last):
            ...
        ValueError: data has 'nubmer', nearly 'number': the keys that are read are 'number', 'seed'.
    """
    missing = [name for name in accepted if name not in data]
    for key in data:
        if isinstance(key, str) and key not in accepted:
            for meant in get_close_matches(key.lower(), missing, n=1, cutoff=_SIMILARITY):
                raise ValueError(
                    f"data has {key!r}, nearly {meant!r}: the keys that are read are "
                    f"{', '.join(map(repr, accepted))}."
                )


def as_number(reward: Any) -> float:
    """Convert a reward to a float; infinite if it is too large for one.

    Raises:
        TypeError, ValueError, RuntimeError: if ``float(reward)`` raises it.

    Examples:
        >>> as_number(torch.tensor([2])), as_number(-(10**400))
        (2.0, -inf)
    """
    try:
        return float(reward)
    except OverflowError:
        return math.inf if reward > 0 else -math.inf


def check_token_ids(tokens: Iterable[int], name: str = "prompt_ids") -> list[int]:
    """Convert a sequence of token ids to a list of integers.

    Raises:
        TypeError: if ``tokens`` is no flat sequence of integers.
    """
    # An array would read bytes as raw memory, and rows of one token each as numbers.
    if not isinstance(tokens, (bytes, bytearray)) and getattr(tokens, "ndim", 1) == 1:
        try:
            # An array accepts only integers, and is faster than a loop.
            return array("q", tokens).tolist()
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(
        f"{name} must be a flat sequence of token ids, got {_instead_of_tokens(tokens)}."
    )


def _instead_of_tokens(tokens: Any) -> str:
    """The type that came instead of token ids, and how to fix it."""
    came = type(tokens).__name__
    if isinstance(tokens, Mapping):
        return f"{came}: of a tokenizer's output take ['input_ids']"
    if isinstance(tokens, (str, bytes, bytearray)):
        return f"{came}: tokenize it first"
    if getattr(tokens, "ndim", 1) > 1:
        return f"{came} of shape {list(tokens.shape)}: take one row of it"
    if isinstance(tokens, Sequence):
        for entry in tokens:
            if isinstance(entry, Sequence) and not isinstance(entry, (str, bytes, bytearray)):
                return f"{came} of {type(entry).__name__}: take one row of it"
            if not isinstance(entry, Integral):
                return f"{came} of {_instead_of_tokens(entry)}"
    return came


def is_finite(reward: float) -> bool:
    """Whether a reward is finite as float32, the dtype of batches.

    Examples:
        >>> [is_finite(reward) for reward in (-2.5, float("nan"), 3.4028235e38, 1e39)]
        [True, False, True, False]
    """
    return math.isfinite(ctypes.c_float(reward).value)
