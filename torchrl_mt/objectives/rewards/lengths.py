"""Rewards of the length of episodes, in sampled tokens: all rows of an episode count, no prompt does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_mt.checks import as_tensor, check_at_least
from torchrl_mt.objectives.functional.reward_shaping import overlong_penalty
from torchrl_mt.objectives.rows.keys import ExperienceKeys
from torchrl_mt.objectives.rows.reading import read_entry, read_episode, read_objects


def episode_lengths(rows: TensorDictBase) -> Tensor:
    """Count the sampled tokens of each row's episode: ``[n]`` int64.

    Args:
        rows: Rows ``[n]`` with ``("masks", "all_assistant_mask")`` and ``"episode"``; all rows of each
            episode.
    """
    _, of_row = read_episode(rows).unique(return_inverse=True)
    lengths = read_entry(rows, ExperienceKeys.assistant_mask).sum(-1)
    return torch.zeros_like(lengths).index_add(0, of_row, lengths)[of_row]


@dataclass(frozen=True)
class OverlongPenalty:
    """Reward source with DAPO's soft overlong punishment, in [-1, 0].

    :func:`~torchrl_mt.objectives.functional.overlong_penalty` (eq. 13 of
    https://arxiv.org/abs/2503.14476) of the sampled tokens of a whole episode.

    Args:
        max_length: Length in tokens from which the penalty is -1.
        buffer: Tokens before ``max_length`` over which the penalty grows.
        name: Its name in metrics and errors.

    Raises:
        ValueError: If ``buffer`` is not positive or exceeds ``max_length``.

    Examples:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True, True], [False, True, False]])
        >>> rows = TensorDict({("masks", "all_assistant_mask"): mask, "episode": torch.arange(2)}, [2])
        >>> OverlongPenalty(max_length=4, buffer=2)(rows)
        tensor([-0.5000,  0.0000])
    """

    max_length: int
    buffer: int
    name: str = "overlong"

    def __post_init__(self) -> None:
        overlong_penalty(
            torch.zeros(0, device="cpu"), self.max_length, self.buffer
        )  # Refuses bad numbers.

    def __call__(self, rows: TensorDictBase) -> Tensor:
        """Compute the penalty of each row's episode, ``[n]`` float32.

        Args:
            rows: As :func:`episode_lengths` takes them.

        Raises:
            KeyError: If rows lack an entry.
        """
        return overlong_penalty(episode_lengths(rows), self.max_length, self.buffer)


@dataclass(frozen=True)
class LengthPenalty:
    """Reward source with the distance of an episode's length from a target: ``-|length - target|``.

    Beside a reward of 1 for right answers and with the weight 0.0003, this is the reward of L1-Exact
    (eq. 1 of https://arxiv.org/abs/2503.04697). With the target 0, every sampled token costs the weight.

    Args:
        target: Sampled tokens that an episode should have; or, if each item has its own number of them,
            the key of the rows' entry that ``MergeTurns(carry=...)`` brought.
        name: Its name in metrics and errors.

    Raises:
        TypeError: If ``target`` is neither an integer nor a key.
        ValueError: If ``target`` is negative.

    Examples:
        >>> from tensordict import TensorDict
        >>> mask = torch.tensor([[True, True, True], [False, True, False]])
        >>> rows = TensorDict({("masks", "all_assistant_mask"): mask, "episode": torch.arange(2)}, [2])
        >>> LengthPenalty(target=2)(rows)
        tensor([-1., -1.])
    """

    target: int | str = 0
    name: str = "length"

    def __post_init__(self) -> None:
        if isinstance(self.target, bool) or not isinstance(self.target, (int, str)):
            raise TypeError(
                f"target must be an integer or the key of an entry, got {self.target!r}."
            )
        if isinstance(self.target, int):
            check_at_least("target", self.target, 0)

    def __call__(self, rows: TensorDictBase) -> Tensor:
        """Compute the penalty of each row's episode, ``[n]`` float32.

        Args:
            rows: As :func:`episode_lengths` takes them.

        Raises:
            KeyError: If rows lack an entry.
            TypeError: If the targets in the rows are no numbers.
        """
        lengths, target = episode_lengths(rows), self.target
        if isinstance(target, int):
            return -(lengths - target).abs().float()
        targets = read_objects(rows, target)
        if targets is None:
            read_entry(rows, target, hint="; bring it with MergeTurns(carry=(...))")
        each = as_tensor(f"the entry {target!r} of rows", targets).to(lengths.device)
        return -(lengths - each).abs().float()
