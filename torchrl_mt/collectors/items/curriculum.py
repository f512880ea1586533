"""Curricula: data that chooses the next item by how earlier episodes went.

A resumed curriculum makes the same choices as one that was never interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tensordict import TensorDictBase

__all__ = ["Curriculum", "SuccessRateCurriculum", "WeightedCurriculum"]


@runtime_checkable
class Curriculum(Protocol):
    """Data for a collector that chooses items by how earlier episodes went.

    Any object with these two methods is a curriculum. They are never called at the same time, and may be
    slow: running episodes do not wait for them. With ``state_dict()`` and ``load_state_dict(state)``
    too, a run can be resumed exactly.
    """

    def next(self) -> Any:
        """Choose the item to play next; raise ``StopIteration`` to end the run."""

    def report(self, item: Any, episodes: list[TensorDictBase]) -> None:
        """Learn how the episodes of an item went. Each item is reported once.

        Args:
            item: the item that :meth:`next` returned.
            episodes: finished episodes in TED, ``[T]`` each: the whole group, or fewer if some were
                rejected.
        """


class _Choosing:
    """Base of curricula over items with an index; knows which items are being played."""

    def __init__(self, items: Sequence[Any], seed: int) -> None:
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            raise TypeError(
                f"items must have a length and items by index, got a {type(items).__name__}: pass "
                "list(items)."
            )
        if not len(items):
            raise ValueError("items must hold at least one item, got none.")
        self.items = items
        self._random = np.random.default_rng(seed)
        # By identity: items may be equal, and need not be hashable.
        self._played: dict[int, tuple[Any, deque[int]]] = {}

    def __len__(self) -> int:
        return len(self.items)

    def next(self) -> Any:
        """Choose the item to play next."""
        return self.item_of(self._choose())

    def report(self, item: Any, episodes: list[TensorDictBase]) -> None:
        """Learn from the episodes of an item.

        Raises:
            ValueError: if the item is not being played.
        """
        index = self.key_of(item)
        _, indices = self._played[id(item)]
        indices.popleft()
        if not indices:
            del self._played[id(item)]
        if episodes:
            self._learn(index, episodes)

    def key_of(self, item: Any) -> int:
        """The index of an item that is being played."""
        if id(item) not in self._played:
            raise ValueError(
                f"item must be one that next() gave and that was not reported yet, got {item!r}."
            )
        return self._played[id(item)][1][0]

    def item_of(self, key: int) -> Any:
        """The item at an index, marked as being played."""
        item = self.items[key]
        self._played.setdefault(id(item), (item, deque()))[1].append(key)
        return item

    def state_dict(self) -> dict[str, Any]:
        """State that determines further choices, without the items that are being played."""
        return {
            "size": len(self),
            "random": self._random.bit_generator.state,
            **self._own_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` over equal items; none is being played then.

        Raises:
            ValueError: if the number of items differs.
        """
        if state_dict["size"] != len(self):
            raise ValueError(
                f"state_dict must be of as many items, got one of {state_dict['size']} for {len(self)}: "
                "give the items of the saved run."
            )
        self._random.bit_generator.state = state_dict["random"]
        self._played = {}
        self._load_own_state(state_dict)

    def _choose(self) -> int:
        raise NotImplementedError

    def _learn(self, index: int, episodes: list[TensorDictBase]) -> None:
        raise NotImplementedError

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_own_state(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


class SuccessRateCurriculum(_Choosing):
    """Prefers items that the policy solves sometimes, since groups without spread teach nothing.

    Each item is played once, in random order. After that, items are drawn uniformly: with probability
    ``1 - revisit`` from those whose success rate is in ``[low, high]``, else from the others.

    Args:
        items: the items, with a length and an index.
        low: minimum success rate.
        high: maximum success rate.
        success: returns the success of an episode in TED (``[T]``), from 0 to 1 or as a bool. Without
            it, an episode succeeds if the sum of its rewards is positive.
        window: number of an item's last episodes whose mean success is its rate.
        revisit: probability of drawing an item whose rate is outside, as the policy changes.
        seed: seed of all draws.

    Raises:
        ValueError: if there are no items, or a number is out of range.
        TypeError: if ``items`` has no length.

    Examples:
        >>> curriculum = SuccessRateCurriculum(["easy", "hard"], seed=0)
        >>> first, second = curriculum.next(), curriculum.next()
        >>> {first, second} == {"easy", "hard"}
        True
    """

    def __init__(
        self,
        items: Sequence[Any],
        low: float = 0.1,
        high: float = 0.9,
        *,
        success: Callable[[TensorDictBase], float] | None = None,
        window: int = 16,
        revisit: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(items, seed)
        if not 0 <= low <= high <= 1:
            raise ValueError(f"low and high must be rates with low <= high, got {low} and {high}.")
        if not 0 <= revisit <= 1:
            raise ValueError(f"revisit must be a probability, got {revisit}.")
        if window < 1:
            raise ValueError(f"window must be at least 1 episode, got {window}.")
        self.low, self.high = low, high
        self.success = _is_rewarded if success is None else success
        self.window = window
        self.revisit = revisit
        self._first = self._random.permutation(len(items))
        self._begun = 0
        """Number of items given out in the first round."""
        self._seen: dict[int, list[float]] = {}
        """Success of the last episodes of each item."""
        self._outside = np.zeros(len(items), dtype=bool)

    def rate(self, index: int) -> float | None:
        """Success rate of the item at ``index``; ``None`` before its first finished episode."""
        seen = self._seen.get(index)
        return sum(seen) / len(seen) if seen else None

    @property
    def num_inside(self) -> int:
        """Number of items whose rate is in ``[low, high]`` or not known yet."""
        return len(self) - int(self._outside.sum())

    def _choose(self) -> int:
        if self._begun < len(self):
            self._begun += 1
            return int(self._first[self._begun - 1])
        outside = bool(self._random.random() < self.revisit)
        chosen = np.flatnonzero(self._outside == outside)
        if not len(chosen):
            chosen = np.arange(len(self))
        return int(chosen[self._random.integers(len(chosen))])

    def _learn(self, index: int, episodes: list[TensorDictBase]) -> None:
        seen = self._seen.get(index, []) + [float(self.success(episode)) for episode in episodes]
        self._seen[index] = seen[-self.window :]
        self._judge(index)

    def _judge(self, index: int) -> None:
        """Update whether an item's rate is outside."""
        rate = self.rate(index)
        self._outside[index] = rate is not None and not self.low <= rate <= self.high

    def _own_state(self) -> dict[str, Any]:
        seen = {index: list(rates) for index, rates in self._seen.items()}
        return {"first": self._first.tolist(), "begun": self._begun, "seen": seen}

    def _load_own_state(self, state_dict: dict[str, Any]) -> None:
        self._first, self._begun = np.array(state_dict["first"]), state_dict["begun"]
        self._seen = {index: list(rates) for index, rates in state_dict["seen"].items()}
        self._outside[:] = False
        for index in self._seen:
            self._judge(index)


class WeightedCurriculum(_Choosing):
    """Draws items in proportion to weights, which episodes may change.

    Args:
        items: the items, with a length and an index.
        weights: ``[N]``, not negative and not all zero; uniform if ``None``.
        update: returns an item's new weight: ``update(weight, episodes)``, with the finished episodes in
            TED, ``[T]`` each. Without it, weights are constant.
        seed: seed of all draws.

    Raises:
        ValueError: if there are no items, or ``weights`` has another shape or other values.
        TypeError: if ``items`` has no length.

    Examples:
        >>> curriculum = WeightedCurriculum(["a", "b", "c"], [0.0, 1.0, 0.0])
        >>> curriculum.next()
        'b'
    """

    def __init__(
        self,
        items: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        update: Callable[[float, list[TensorDictBase]], float] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(items, seed)
        given = np.ones(len(items)) if weights is None else np.array(weights, dtype=np.float64)
        if given.shape != (len(items),):
            raise ValueError(
                f"weights must be one for each of the {len(items)} items, got shape {given.shape}."
            )
        if not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
            raise ValueError("weights must be finite, not negative and not all zero.")
        self.weights = given
        """float64 ``[N]``."""
        self.update = update

    def _choose(self) -> int:
        total = self.weights.cumsum()
        if not total[-1]:
            return int(self._random.integers(len(self)))  # Updates have set all weights to 0.
        return int(total.searchsorted(self._random.random() * total[-1], "right"))

    def _learn(self, index: int, episodes: list[TensorDictBase]) -> None:
        if self.update is None:
            return
        weight = float(self.update(float(self.weights[index]), episodes))
        if not (np.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"update must give a finite weight that is not negative, got {weight}."
            )
        self.weights[index] = weight

    def _own_state(self) -> dict[str, Any]:
        return {"weights": self.weights.tolist()}

    def _load_own_state(self, state_dict: dict[str, Any]) -> None:
        self.weights = np.array(state_dict["weights"])


def _is_rewarded(episode: TensorDictBase) -> float:
    return float(episode["next", "reward"].sum() > 0)
