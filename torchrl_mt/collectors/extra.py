"""What a workflow returns beside the rewards: entries of its own for every turn.

Every episode of a batch has the same ones, of the same kind, and none that the collector writes
itself: so nothing that was returned is lost on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from tensordict import TensorDictBase, is_tensor_collection, lazy_stack
from tensordict.utils import is_non_tensor

__all__ = ["LEDGER_KEYS", "ExpectedExtra", "ExtraKinds", "check_extra", "join_extra"]

LEDGER_KEYS: tuple[tuple[str, ...], ...] = (
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
)
"""What the collector itself writes of every turn, with all that lies below."""

ExtraKinds: TypeAlias = Mapping[tuple[str, ...], str]
"""The kind of each entry: dtype and shape of a turn's tensor, or that it is none."""

_OBJECT = "not a tensor"


def check_extra(extra: TensorDictBase | None, expected: ExtraKinds | None = None) -> ExtraKinds:
    """Refuse entries that a batch could not hold beside those of other episodes.

    Args:
        extra: what a workflow returned of an episode, ``[T]``; ``None`` if that was nothing.
        expected: what this function returned of an earlier episode; ``None`` if there was none.

    Returns:
        What is expected of all other episodes.

    Raises:
        ValueError: if an entry is one that the collector writes itself, its kind changes from turn
            to turn, or the entries or their kinds are not those expected.

    Examples:
        >>> from tensordict import TensorDict
        >>> kinds = check_extra(TensorDict({"score": torch.zeros(2, 1)}, [2]))
        >>> kinds
        {('score',): 'torch.float32 [1]'}
        >>> check_extra(TensorDict({"rank": torch.zeros(3, 1)}, [3]), kinds)
        Traceback (most recent call last):
        ValueError: a workflow's episodes must all return the same entries: 'score' is missing, ...
    """
    kinds = [] if extra is None else [dict(_kinds(step)) for step in extra.unbind(0)]
    found = kinds[0] if kinds else {}
    for key in found:
        if any(key[: len(own)] == own for own in LEDGER_KEYS):
            raise ValueError(
                f"a workflow's TensorDict must not have {_name(key)}: the collector writes it itself; "
                "give the entry another name"
            )
    for k, others in enumerate(kinds):
        if difference := _difference(others, found):
            raise ValueError(
                "a workflow's TensorDict must have the same entries in every turn, unlike the first "
                f"in turn {k}: {difference}; pad what differs in length"
            )
    if expected is not None and (difference := _difference(found, expected)):
        raise ValueError(
            "a workflow's episodes must all return the same entries: "
            f"{difference}, unlike in the first episode"
        )
    return found


@dataclass
class ExpectedExtra:
    """What is known of the entries that episodes are to have."""

    kinds: ExtraKinds | None = None
    """Fixed by the first episode that is checked."""
    _step: TensorDictBase | None = None
    """A turn of that episode."""

    def check(self, extra: TensorDictBase | None) -> None:
        """Refuse entries unlike those of the first episode; see :func:`check_extra`."""
        self.kinds = check_extra(extra, self.kinds)
        if self._step is None and self.kinds and extra is not None:
            self._step = extra[0]

    def blank(self, turns: int) -> TensorDictBase | None:
        """Entries for an episode whose workflow did not come to return any, as far as they are known.

        Args:
            turns: how many turns it has.
        """
        return None if self._step is None else _blank(self._step, turns)


def join_extra(
    extras: Sequence[TensorDictBase | None], blank_turns: Sequence[int] | None = None
) -> TensorDictBase | None:
    """The entries of several episodes, one after the other; ``None`` if they have none.

    Args:
        extras: what workflows returned of each episode, ``[T]`` of the episode.
        blank_turns: for each episode, how many turns it has if it may lack entries that others have
            (zeros, and ``None`` for objects, stand for them), else 0.

    Returns:
        Their entries in host memory, ``[ΣT]``.

    Raises:
        ValueError: as in :func:`check_extra`.
    """
    given = next((extra for extra in extras if extra is not None), None)
    if given is not None and blank_turns is not None:
        extras = [
            _blank(given[0], turns) if extra is None and turns else extra
            for extra, turns in zip(extras, blank_turns, strict=True)
        ]
    expected = None
    for extra in extras:
        expected = check_extra(extra, expected)
    if not expected:
        return None
    steps = (extra.detach().cpu().unbind(0) for extra in extras if extra is not None)
    return lazy_stack([step for of_episode in steps for step in of_episode])


def _blank(step: TensorDictBase, turns: int) -> TensorDictBase:
    """Turns with the entries of a step, and nothing in them."""
    blank = step.apply(torch.zeros_like, filter_empty=False)
    assert blank is not None
    for key, kind in _kinds(step):
        if kind == _OBJECT:
            blank.set_non_tensor(key, None)
    return lazy_stack([blank] * turns)


def _kinds(
    step: TensorDictBase, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each leaf of a turn, and its kind."""
    for name in step.keys():  # noqa: SIM118  (a TensorDict iterates over its steps)
        value, key = step.get(name), (*above, name)
        if isinstance(value, torch.Tensor):
            yield key, f"{value.dtype} {list(value.shape)}"
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from _kinds(value, key)
        else:
            yield key, _OBJECT


def _difference(found: ExtraKinds, expected: ExtraKinds) -> str:
    """In what entries differ from those expected; empty if they do not."""
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
    """A key as people write it."""
    return repr(key[0] if len(key) == 1 else key)
