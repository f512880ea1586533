"""Batches of a loader: what a worker sends is what the loader returns without workers."""

from __future__ import annotations

import pickle
import random
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, lazy_stack
from torch.utils.data import DataLoader

from torchrl_mt.datasets import ClipDataset, loader_batches, save_episodes

from .episodes import DTYPES, assert_same, random_bits


def sent(data, monkeypatch):
    """What the main process gets of data that a worker collates."""
    monkeypatch.setattr(loader_batches, "get_worker_info", lambda: "a worker")
    return pickle.loads(ForkingPickler.dumps(loader_batches._collate([data, data])))


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_tensors_of_all_dtypes_arrive(most, monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(loader_batches, "_SMALL", most)
    shapes = [(), (1,), (0,), (3, 5)]
    clips = TensorDict(
        {str(i): random_bits(rng, (4, *shapes[i % 4]), dtype) for i, dtype in enumerate(DTYPES)},
        [4],
    )
    clips["deep", "er"] = torch.rand(4, 2)
    got = sent(clips, monkeypatch)
    assert type(got) is TensorDict
    assert got.batch_size == got["deep"].batch_size == (2, 4)
    for each in got.unbind(0):
        assert_same(each, clips)
    got["deep", "er"].zero_()  # It is the receiver's own.
    assert clips["deep", "er"].any()


@pytest.mark.parametrize(
    "odd",
    [
        TensorDict({"x": torch.rand(4), "text": NonTensorData("hi", batch_size=[4])}, [4]),
        TensorDict({"x": torch.rand(4), "deep": TensorDict({"y": torch.rand(4, 2)}, [4, 2])}, [4]),
        TensorDict({"x": torch.rand(4)}, [4], names=["time"]),
        TensorDict({"x": torch.rand(4)}, [4], device="cpu"),
        lazy_stack([TensorDict({"x": torch.rand(i)}) for i in range(4)]),
        TensorDict({}, [4]),
    ],
)
def test_what_is_more_than_tensors_arrives_as_it_is(odd, monkeypatch):
    got = sent(odd, monkeypatch)
    plain = TensorDict.maybe_dense_stack([odd, odd])
    assert got.batch_size == (2, 4)
    assert got.device == odd.device
    assert got[1].names == odd.names
    assert isinstance(got, LazyStackedTensorDict) == isinstance(odd, LazyStackedTensorDict)
    assert set(got.keys(True)) == set(plain.keys(True))
    for key in ("x", ("deep", "y")):
        if key in odd.keys(True) and not isinstance(odd, LazyStackedTensorDict):
            assert torch.equal(got[0][key], odd[key])


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, lambda clip: clip.exclude("action")])
@pytest.mark.parametrize("width", [3, 3000])
def test_workers_change_nothing(transform, width, tmp_path):
    episodes = [
        {"observation": torch.randn(9, width), "action": torch.randn(9, 2)} for _ in range(4)
    ]
    save_episodes(episodes, tmp_path / "a.h5")
    clips = ClipDataset(tmp_path / "a.h5", 3, stride=2, transform=transform)
    alone = DataLoader(clips, batch_size=4)
    workers = DataLoader(clips, batch_size=4, num_workers=2, multiprocessing_context="fork")
    for one, other in zip(alone, workers, strict=True):
        assert type(one) is type(other) is TensorDict
        assert one.batch_size == other.batch_size
        for a, b in zip(one.unbind(0), other.unbind(0), strict=True):
            assert_same(a, b)
