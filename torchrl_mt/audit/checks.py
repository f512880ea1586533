"""The checks of rows by themselves, each a function that returns what it found."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from torchrl_mt.audit.prefixes import ends_of, keys_of, mix, nth, spread
from torchrl_mt.audit.report import Finding, finding, not_checked
from torchrl_mt.audit.rows import Rows
from torchrl_mt.chat.encoding import decode
from torchrl_mt.objectives import Passes, row_log_probs
from torchrl_mt.scoring.forward import scoring_mode

__all__ = [
    "duplicates",
    "encoded_again",
    "equal_rows",
    "log_probs",
    "masks",
    "recomputed",
    "rows_that_train",
    "trained_once",
    "versions",
]

_ROUNDING = 1e-4
"""How far above 0 a log-probability may be."""


def masks(rows: Rows) -> Finding:
    """No padding and no first token is trained, and something is."""
    if not rows.trained.any():
        return Finding("masks", False, len(rows.stray), "rows, none of which trains a token")
    wrong = rows.trained | (rows.of_tokens("stray") > 0)
    text = f"rows that train their first token or padding ({rows.stray.sum()} places of padding)"
    return finding("masks", rows, wrong & (rows.token == 0), text)


def rows_that_train(rows: Rows) -> Finding:
    """Rows without a trained token: answers that are empty, or left out on purpose."""
    count = np.bincount(rows.row, rows.trained, len(rows.stray))[rows.row]
    bad = (count == 0) & (rows.token == 0)
    return finding("rows that train", rows, bad, "rows that train no token", ok=None)


def versions(rows: Rows) -> Finding:
    """Versions are whole numbers from 0 on, and do not fall along a row."""
    if rows.version is None:
        return not_checked("versions", "rows have no versions")
    row, version = rows.row[rows.trained], rows.version[rows.trained]
    wrong = ~((version >= 0) & (version == np.floor(version)))
    wrong[1:] |= (row[1:] == row[:-1]) & (version[1:] < version[:-1])
    text = "trained tokens whose version is no whole number from 0 on, or falls along the row"
    return finding("versions", rows, spread(rows, np.flatnonzero(rows.trained)[wrong]), text)


def log_probs(rows: Rows) -> Finding:
    """Log-probabilities are finite and at most 0."""
    if rows.log_prob is None:
        return not_checked("log-probs", "rows have no log-probabilities")
    bad = rows.trained & ~((rows.log_prob > -np.inf) & (rows.log_prob <= _ROUNDING))
    text = "trained tokens whose log-probability is not finite or above 0"
    return finding("log-probs", rows, bad, text)


def recomputed(rows: Rows, model: nn.Module | None, tolerance: float) -> Finding:
    """The model gives the log-probabilities that the newest version gave."""
    check, scored = "recomputed", rows.trained & (rows.token > 0)
    temperature = np.unique([1.0] if rows.temperature is None else rows.temperature)
    if model is None:
        return not_checked(check, "there is no `model`")
    if rows.log_prob is None or not scored.any():
        return not_checked(check, "rows have no log-probabilities")
    if len(temperature) > 1 or not temperature[0] > 0:
        return not_checked(check, "rows have several temperatures, or images")
    size = getattr(getattr(model, "config", None), "vocab_size", np.inf)
    if rows.id.max() >= size:
        raise ValueError(f"model must know all tokens, got {rows.id.max()} for its {size} tokens.")
    shape, at = (len(rows.stray), rows.token.max() + 1), (rows.row, rows.token)
    inputs = [
        torch.zeros(shape, dtype=dtype, device="cpu")
        for dtype in (torch.int64, torch.bool, torch.bool)
    ]
    for table, values in zip(inputs, (rows.id, np.ones_like(scored), scored), strict=True):
        table[at] = torch.from_numpy(values)
    device = next(model.parameters()).device
    with scoring_mode(model):
        passes = Passes(temperature=float(temperature[0]))
        found, _ = row_log_probs(model, *(each.to(device) for each in inputs), passes=passes)
    gap = np.abs(found.double().cpu().numpy()[at] - rows.log_prob)
    text, newest = _gaps(gap[scored], tolerance), scored
    if rows.version is not None:
        version = rows.version[scored].max()
        newest = scored & (rows.version == version)
        if newest.sum() < scored.sum():
            text = f"of version {version:g} {_gaps(gap[newest], tolerance)}; of all versions {text}"
        if not (gap[newest] <= tolerance).all():
            text += f"; the model should be version {version:g}"
    return finding(check, rows, newest & ~(gap <= tolerance), text)


def _gaps(gap: np.ndarray, tolerance: float) -> str:
    beyond = np.mean(~(gap <= tolerance))
    return (
        f"median {np.median(gap):.2g}, largest {gap.max():.2g}, {beyond:.1%} beyond {tolerance:g}"
    )


def trained_once(rows: Rows) -> Finding:
    """No token is trained in two rows, as far as rows tell by themselves."""
    if rows.episode is None or rows.turn is None:
        why = "without `sampled`, or episodes and turns, two answers to one prompt look alike"
        return not_checked("trained once", why)
    # An answer ends its turn: it may be nowhere else in it.
    stays = np.append((rows.row[1:] == rows.row[:-1]) & (rows.turn[1:] == rows.turn[:-1]), False)
    answer = rows.trained.copy()
    for k in range(len(answer) - 2, -1, -1):
        answer[k] &= not stays[k] or answer[k + 1]
    keys, turn, answer = (
        x[rows.trained] for x in (keys_of(rows, "episode", "copy"), rows.turn, answer)
    )
    _, inverse, count = np.unique(keys, return_inverse=True, return_counts=True)
    again = ((count[inverse] > 1) & ~answer) | (nth(mix(keys, turn)) > 0)
    text = "tokens that another row trains as well"
    return finding("trained once", rows, spread(rows, np.flatnonzero(rows.trained)[again]), text)


def duplicates(rows: Rows) -> Finding:
    """No row is there twice."""
    if rows.episode is None:
        return not_checked("duplicates", "rows have no episodes")
    again = nth(keys_of(rows, "episode", "copy", turns=True)[ends_of(rows)]) > 0
    return finding(
        "duplicates",
        rows,
        spread(rows, np.flatnonzero(rows.token == 0)[again]),
        "rows that are there twice",
    )


def equal_rows(rows: Rows) -> Finding:
    """Rows with the tokens of a row of another episode."""
    ends = ends_of(rows)
    keys = keys_of(rows)[ends]
    episode = rows.row if rows.episode is None else rows.of_tokens("episode")
    equal = (nth(keys) > 0) & (nth(mix(keys, episode[ends])) == 0)
    across = equal & (nth(mix(keys, rows.of_tokens("group")[ends])) == 0)
    text = f"rows with the tokens of another episode, {across.sum()} of them across groups"
    return finding(
        "equal rows", rows, spread(rows, np.flatnonzero(rows.token == 0)[equal]), text, ok=None
    )


def encoded_again(rows: Rows, tokenizer: Any) -> Finding:
    """Rows that would be other tokens if their text was encoded again."""
    if tokenizer is None:
        return not_checked("encoded again", "there is no `tokenizer`")
    begins = np.flatnonzero(rows.token == 0)
    bad = np.zeros(len(rows.id), bool)
    for begin, ids in zip(begins, np.split(rows.id, begins[1:]), strict=True):
        text = decode(tokenizer, ids.tolist())
        again = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not np.array_equal(again, ids):
            size = min(len(again), len(ids) - 1)
            bad[begin + np.append(again[:size] != ids[:size], True).argmax()] = True
    text = "rows whose text would be encoded otherwise; no fault unless a trainer does so"
    return finding("encoded again", rows, bad, text, ok=None)
