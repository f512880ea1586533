"""A sampler of whole episodes or whole groups of episodes.

Without replacement, every stored episode is given out exactly once per epoch, including those that
are written during the epoch. With a group size, this holds for the complete groups.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from torchrl_mt._hosts.torchrl import ConstructorSignature
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.data._store.selection import Clips
from torchrl_mt.data.checkpoint import SavesState
from torchrl_mt.data.samplers.draws import (
    draw_integers,
    draw_order,
    episode_storage,
    require_episodes,
)
from torchrl_mt.data.samplers.episode_groups import Groups
from torchrl_mt.data.samplers.epoch import Epoch
from torchrl_mt.data.storage import EpisodeStorage

__all__ = ["EpisodeSampler"]


class _KeepReplacement(type(Sampler)):  # type: ignore[misc]
    """Passes ``replacement`` on, which TorchRL's metaclass would use to choose a class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return type.__call__(cls, *args, **kwargs)


class EpisodeSampler(SavesState, Sampler, metaclass=_KeepReplacement):
    """Samples whole episodes, or whole groups of episodes.

    ``batch_size`` counts episodes (groups, with ``group_key``). The sample is flat, ``[sum of T]``:
    one episode after the other. The episodes of a group are next to each other, oldest first.

    Args:
        replacement: True makes each draw independent. False gives out each stored episode once per
            epoch in random order; the last batch of an epoch may be smaller, and iterating over the
            buffer ends with the epoch. An episode counts as given out when it is drawn, even if
            reading it then fails.
        group_key: entry with the group of an episode (one value per episode). Groups are then drawn
            whole: all stored episodes of a group (without replacement: those not given out yet). The
            oldest group may be incomplete, as episodes are evicted one by one.
        group_size: draw only groups of exactly this many stored episodes (without replacement: with
            none given out yet), so none that is partly evicted or not complete yet. Needs
            ``group_key``.
        max_sample_count: number of epochs in which an episode is given out, as in TorchRL's
            ``ConsumingSampler``; 1 consumes it at once. The episode stays stored until it is evicted.
            None for no limit. Needs ``replacement=False``.

    Raises:
        ValueError: if ``group_size`` or ``max_sample_count`` is not a positive integer, or is given
            without the argument that it needs.

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

    __signature__ = ConstructorSignature()

    ran_out = False
    """Whether the last sample ended an epoch."""

    def __init__(
        self,
        *,
        replacement: bool = True,
        group_key: NestedKey | None = None,
        group_size: int | None = None,
        max_sample_count: int | None = None,
    ) -> None:
        if max_sample_count is not None:
            max_sample_count = check_positive_integer("max_sample_count", max_sample_count)
            if replacement:
                raise ValueError(
                    f"max_sample_count={max_sample_count} counts epochs: use it with "
                    f"replacement=False."
                )
        if group_size is not None:
            group_size = check_positive_integer("group_size", group_size)
            if group_key is None:
                raise ValueError(
                    f"group_size={group_size} needs group_key, the entry that tells the group of an "
                    f"episode: 'group' with a MultiTurnCollector."
                )
        self.replacement = replacement
        self.group_key = group_key
        self.group_size = group_size
        self.max_sample_count = max_sample_count
        self._epoch = Epoch(max_sample_count)
        self._known_groups: tuple[EpisodeStorage, int, Groups] | None = None
        """Cached groups, with their storage and its revision."""
        self._order: Tensor | None = None
        """Groups that are left in the epoch, in random order."""
        self._order_of: tuple[int, ...] = ()
        """Summary of what was stored when ``_order`` was drawn; a loaded order needs the same."""

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[Any, Any]]:
        """Draw ``batch_size`` episodes or groups.

        Args:
            storage: an :class:`~torchrl_mt.data.EpisodeStorage`.
            batch_size: number of episodes, or of groups with ``group_key``.

        Returns:
            int64 ``[N]`` handles of their steps, and an empty ``info``.

        Raises:
            TypeError: if ``storage`` is another kind of storage.
            RuntimeError: if nothing is stored, no group has ``group_size`` episodes, or all episodes
                were given out ``max_sample_count`` times.
            ValueError: if ``batch_size`` is not positive.
        """
        storage = episode_storage(storage, self)
        if batch_size < 1:
            raise ValueError(f"batch_size counts episodes and must be positive, got {batch_size}.")
        with storage.lock:
            require_episodes(storage, "episodes")
            if self.group_size is not None:
                self._check_size(self._groups(storage))
            if self.replacement:
                episodes = self._draw_any(storage, batch_size)
            else:
                episodes = self._draw_next(storage, batch_size)
            lengths = storage.table.lengths[episodes].numpy()
            same = (lengths == lengths[0]).all()
            spans = int(lengths[0]) if same else lengths
            return storage.select(Clips(episodes.numpy(), 0, spans)), {}

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        """Count the episodes, or groups of ``group_size``, that are stored and not used up."""
        storage = episode_storage(storage, self)
        with storage.lock:
            oldest = storage.table.oldest
            self._epoch.follow(oldest, storage.table.next)
            spent = self._epoch.spent
            if self.group_size is None or not storage.num_episodes:
                return storage.num_episodes - len(spent)
            return len(self._groups(storage).left(_ordered(spent) - oldest))

    def _draw_any(self, storage: EpisodeStorage, batch_size: int) -> Tensor:
        """Draw episodes independently; return their positions."""
        if self.group_key is None:
            return draw_integers(storage.num_episodes, batch_size, self._rng)
        groups = self._groups(storage)
        drawn = draw_integers(len(groups.drawable), batch_size, self._rng)
        return groups.members(groups.drawable[drawn])

    def _draw_next(self, storage: EpisodeStorage, batch_size: int) -> Tensor:
        """Draw the epoch's next episodes; return their positions."""
        epoch, oldest = self._epoch, storage.table.oldest
        epoch.follow(oldest, storage.table.next)
        if not len(epoch):
            epoch.restart()
            self._order = None
        if self.group_key is None:
            positions = epoch.draw(batch_size, self._rng) - oldest
            left = len(epoch)
        else:
            positions = self._draw_next_groups(self._groups(storage), oldest, batch_size)
            assert self._order is not None
            left = len(self._order)
        self.ran_out = not left
        if not len(positions):
            raise RuntimeError(
                f"cannot sample episodes: all that are stored were given out "
                f"max_sample_count={self.max_sample_count} times; write others first."
            )
        units = left or self._sampleable_count(storage, batch_size)
        self._remaining_batches = -(-units // batch_size)
        return positions

    def _draw_next_groups(self, groups: Groups, oldest: int, number: int) -> Tensor:
        """Draw the epoch's next groups; return the positions of members not given out yet."""
        if self._order is None:
            self._order = self._new_order(groups, oldest)
        if not len(self._order):
            # The remaining episodes are in no group that may be drawn.
            self._epoch.restart()
            self._order = self._new_order(groups, oldest)
        given = self._epoch.given
        drawn, self._order = self._order[:number], self._order[number:]
        members = [i for i in groups.members(drawn).tolist() if i + oldest not in given]
        self._epoch.give(i + oldest for i in members)
        return torch.tensor(members, dtype=torch.int64, device="cpu")

    def _new_order(self, groups: Groups, oldest: int) -> Tensor:
        """Shuffle the groups that are left in the epoch."""
        left = groups.left(_ordered(self._epoch.given) - oldest)
        self._order_of = (oldest, len(groups.of), len(groups), self.group_size or 0)
        return left[draw_order(len(left), self._rng)]

    def _check_size(self, groups: Groups) -> None:
        """Refuse to draw if no group has ``group_size`` episodes."""
        if not len(groups.drawable):
            least, most = groups.sizes
            raise RuntimeError(
                f"no group of group_size={self.group_size} episodes is stored: the {len(groups)} "
                f"groups by {self.group_key!r} have {least} to {most} episodes; give EpisodeStorage "
                f"room for all episodes of a group, or the group_size that they were collected with."
            )

    def _groups(self, storage: EpisodeStorage) -> Groups:
        """Group the stored episodes; cached until the storage changes."""
        known = self._known_groups
        if known is None or known[0] is not storage or known[1] != storage.revision:
            assert self.group_key is not None
            values = storage.first_values(self.group_key)
            groups = Groups.of_values(values, self.group_key, self.group_size)
            now = (storage.table.oldest, storage.num_episodes, len(groups), self.group_size or 0)
            same = now == self._order_of
            if known is not None or not same:
                self._order = None
            self._known_groups = known = (storage, storage.revision, groups)
        return known[2]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return {
            "epoch": self._epoch.state_dict(),
            "order": self._valid_order(),
            "order_of": self._order_of,
            "ran_out": self.ran_out,
            "remaining_batches": self._remaining_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._epoch.load_state_dict(state_dict["epoch"])
        self.ran_out = state_dict["ran_out"]
        self._remaining_batches = state_dict["remaining_batches"]
        self._order, self._order_of = state_dict["order"], state_dict["order_of"]
        self._known_groups = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known_groups": None, "_order": self._valid_order()}

    def _valid_order(self) -> Tensor | None:
        """Copy the order of the groups; None if it is outdated."""
        known = self._known_groups
        if self._order is None or (known is not None and known[0].revision != known[1]):
            return None
        return self._order.clone()

    def _empty(self) -> None:
        """Forget the epoch."""
        self._epoch = Epoch(self.max_sample_count)
        self._known_groups = self._order = None
        self.ran_out = False
        self._remaining_batches = Sampler._remaining_batches

    def __repr__(self) -> str:
        size = "" if self.group_size is None else f", group_size={self.group_size}"
        return f"EpisodeSampler(replacement={self.replacement}, group_key={self.group_key!r}{size})"


def _ordered(episodes: set[int]) -> Tensor:
    """Sort ordinals: int64 ``[n]``."""
    return torch.tensor(sorted(episodes), dtype=torch.int64, device="cpu")
