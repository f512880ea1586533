"""Batches of a loader: what a worker sends is what the loader returns without workers."""

from __future__ import annotations

import random

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torch.utils.data import DataLoader

from tests.same_data import assert_same
from tests.tiers import some_fast
from torchrl_mt.datasets import ClipDataset, save_episodes

from .episodes import DTYPES, random_bits
from .every_format import ALL, new_path, process_context

N = 2
"""Steps of a clip."""
TRANSFORMS = {
    "nothing": None,
    "less": lambda clip: clip.exclude("action"),
    "text": lambda clip: clip.set("text", NonTensorData("hi", batch_size=[N])),
    "a node": lambda clip: clip.set("deep", TensorDict({"y": torch.rand(N, 2)}, [N, 2])),
    "names": lambda clip: TensorDict(clip.to_dict(), [N], names=["time"]),
    "a device": lambda clip: clip.to("cpu"),
    "rows": lambda clip: lazy_stack([TensorDict({"x": torch.ones(i)}) for i in range(N)]),
    "no entry": lambda clip: TensorDict({}, [N]),
}


@pytest.mark.parametrize("width", [3, 30_000])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_workers_change_nothing(name, width, tmp_path):
    rng, shapes = random.Random(0), [(), (1,), (0,), (3, 5)]
    columns = {str(i): random_bits(rng, (9, *shapes[i % 4]), d) for i, d in enumerate(DTYPES)}
    columns |= {"observation": torch.randn(9, width), "action": torch.randn(9, 2)}
    save_episodes([columns] * 2, tmp_path / "a.h5")

    def transform(clip):
        torch.manual_seed(0)
        return TRANSFORMS[name](clip)

    given = None if name == "nothing" else transform
    clips = ClipDataset(tmp_path / "a.h5", N, stride=2, transform=given)
    alone = DataLoader(clips, batch_size=4)
    workers = DataLoader(clips, batch_size=4, num_workers=2, multiprocessing_context="fork")
    for one, other in zip(alone, workers, strict=True):
        assert_same(other, one)
        assert other.names == one.names
    if name == "nothing":
        other["observation"].zero_()  # It is the receiver's own.
        assert one["observation"].any()


@pytest.mark.parametrize("format", some_fast(["hdf5", "folder", "arrow", "jsonl"], ALL))
def test_workers_see_each_clip_once_an_epoch(format, tmp_path):
    steps = iter(range(1000))
    episodes = [[next(steps) for _ in range(length)] for length in (5, 3, 9, 4)]
    images = torch.arange(40, 61, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    path = new_path(tmp_path, format, "loader")
    save_episodes(({"step": each, "image": images[each]} for each in episodes), path, format=format)
    clips = ClipDataset(path, 4)

    def told(clip):
        return clip["step"].tolist(), clip["image"].tolist()

    expected = sorted(map(told, clips))  # What this process reads, the others read as well.
    workers = {"num_workers": 2, "persistent_workers": True}
    workers["multiprocessing_context"] = process_context(format)
    loader = DataLoader(clips, batch_size=3, shuffle=True, **workers)
    for _ in range(3):
        assert sorted(told(clip) for batch in loader for clip in batch) == expected
