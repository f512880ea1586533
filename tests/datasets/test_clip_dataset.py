"""Clips by number: how many, where they begin, what they hold, and in a loader."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tests.buffers import buffer_of
from tests.tiers import examples
from torchrl_mt.data import ClipSampler, EpisodeStorage
from torchrl_mt.datasets import ClipDataset, EpisodeDataset, save_episodes


def ted(length, first=0, actions=2):
    """An episode that counts its steps."""
    t = torch.arange(first, first + length)
    end = (t == first + length - 1)[:, None]
    outcomes = {"reward": torch.ones(length, 1), "done": end, "terminated": end.clone()}
    return TensorDict(
        {
            "observation": t.clone(),
            "action": t.float()[:, None].expand(-1, actions).contiguous(),
            "is_init": (t == first)[:, None],
            "next": {"observation": t + 1, **outcomes},
        },
        [length],
    )


def storage_of(lengths):
    storage = EpisodeStorage(10_000)
    for i, length in enumerate(lengths):
        storage.append(ted(length, sum(lengths[:i])))
    return storage


@pytest.fixture(params=["disk", "memory", "path"])
def source(request, tmp_path):
    """Makes a source of clips from the lengths of episodes."""

    def make(lengths):
        storage = storage_of(lengths)
        if request.param == "memory":
            return storage
        save_episodes(storage, tmp_path / "episodes.jsonl", mode="overwrite")
        path = tmp_path / "episodes.jsonl"
        return path if request.param == "path" else EpisodeDataset(path)

    return make


def test_actions_stay_dense_under_a_stride(source):
    clips = ClipDataset(source([20]), 3, stride=4)
    batch = next(iter(DataLoader(clips, batch_size=5)))
    assert batch["action"].shape == (5, 3, 8)
    assert batch["observation"].tolist()[1] == [1, 5, 9]
    assert batch["next", "observation"].tolist()[1] == [5, 9, 13]
    assert batch["next", "reward"].squeeze(-1).tolist()[0] == [4, 4, 4]


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    slice_len=st.integers(1, 4),
    stride=st.integers(1, 3),
)
def test_clips_are_what_the_clip_sampler_samples(lengths, slice_len, stride):
    storage = storage_of(lengths)
    clips = ClipDataset(storage, slice_len, stride=stride)
    assert len(clips) == storage.num_clips(slice_len * stride)
    if not len(clips):
        return
    sampler = ClipSampler(
        slice_len=slice_len,
        stride=stride,
        layout="clips",
        selector=lambda step, storage, num, span: torch.arange(num),
    )
    sampled = buffer_of(storage, sampler, batch_size=len(clips) * slice_len).sample()
    sampled = sampled.exclude("index")
    assert (torch.stack([clips[i] for i in range(len(clips))]) == sampled).all()
    assert (clips.__getitems__(range(len(clips))).clips == sampled).all()


def test_a_copy_of_a_storage_is_as_it_was():
    storage = storage_of([5])
    buffer = buffer_of(storage)
    clips = ClipDataset(buffer, 2)
    buffer.empty()
    storage.append(ted(9, 100))
    assert len(clips) == 4
    assert clips[3]["observation"].tolist() == [3, 4]


def test_a_transform_gets_each_clip_once(tmp_path):
    seen = []

    def transform(clip):
        seen.append(clip.batch_size)
        return {"sum": clip["observation"].sum()}

    clips = ClipDataset(storage_of([6]), 3, transform=transform)
    batch = next(iter(DataLoader(clips, batch_size=4)))
    assert batch["sum"].tolist() == [3, 6, 9, 12]
    assert seen == [torch.Size([3])] * 4


def test_a_loader_collates_clips_of_ragged_entries(tmp_path):
    episode = {"tokens": [[1], [2, 3], [4, 5, 6]], "text": ["a", "b", "c"]}
    save_episodes([episode], tmp_path / "a.jsonl")
    batch = next(iter(DataLoader(ClipDataset(tmp_path / "a.jsonl", 2), batch_size=2)))
    assert batch.batch_size == (2, 2)
    assert [row.tolist() for row in batch[1].get("tokens", as_list=True)] == [[2, 3], [4, 5, 6]]
    assert batch["text"] == [["a", "b"], ["b", "c"]]


def test_tensordicts_of_other_datasets_are_collated_too():
    data = [TensorDict({"a": torch.ones(2) * i}) for i in range(4)]
    batch = next(iter(DataLoader(data, batch_size=4)))
    assert batch["a"].tolist() == [[i, i] for i in range(4)]


def test_it_can_be_pickled(source):
    clips = ClipDataset(source([5, 4]), 2)
    expected = clips[3]
    assert (pickle.loads(pickle.dumps(clips))[3] == expected).all()


def test_bad_arguments_are_named(tmp_path):
    storage, ragged = storage_of([5]), tmp_path / "a.jsonl"
    save_episodes([{"action": [[1], [2, 3]]}], ragged)
    for error, match, source, options in [
        (ValueError, "slice_len must be a positive integer, got 0", storage, {"slice_len": 0}),
        (ValueError, "stride must be a positive integer, got 1.5", storage, {"stride": 1.5}),
        (ValueError, "stride joins 'action' over several steps", ragged, {"stride": 2}),
        (TypeError, "source must be an EpisodeDataset, a path, or", [1, 2], {}),
        (TypeError, "transform must be callable", storage, {"transform": "flip"}),
    ]:
        with pytest.raises(error, match=match):
            ClipDataset(source, **{"slice_len": 1, **options})
    clips = ClipDataset(storage, 2)
    assert (clips[-1] == clips[3]).all()
    for i in (4, -5):
        with pytest.raises(IndexError, match=f"clip {i} is out of range: there are 4 clips"):
            clips[i]


@pytest.mark.parametrize("i", [slice(0, 2), 0.5, True, "0", [0], None])
def test_the_number_of_a_clip_is_an_integer(i):
    clips = ClipDataset(storage_of([5]), 2)
    with pytest.raises(TypeError, match=r"the number of a clip must be an integer, got .*Subset"):
        clips[i]
    with pytest.raises(TypeError, match="the number of a clip must be an integer, got"):
        clips.__getitems__([i, i])


@pytest.mark.parametrize("i", [np.int64(1), torch.tensor(1), np.uint8(1), -3])
def test_the_number_of_a_clip_is_any_integer(i):
    clips = ClipDataset(storage_of([5]), 2)
    assert clips[i]["observation"].tolist() == [1, 2]
    assert clips.__getitems__([i, i])[1]["observation"].tolist() == [1, 2]
    assert clips.__getitems__([]).clips.shape == (0, 2)


def test_why_there_are_no_clips_is_said(caplog):
    assert len(ClipDataset(storage_of([5, 9]), 5, stride=2)) == 0
    assert "a clip spans 10 steps (slice_len=5, stride=2), and the longest of the 2" in caplog.text
    assert len(ClipDataset(EpisodeStorage(10), 5)) == 0
    assert "the longest of the 0 episodes has 0" in caplog.text


def test_a_loader_of_episodes_is_pointed_to_clips(tmp_path):
    save_episodes(storage_of([5, 5]), tmp_path / "a.jsonl")
    dataset = EpisodeDataset(tmp_path / "a.jsonl")
    with pytest.raises(TypeError, match="a DataLoader takes ClipDataset"):
        next(iter(DataLoader(dataset)))
    for i in (0.0, True, slice(1)):
        with pytest.raises(TypeError, match="i must be an integer, got"):
            dataset.episode(i)


def test_a_collate_function_gets_a_sequence_of_clips():
    clips = ClipDataset(storage_of([5]), 2)
    loader = DataLoader(clips, batch_size=4, collate_fn=lambda clips: torch.stack([*clips]))
    assert next(iter(loader))["observation"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
@examples()
def test_clips_of_some_episodes_are_those_of_all_that_lie_in_them(lengths, data):
    storage = storage_of(lengths)
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(0, 6))]
    some, all_clips = (
        ClipDataset(storage, 2, episodes=torch.tensor(chosen)),
        ClipDataset(storage, 2),
    )
    ends = np.cumsum(lengths)
    firsts = [
        int(clip["observation"][0]) for clip in map(all_clips.__getitem__, range(len(all_clips)))
    ]
    expected = [first for first in firsts if np.searchsorted(ends, first, "right") in chosen]
    assert [int(some[i]["observation"][0]) for i in range(len(some))] == expected
    for strange in (-1, len(lengths), 0.5):
        with pytest.raises(IndexError, match=f"episodes must be numbers from 0 .* got {strange}"):
            ClipDataset(storage, 2, episodes=[strange])
