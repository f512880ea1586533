"""Functions from rows to rows before advantages are taken: new rewards, weights, fewer rows.

What they may not change is compared; a row stays the row that it was, whatever order it comes back in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import (
    NestedKey,
    NonTensorData,
    TensorDictBase,
    is_leaf_nontensor,
    is_tensor_collection,
)
from torch import Tensor

from torchrl_mt.devices import on_cpu, sent
from torchrl_mt.objectives.filters import is_filter, per_token, valid_rows
from torchrl_mt.objectives.metrics import numbered
from torchrl_mt.objectives.rows.batch import RowBatch, read_batch
from torchrl_mt.objectives.rows.keys import EPISODE_SCORE, ExperienceKeys

Process = Callable[[TensorDictBase], TensorDictBase]
"""Function from rows to rows. It gets a copy of the scored rows, under the default keys, with rewards
``("rewards", "shaped")`` ``[N, S]`` and their sum over each row's episode, ``("rewards", "episode")``
``[N]``."""

_ROW: NestedKey = ("rows", "number")
"""Key of each row's number, by which it is known again."""
_REWARD = ExperienceKeys.shaped_reward
_MAY_CHANGE = (_REWARD, ExperienceKeys.valid, ExperienceKeys.weight)


@dataclass(frozen=True)
class Processed:
    """What the functions left."""

    number: Tensor
    """int64 ``[K]``: the rows that are left, in their order."""
    batch: RowBatch
    """The same, with what the functions wrote, under the maker's keys."""
    written: list[NestedKey]
    """The keys of what they wrote."""
    reward: Tensor | None
    """float32 ``[K, S]``; ``None`` if the rows' own returns stand for rewards."""
    metrics: dict[str, float]
    """``process/<name>/dropped_rows`` and ``process/<name>/rejected_rows``."""


def process_rows(
    functions: Sequence[Process],
    batch: RowBatch,
    scores: Mapping[str, Tensor],
    reward: Tensor | None,
) -> Processed:
    """Call the functions, each with the rows that the one before returned.

    Args:
        functions: The functions.
        batch: The rows.
        scores: What the models said of them, ``[N, S]``, by key name.
        reward: ``[N, S]`` float32, zero on masked tokens; ``None`` if the rows' own returns stand for
            rewards.

    Returns:
        The rows that are left; the given ones are not changed.

    Raises:
        TypeError: If a function returns no rows, or rewards or flags of a wrong type.
        ValueError: If a function returns a row that it was not given, or one twice; some rows of an
            episode only, or no row; lacks an entry or changes one that it may not; or its rewards have
            another shape, are not finite or lie on tokens that were not sampled.
    """
    metrics: dict[str, float] = {}
    given = dict(scores) if reward is None else {**scores, "shaped_reward": reward}
    shown = batch.with_default_keys(given)
    if reward is None:
        shown.set(EPISODE_SCORE, sent(batch.episode_scores(None), batch.device))
    shown.set(_ROW, torch.arange(len(batch.episode), device=batch.device))
    whole = torch.bincount(batch.episodes.of_row)
    for function, name in zip(functions, _names(functions), strict=True):
        if reward is not None:
            shown.set(EPISODE_SCORE, _scores(shown, batch))
        if is_filter(function):
            shown = function(shown)
            continue
        result = _checked(name, function(shown.clone()), shown)
        kept = torch.bincount(batch.episodes.of_row[result[_ROW].cpu()], minlength=len(whole))
        torn = ((kept > 0) & (kept < whole)).nonzero()
        if len(torn):
            episode = int(batch.episode_id[batch.episodes.of_row == torn[0, 0]][0])
            raise ValueError(
                f"{name} must keep or drop all rows of an episode, but it dropped some of episode "
                f"{episode}: decide by ('rewards', 'episode') or other entries that are the same on all "
                "its rows."
            )
        metrics[f"{name}/dropped_rows"] = float(len(shown) - len(result))
        before = valid_rows(shown)[torch.searchsorted(shown[_ROW], result[_ROW])]
        if bool((valid_rows(result) & ~before).any()):
            raise ValueError(
                f"{name} must leave 'valid' false where it is: these rows have no rewards."
            )
        metrics[f"{name}/rejected_rows"] = float((before & ~valid_rows(result)).sum())
        whole = kept
        shown = result
    rows, keys = batch.rows[shown[_ROW]], batch.keys
    known = set(batch.with_default_keys(given).keys(True)) | {_ROW, EPISODE_SCORE}
    written = [key for key in _entries(shown) if key not in known and key not in _MAY_CHANGE]
    for key in written:
        rows.set(key, shown.get(key))
    if (valid := shown.get(ExperienceKeys.valid, None)) is not None:
        rows.set(keys.valid, valid)
        written.append(keys.valid)
    left = read_batch(rows, keys)
    number = shown[_ROW].cpu()
    if (weight := shown.get(ExperienceKeys.weight, None)) is not None:
        counted = sent(left.counted, weight.device)
        rows.set(keys.weight, torch.where(counted, per_token(weight), 0.0))
        written.append(keys.weight)
    if reward is not None:
        reward = torch.where(left.counted, shown[_REWARD].cpu().float(), 0.0)
    return Processed(number, left, written, reward, metrics)


def _checked(name: str, result: Any, given: TensorDictBase) -> TensorDictBase:
    """Check what a function returned; sort it as given."""
    if not isinstance(result, TensorDictBase):
        kind = type(result).__name__
        raise TypeError(f"{name} must return the rows, a TensorDict of batch size [N], got {kind}.")
    names = _entries(given)
    found = set(_entries(result))
    missing = [key for key in given.keys(True, True) if key not in found]
    if missing:
        raise ValueError(
            f"{name} must keep all entries of the rows, but {missing[:3]} are missing: change the rows "
            "that it gets, or index them, and return these."
        )
    number, rows = result[_ROW], given[_ROW]
    unknown = number.ndim != 1 or not bool(torch.isin(number, rows).all())
    if unknown or len(number.unique()) < len(number):
        raise ValueError(
            f"{name} must return rows that it was given, each once, got rows number "
            f"{number.tolist()} of {rows.tolist()}."
        )
    if not len(number):
        raise ValueError(
            f"{name} dropped all {len(rows)} rows, so there is nothing to learn from: reject them "
            "instead (set 'valid' to false), which keeps the batch, or have the collector play others "
            "(accept_group)."
        )
    order = number.argsort()
    result = result[order]
    same = given[torch.searchsorted(rows, result[_ROW])]
    for key in names:
        if key not in found:  # Python objects get lost in ``rows.flip(0)`` and the like.
            result.set(key, same.get(key))
        elif key not in _MAY_CHANGE and not _same(result.get(key), same.get(key)):
            raise ValueError(
                f"{name} must not change {key!r}: it may change {_REWARD!r}, 'valid' and "
                f"{ExperienceKeys.weight!r}, drop rows and add entries."
            )
    _check_reward(name, result)
    _check_weight(name, result, same)
    try:
        valid_rows(result)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return result


def _check_reward(name: str, rows: TensorDictBase) -> None:
    """Refuse rewards of a wrong form or place."""
    if rows.get(_REWARD, None) is None:
        return
    reward, mask = rows[_REWARD], rows[ExperienceKeys.assistant_mask]
    if reward.shape != mask.shape or not reward.is_floating_point():
        raise ValueError(
            f"{name} must leave {_REWARD!r} floating of shape {tuple(mask.shape)}, got {reward.dtype} "
            f"{tuple(reward.shape)}."
        )
    if not bool(reward.isfinite().all()):
        raise ValueError(f"{name} must leave {_REWARD!r} finite.")
    if bool(reward[~mask].any()):
        raise ValueError(
            f"{name} must give rewards to sampled tokens only: multiply them with "
            f"rows[{ExperienceKeys.assistant_mask!r}]."
        )


def _check_weight(name: str, rows: TensorDictBase, before: TensorDictBase) -> None:
    """Refuse weights that a function set, if they are of a wrong form or value."""
    key, mask = ExperienceKeys.weight, rows[ExperienceKeys.assistant_mask]
    weight = rows.get(key, None)
    if weight is None or _same(weight, before.get(key, None)):
        return
    if not isinstance(weight, Tensor) or weight.shape not in (mask.shape[:1], mask.shape):
        raise ValueError(
            f"{name} must give {key!r} the shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}, got "
            f"{tuple(weight.shape)}."
        )
    counted = weight[mask] if weight.ndim == 2 else weight
    if not bool((counted.isfinite() & (counted >= 0)).all()):
        raise ValueError(f"{name} must give finite weights of 0 or more ({key!r}).")


def _entries(rows: TensorDictBase) -> list[NestedKey]:
    """Keys of all entries, those of Python objects included."""
    return list(rows.keys(True, True, is_leaf=is_leaf_nontensor))


def _same(one: Any, other: Any) -> bool:
    """Whether two entries are equal; NaN equals NaN."""
    if isinstance(one, NonTensorData) and isinstance(other, NonTensorData):
        return _equal(one.data, other.data)
    if is_tensor_collection(one) and is_tensor_collection(other):
        return all(map(_equal, one.tolist(), other.tolist()))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other)
    return one is other


def _equal(one: Any, other: Any) -> bool:
    """Whether two Python objects are equal, or of a kind of which copies never are."""
    try:
        return bool(one == other) or not bool(copy.deepcopy(other) == other)
    except (RuntimeError, TypeError, ValueError):  # of arrays
        return True


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _scores(shown: TensorDictBase, batch: RowBatch) -> Tensor:
    """Sum the rewards of each row's episode, ``[N]``."""
    number, reward = on_cpu(shown[_ROW], shown[_REWARD])
    of_row = batch.episodes.of_row[number]
    total = torch.zeros(len(batch.episodes.last_token), dtype=torch.float64, device=of_row.device)
    total.index_add_(0, of_row, reward.double().sum(-1))
    return sent(total.float()[of_row], batch.device)


def _names(functions: Sequence[Process]) -> list[str]:
    """Name the functions in errors and metrics."""
    names: list[str] = []
    for one in functions:
        inner = getattr(one, "func", one)
        name = f"process/{getattr(inner, '__name__', type(inner).__name__)}"
        names.append(numbered(name, names))
    return names
