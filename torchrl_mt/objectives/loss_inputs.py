"""Inputs of the loss: entries of rows and outputs of models, checked on the tokens that count.

All entries are checked before anything is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_mt.checks import LOG_PROB_ROUNDING, check_mask
from torchrl_mt.devices import on_cpu
from torchrl_mt.objectives.rows.reading import (
    MODEL_FAULT,
    NO_LOG_PROB,
    check_like,
    check_temperature,
    read_entry,
    read_valid,
)
from torchrl_mt.scoring.log_probs import scored_tokens

_logger = logging.getLogger("torchrl_mt")

FLOATING = (
    "sample_log_prob",
    "sampler_log_prob",
    "ref_log_probs",
    "advantage",
    "weight",
    "value",
    "value_target",
)
"""Entries that are converted to float32 and must be finite on the tokens that count."""
LOG_PROBS = ("sample_log_prob", "sampler_log_prob", "ref_log_probs")
"""Entries that are log-probabilities."""
OnHost = tuple[Tensor, ...]
"""``[N, S]`` on the CPU: tokens, attention mask, trained tokens, and all tokens to score."""
_FIX = "Drop these rows, or fix what wrote them."


def read_inputs(
    tensordict: TensorDictBase,
    keys: Any,
    names: Iterable[str],
    loss_masks: Sequence[NestedKey],
    temperature: float,
) -> tuple[dict[str, Tensor], Tensor, OnHost]:
    """Read the entries ``names`` of ``keys``, and ``"weight"`` where present.

    Returns the entries by name, floating ones as ``[N, S]`` float32, and the mask of
    :func:`counted_tokens`.
    """
    default = type(keys)()
    rows = {
        name: read_entry(tensordict, getattr(keys, name), getattr(default, name)) for name in names
    }
    weight = tensordict.get(keys.weight, None)
    if weight is not None:
        rows["weight"] = weight
    shape, first = rows["action"].shape, keys.action
    for name, value in rows.items():
        expected = {"advantage": (*shape, 1), "group": shape[:1]}.get(name, shape)
        check_like(getattr(keys, name), value, first, torch.Size(expected))
    _check_constant(rows, keys)
    if "advantage" in rows:
        rows["advantage"] = rows["advantage"].squeeze(-1)
    rows |= {name: rows[name].float() for name in FLOATING if name in rows}
    masks = rows["attention_mask"], rows["assistant_mask"]
    mask = counted_tokens(tensordict, keys, *masks, loss_masks)
    if "sft_mask" in rows:
        check_mask(f"the entry {keys.sft_mask!r} of rows", rows["sft_mask"], shape)
        chosen = masks[0], rows["sft_mask"] & masks[0]
        rows["sft_mask"] = counted_tokens(tensordict, keys, *chosen, loss_masks)
    copied = [rows["action"], masks[0], mask]
    if "sft_mask" in rows:
        copied.append(mask | rows["sft_mask"])
    if (sampled := tensordict.get(keys.sampling_temperature, None)) is not None:
        copied.append(sampled)
    tokens, attended, trained, *others = _check_values(rows, mask, keys, copied)
    if sampled is not None:
        sampled = others.pop()
        check_temperature(keys.sampling_temperature, sampled, temperature, trained.any(-1))
    return rows, mask, (tokens, attended, trained, others[0] if others else trained)


def counted_tokens(
    tensordict: TensorDictBase,
    keys: Any,
    attention_mask: Tensor,
    assistant_mask: Tensor,
    loss_masks: Sequence[NestedKey],
) -> Tensor:
    """Find the trained tokens, ``[N, S]`` bool.

    These are the sampled tokens of valid rows that have a score and that no present entry of
    ``loss_masks`` masks.
    """
    if attention_mask.ndim != 2:
        raise ValueError(
            f"rows must be a batch, [N, S], but the entry {keys.attention_mask!r} has shape "
            f"{tuple(attention_mask.shape)}: take rows[i : i + 1], or collate([row]) of the "
            "ConversationDataset."
        )
    check_like(keys.assistant_mask, assistant_mask, keys.attention_mask, attention_mask.shape)
    for key, mask in ((keys.attention_mask, attention_mask), (keys.assistant_mask, assistant_mask)):
        check_mask(f"the entry {key!r} of rows", mask, mask.shape)
    mask = scored_tokens(attention_mask, assistant_mask)
    valid = tensordict.get(keys.valid, None)
    if valid is not None:
        check_like(keys.valid, valid, keys.attention_mask, mask.shape[:1])
        mask &= read_valid(tensordict, keys.valid, mask).unsqueeze(-1)
    for key in loss_masks:
        given = tensordict.get(key, None)
        if given is not None:
            mask &= _loss_mask(key, given, mask.shape)
    return mask


def _loss_mask(key: NestedKey, mask: Tensor, shape: torch.Size) -> Tensor:
    """Reshape one of TorchRL's loss masks, of rows or tokens, to broadcast with ``[N, S]``."""
    n, s = shape
    if tuple(mask.shape) not in ((n,), (n, 1), (n, s), (n, s, 1)):
        raise ValueError(
            f"the loss mask {key!r} of rows must have shape [N] or [N, S], with or without a trailing "
            f"1, where [N, S] is {(n, s)}, got {tuple(mask.shape)}. Drop it, or set loss_mask_key to "
            "another entry or None."
        )
    check_mask(f"the loss mask {key!r} of rows", mask, mask.shape)
    return mask.reshape(n, s if mask.shape[1:2] == (s,) else 1)


def warn_of_no_correction(rows: dict[str, Tensor], mask: Tensor, keys: Any) -> bool:
    """Warn if the old log-probabilities are the sampler's; return whether they could be compared.

    Tokens whose log-probabilities are both 0 are not compared: they were certain.
    """
    old, sampler = rows["sample_log_prob"], rows["sampler_log_prob"]
    compared = mask & ((old != 0) | (sampler != 0))
    has_compared, differ = on_cpu(compared.any(), (compared & (old != sampler)).any())
    if has_compared and not differ:
        _logger.warning(
            "%r equals %r on all trained tokens: there is nothing to correct, and all weights are 1. "
            "ExperienceMaker(old_log_probs='actor') makes the old log-probabilities the actor's own, "
            "which differ from the sampler's.",
            keys.sample_log_prob,
            keys.sampler_log_prob,
        )
    return bool(has_compared)


def check_outputs(outputs: Mapping[str, Tensor], mask: Tensor) -> None:
    """Refuse models' outputs, ``[N, S]`` by name, that are not finite on a token that counts.

    The loss may hide them: a ratio of 0 trains nothing. One synchronisation with the device.
    """
    wrongs = [~x.detach().isfinite() for x in outputs.values()]
    for i, count, (row, token) in _wrong_places(mask, wrongs, _counts(mask, wrongs)):
        name, value = list(outputs.items())[i]
        raise ValueError(
            f"{name} must be finite on sampled tokens, got {value[row, token].item()} (row {row}, "
            f"token {token}) and {count - 1} more: {MODEL_FAULT}"
        )


def check_total(total: object) -> None:
    """Refuse a total that is neither a number nor a tensor."""
    if total is None or (isinstance(total, (Real, Tensor)) and not isinstance(total, bool)):
        return
    raise TypeError(
        "total must be a number or a tensor, loss.total(rows) of the whole batch's rows, got "
        f"{total!r}."
    )


def _check_constant(rows: dict[str, Tensor], keys: Any) -> None:
    """Refuse entries with a graph: gradients through them could cancel the loss's."""
    for name in FLOATING:
        if name in rows and rows[name].requires_grad:
            raise ValueError(
                f"{getattr(keys, name)!r} must be a constant of the loss, but it carries a graph: "
                "compute it under torch.no_grad(), or detach() it."
            )


def _check_values(
    rows: dict[str, Tensor], mask: Tensor, keys: Any, copied: Sequence[Tensor]
) -> list[Tensor]:
    """Refuse NaN, infinity, padding and positive log-probabilities on tokens that count.

    Returns tensors on the CPU, copied by the same, one synchronisation with the device.
    """
    finite = "be finite on sampled tokens"
    unknown = "If the sampler's are unknown, use no correction or objective that reads them."
    fixes = {"sampler_log_prob": f"{unknown} {_FIX}"}
    checks = [
        (name, ~rows[name].isfinite(), finite, fixes.get(name, _FIX))
        for name in FLOATING
        if name in rows
    ]
    attended = (
        f"be false on padding, where {keys.attention_mask!r} is false",
        "Fix what wrote them.",
    )
    checks.append(("assistant_mask", ~rows["attention_mask"], *attended))
    for name in LOG_PROBS:
        if name in rows:
            checks.append((name, rows[name] > LOG_PROB_ROUNDING, *NO_LOG_PROB))
    if "weight" in rows and "advantage" not in rows:
        imitated = "be 0 or more for objective='sft', which imitates tokens", _FIX
        checks.append(("weight", rows["weight"] < 0, *imitated))
    wrongs = [wrong for _, wrong, _, _ in checks]
    counts, *on_host = on_cpu(_counts(mask, wrongs), *copied)
    for i, count, (row, token) in _wrong_places(mask, wrongs, counts):
        name, _, must, advice = checks[i]
        raise ValueError(
            f"{getattr(keys, name)!r} must {must}, but {count} are not, the first in row {row} at "
            f"token {token}: {rows[name][row, token].item()}. {advice}"
        )
    return on_host


def _counts(mask: Tensor, wrongs: Sequence[Tensor]) -> Tensor:
    """Count the tokens that count on which each entry is wrong."""
    return torch.stack([mask & wrong for wrong in wrongs]).sum((1, 2))


def _wrong_places(
    mask: Tensor, wrongs: Sequence[Tensor], counts: Tensor
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield index, count and first place of each entry that is wrong on tokens that count."""
    for i, count in enumerate(counts.tolist()):
        if count:
            row, token = (mask & wrongs[i]).nonzero()[0].tolist()
            yield i, count, (row, token)
