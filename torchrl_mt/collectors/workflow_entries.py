"""Entries per turn that a workflow returns beside the rewards.

All episodes of a batch have the same entries, with the same dtypes and shapes, and none that the
collector writes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from tensordict import TensorDictBase, is_tensor_collection, lazy_stack
from tensordict.utils import is_non_tensor

__all__ = ["COLLECTOR_KEYS", "EntryKinds", "ExpectedEntries", "check_entries", "join_entries"]

COLLECTOR_KEYS: tuple[tuple[str, ...], ...] = (
    ("tokens",),
    ("log_probs",),
    ("versions",),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("collector",),
    ("group",),
    ("turn",),
    ("seconds",),
    ("text",),
    ("info",),
    ("sampling",),
    ("finish_reason",),
    ("stop_reason",),
    ("valid",),
    ("data",),
    ("images", "new"),
)
"""Keys that the collector writes itself, nested ones included."""

EntryKinds: TypeAlias = Mapping[tuple[str, ...], str]
"""Kind of each entry: dtype and shape of a turn's tensor, or ``"not a tensor"``."""

_OBJECT = "not a tensor"


def check_entries(entries: TensorDictBase | None, expected: EntryKinds | None = None) -> EntryKinds:
    """Check that an episode's entries can be batched with those of other episodes.

    Args:
        entries: the workflow's entries of an episode, ``[T]``; ``None`` for no entries.
        expected: the kinds of an earlier episode; ``None`` for the first.

    Returns:
        The kinds of the entries.

    Raises:
        ValueError: if the collector writes an entry itself, its kind changes between turns, or the
            kinds differ from ``expected``.

    Examples:
        >>> from tensordict import TensorDict
        >>> kinds = check_entries(TensorDict({"score": torch.zeros(2, 1)}, [2]))
        >>> kinds
        {('score',): 'torch.float32 [1]'}
        >>> check_entries(TensorDict({"rank": torch.zeros(3, 1)}, [3]), kinds)
        Traceback (most recent call last):
        ValueError: a workflow's episodes must all return the same entries: 'score' is missing, ...
    """
    kinds = [] if entries is None else [dict(_kinds(step)) for step in entries.unbind(0)]
    found = kinds[0] if kinds else {}
    for key in found:
        if any(key[: len(own)] == own for own in COLLECTOR_KEYS):
            raise ValueError(
                f"a workflow's TensorDict must not have {_name(key)}: the collector writes it itself; "
                "give the entry another name."
            )
    for k, others in enumerate(kinds):
        if difference := _difference(others, found):
            raise ValueError(
                "a workflow's TensorDict must have the same entries in every turn, unlike the first "
                f"in turn {k}: {difference}; pad what differs in length."
            )
    if expected is not None and (difference := _difference(found, expected)):
        raise ValueError(
            "a workflow's episodes must all return the same entries: "
            f"{difference}, unlike in the first episode."
        )
    return found


@dataclass
class ExpectedEntries:
    """The entries of the first episode, which all others must have."""

    kinds: EntryKinds | None = None
    """Kinds of the entries, by :func:`check_entries`."""
    _step: TensorDictBase | None = None
    """One turn of the first episode."""

    def check(self, entries: TensorDictBase | None) -> None:
        """Check entries against those of the first episode; see :func:`check_entries`."""
        self.kinds = check_entries(entries, self.kinds)
        if self._step is None and self.kinds and entries is not None:
            self._step = entries[0]

    def blank(self, turns: int) -> TensorDictBase | None:
        """Blank entries for an episode without any; ``None`` until an episode had some."""
        return None if self._step is None else _blank(self._step, turns)


def join_entries(
    episodes: Sequence[TensorDictBase | None], blank_turns: Sequence[int]
) -> TensorDictBase | None:
    """Concatenate the entries of several episodes.

    Args:
        episodes: the workflow's entries of each episode, ``[T]``.
        blank_turns: for each episode, its number of turns if missing entries are to be filled (with
            zeros, and ``None`` for objects), else 0.

    Returns:
        The entries in host memory, ``[ΣT]``; ``None`` if no episode has any.

    Raises:
        ValueError: as in :func:`check_entries`.
    """
    expected, steps = None, list[TensorDictBase]()
    model = next((entries for entries in episodes if entries is not None), None)
    for entries, turns in zip(episodes, blank_turns, strict=True):
        if entries is None and model is not None and turns:
            entries = _blank(model[0], turns)
        expected = check_entries(entries, expected)
        if entries is not None:
            steps += entries.detach().cpu().unbind(0)
    return lazy_stack(steps) if expected else None


def _blank(step: TensorDictBase, turns: int) -> TensorDictBase:
    """Turns with the entries of a step, all zero or ``None``."""
    blank = step.apply(torch.zeros_like, filter_empty=False)
    assert blank is not None
    for key, kind in _kinds(step):
        if kind == _OBJECT:
            blank.set_non_tensor(key, None)
    return lazy_stack([blank] * turns)


def _kinds(
    step: TensorDictBase, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Key and kind of each leaf of a turn."""
    for name in step.keys():  # noqa: SIM118  (a TensorDict iterates over its steps)
        value, key = step.get(name), (*above, name)
        if isinstance(value, torch.Tensor):
            yield key, f"{value.dtype} {list(value.shape)}"
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from _kinds(value, key)
        else:
            yield key, _OBJECT


def _difference(found: EntryKinds, expected: EntryKinds) -> str:
    """Describe how kinds differ from those expected; empty if they do not."""
    if found == expected:
        return ""
    parts = [f"{_name(key)} is missing" for key in expected if key not in found]
    parts += [f"{_name(key)} is new" for key in found if key not in expected]
    parts += [
        f"{_name(key)} is {found[key]} rather than {kind}"
        for key, kind in expected.items()
        if found.get(key, kind) != kind
    ]
    return ", ".join(parts)


def _name(key: tuple[str, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)
