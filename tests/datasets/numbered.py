"""Episodes that are told by their numbers, written to data sets of any format and looked for there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_mt.datasets import EpisodeDataset, open_episodes

from .episodes import assert_same


def numbered(number: int, *, has_image: bool = True) -> TensorDict:
    """An episode; every fourth has its own next observations. Images are flat: video is lossy."""
    generator = torch.Generator().manual_seed(number)
    T = 1 + number % 7
    observation = torch.randn(T + 1, 3, generator=generator)
    following = -observation[1:] if number % 4 == 3 else observation[1:]
    data = TensorDict(
        {
            "number": torch.full((T,), number),
            "observation": observation[:-1],
            "next": {"observation": following, "done": torch.arange(T) == T - 1},
        },
        [T],
    )
    if has_image:
        data["image"] = torch.full((T, 8, 8, 3), 40 * (number % 6), dtype=torch.uint8)
    data["text"] = [f"step {t} of {number}" for t in range(T)]
    return data


def check_numbered(got: Any, number: int, format: str) -> None:
    """Check that an episode is the one of a number; images of videos are close only."""
    expected = numbered(number)
    if format == "video":
        difference = got["image"].int() - expected["image"].int()
        assert difference.abs().max() <= 8
        got, expected = got.exclude("image"), expected.exclude("image")
    assert_same(got, expected)


def write(path: Path, format: str, numbers: Iterable[int], mode: Any = "append") -> Path:
    """Write the episodes of these numbers, with the number as metadata."""
    with open_episodes(path, format=format, mode=mode) as out:
        for number in numbers:
            out.write_episode(numbered(number), {"number": number})
    return path


def check(path: Path, numbers: Sequence[int]) -> None:
    """Check that a data set has the episodes of these numbers, in this order, and no other."""
    dataset = EpisodeDataset(path)
    assert [dataset.metadata(i) for i in range(len(dataset))] == [{"number": n} for n in numbers]
    for i, number in enumerate(numbers):
        check_numbered(dataset.episode(i), number, dataset.format)
