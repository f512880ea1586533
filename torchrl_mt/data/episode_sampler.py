"""Whole episodes, or whole groups of episodes.

Without replacement, every stored episode is given out exactly once per epoch, those that arrive
during the epoch included.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.samplers.base import _SamplerMeta
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt.data.checkpoint import load_state, save_state
from torchrl_mt.data.sampling import draw_integers, draw_order, episode_storage
from torchrl_mt.data.steps import Objects, Rows
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["EpisodeSampler"]


class _KeepReplacement(_SamplerMeta):
    """Passes ``replacement`` on: TorchRL's metaclass would take it for a choice of class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super(_SamplerMeta, cls).__call__(*args, **kwargs)


class EpisodeSampler(Sampler, metaclass=_KeepReplacement):
    """Samples whole episodes, or whole groups of episodes.

    ``batch_size`` counts episodes (groups, with ``group_key``). The sample is flat, ``[sum of T]``:
    one episode after the other, each one's steps in order, the episodes of a group next to each
    other and oldest first.

    Args:
        replacement: if True, each draw is independent. If False, each stored episode is given out
            once per epoch in random order; the last batch of an epoch may hold fewer, and
            iterating over the buffer ends with the epoch.
        group_key: entry that tells the group of an episode (one value per episode); groups are then
            drawn whole: all episodes of the group that are stored (without replacement: and not
            given out yet).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_mt.data import EpisodeSampler, EpisodeStorage, EpisodeWriter
        >>> rb = ReplayBuffer(
        ...     storage=EpisodeStorage(100),
        ...     writer=EpisodeWriter(),
        ...     sampler=EpisodeSampler(replacement=False),
        ...     batch_size=2,
        ... )
        >>> done = torch.tensor([False, True, True, True])
        >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [4]))
        >>> sum(len(batch) for batch in rb)
        4
    """

    def __init__(self, *, replacement: bool = True, group_key: NestedKey | None = None) -> None:
        self.replacement = replacement
        self.group_key = group_key
        self._left = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._known = 0
        self._ran_out = False

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw ``batch_size`` episodes or groups.

        Args:
            storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
            batch_size: number of episodes, or of groups with ``group_key``.

        Returns:
            int64 ``[N]`` storage indices of their steps, and no marks.

        Raises:
            TypeError: if ``storage`` is another kind of storage.
            RuntimeError: if nothing is stored.
            ValueError: if ``batch_size`` is not positive.
        """
        storage = episode_storage(storage, self)
        if batch_size < 1:
            raise ValueError(f"batch_size counts episodes and must be positive, got {batch_size}")
        with storage.lock:
            if not storage.num_episodes:
                raise RuntimeError("cannot sample episodes: nothing is stored yet")
            if self.replacement:
                episodes = self._any(storage, batch_size)
            else:
                episodes = self._next(storage, batch_size)
            lengths = storage.table.lengths[episodes]
            spans: int | Tensor = lengths
            if bool((lengths == lengths[0]).all()):
                spans = int(lengths[0])
            index, _ = storage.select(episodes, torch.zeros_like(episodes), spans)
            return index, {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether an episode is stored."""
        return episode_storage(storage, self).num_episodes > 0

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        return episode_storage(storage, self).num_episodes

    @property
    def ran_out(self) -> bool:
        """Whether the last sample ended an epoch."""
        return self._ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._ran_out = value

    def _any(self, storage: EpisodeStorage, batch_size: int) -> Tensor:
        """Positions of episodes drawn independently."""
        if self.group_key is None:
            return draw_integers(storage.num_episodes, batch_size, self._rng)
        groups, number = self._groups(storage, torch.arange(storage.num_episodes, device="cpu"))
        return _members(groups, draw_integers(number, batch_size, self._rng))

    def _next(self, storage: EpisodeStorage, batch_size: int) -> Tensor:
        """Positions of the epoch's next episodes."""
        oldest, following = storage.table.oldest, storage.table.next
        left = self._left[self._left >= oldest]
        if len(left):
            left = torch.cat(
                [left, torch.arange(max(self._known, oldest), following, device="cpu")]
            )
        else:
            left = torch.arange(oldest, following, device="cpu")
        positions = left - oldest
        if self.group_key is None:
            number = len(left)
            members = drawn = draw_order(number, self._rng)[:batch_size]
        else:
            groups, number = self._groups(storage, positions)
            drawn = draw_order(number, self._rng)[:batch_size]
            members = _members(groups, drawn)
        stays = torch.ones(len(left), dtype=torch.bool, device="cpu")
        stays[members] = False
        self._left, self._known = left[stays], following
        self._ran_out = not len(self._left)
        after = number if self._ran_out else number - len(drawn)
        self._remaining_batches = -(-after // batch_size)
        return positions[members]

    def _groups(self, storage: EpisodeStorage, positions: Tensor) -> tuple[Tensor, int]:
        """The group of each episode, numbered from 0: int64 ``[E]``; and how many there are."""
        assert self.group_key is not None
        column = storage.first_values(self.group_key)
        if isinstance(column, Tensor) and column[:1].numel() == 1:
            values = column.reshape(-1).cpu()[positions]
            unique, groups = torch.unique(values, return_inverse=True)
            return groups, len(unique)
        if isinstance(column, Objects):
            numbers: dict[Any, int] = {}
            of = [numbers.setdefault(column.items[i], len(numbers)) for i in positions.tolist()]
            return torch.tensor(of, device="cpu"), len(numbers)
        got = "varying shapes" if isinstance(column, Rows) else f"shape {tuple(column.shape[1:])}"
        raise ValueError(f"group_key {self.group_key!r} must hold one value per step, got {got}")

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch."""
        return {
            "left": self._left.clone(),
            "known": self._known,
            "ran_out": self._ran_out,
            "remaining_batches": self._remaining_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the epoch where :meth:`state_dict` left it."""
        self._left = state_dict["left"].clone()
        self._known = state_dict["known"]
        self._ran_out = state_dict["ran_out"]
        self._remaining_batches = state_dict["remaining_batches"]

    def dumps(self, path: Any) -> None:
        """Save the state in the folder ``path``."""
        save_state(self.state_dict(), path)

    def loads(self, path: Any) -> None:
        """Load the state from the folder ``path``."""
        self.load_state_dict(load_state(path))

    def _empty(self) -> None:
        """Forget the epoch."""
        self._left = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._known = 0
        self._ran_out = False
        self._remaining_batches = Sampler._remaining_batches

    def __repr__(self) -> str:
        return f"EpisodeSampler(replacement={self.replacement}, group_key={self.group_key!r})"


def _members(groups: Tensor, drawn: Tensor) -> Tensor:
    """Where the members of each drawn group are, group after group: int64 ``[N]``."""
    by_group = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups)
    ends = sizes.cumsum(0)[drawn]
    sizes = sizes[drawn]
    total = sizes.cumsum(0)
    first = torch.repeat_interleave(ends - total, sizes)
    return by_group[first + torch.arange(len(first), device="cpu")]
