"""What is read equals what was written, bit for bit, in every lossless format."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from tests.buffers import buffer_of
from tests.tiers import few_or_many
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import (
    ClipDataset,
    EpisodeDataset,
    load_episodes,
    open_episodes,
    save_episodes,
)

from . import earlier
from .episodes import ODD_NAMES, assert_same, random_data, random_episode, random_schema
from .every_format import LOSSLESS, new_path

pytestmark = pytest.mark.parametrize("format", LOSSLESS)


@few_or_many(12, 30)
def test_episodes_and_metadata_are_read_as_they_were_written(format, examples, tmp_path):
    for seed in range(examples):
        episodes, metadata = random_data(seed)
        path = new_path(tmp_path, format, seed)
        cut = random.Random(seed).randrange(len(episodes) + 1)
        for part, mode in ((slice(0, cut), "error"), (slice(cut, None), "append")):
            with open_episodes(path, format=format, mode=mode) as out:
                for episode, about in zip(episodes[part], metadata[part], strict=True):
                    out.write_episode(episode, about)
        dataset = EpisodeDataset(path)
        assert dataset.format == format
        assert len(dataset) == len(episodes)
        assert dataset.lengths.tolist() == [len(episode) for episode in episodes]
        for i, (episode, about) in enumerate(zip(episodes, metadata, strict=True)):
            assert_same(dataset.episode(i), episode)
            assert dataset.metadata(i) == about
        for got, episode in zip(dataset.episodes(), episodes, strict=True):
            assert_same(got, episode)


@few_or_many(6, 15)
def test_a_subset_of_the_keys_is_read(format, examples, tmp_path):
    for seed in range(examples):
        episodes, _ = random_data(seed)
        path = new_path(tmp_path, format, seed)
        save_episodes(episodes, path, format=format)
        keys = EpisodeDataset(path).keys
        rng = random.Random(seed)
        chosen = rng.sample(keys, rng.randrange(1, len(keys) + 1))
        dataset = EpisodeDataset(path, chosen)
        assert set(dataset.keys) == set(chosen)
        for i, episode in enumerate(episodes):
            assert_same(dataset.episode(i), episode.select(*chosen))


@few_or_many(8, 15)
def test_what_a_buffer_held_goes_into_a_buffer_whatever_episode_comes_first(
    format, examples, tmp_path
):
    for seed in range(examples):
        rng = random.Random(seed)
        schema = random_schema(rng) | {("next", "done"): ("dense", torch.bool, (1,))}
        schema[rng.choice([("lengths",), ("deep", "lengths")])] = ("ragged", torch.int64, 1)
        episodes = [random_episode(rng, schema) for _ in range(rng.randrange(2, 6))]
        held, about = EpisodeStorage(1000), [{"number": i} if i % 2 else {} for i in range(9)]
        for i, episode in enumerate(episodes):
            held.append(episode, metadata=about[i])
        path, again = (new_path(tmp_path, format, f"{seed}{name}") for name in ("", "-again"))
        assert save_episodes(held, path, format=format) == len(episodes)
        dataset = EpisodeDataset(path)
        order = rng.sample(range(len(episodes)), len(episodes))
        loaded, one_by_one = EpisodeStorage(1000), EpisodeStorage(1000)
        load_episodes(path, loaded)
        buffer = buffer_of(one_by_one)
        with open_episodes(again, format=format) as out:
            for i in order:
                buffer.extend(dataset.episode(i))
                out.write_episode(dataset.episode(i))
        for place, i in enumerate(order):
            assert_same(loaded.episode(i), episodes[i])
            assert loaded.metadata(i) == about[i]
            assert_same(one_by_one.episode(place), episodes[i])
            assert_same(EpisodeDataset(again).episode(place), episodes[i])


@few_or_many(4, 10)
@pytest.mark.parametrize("stride", [1, 3])
def test_clips_are_those_of_the_episodes(format, examples, stride, tmp_path):
    for seed in range(examples):
        rng = random.Random(seed)
        kinds = random_schema(rng).items()
        schema = {key: kind for key, kind in kinds if kind[0] in ("dense", "next")}
        schema["action",] = ("dense", torch.float32, (2,))
        episodes = [random_episode(rng, schema, rng.randrange(1, 12)) for _ in range(4)]
        path = new_path(tmp_path, format, f"{seed}-{stride}")
        save_episodes(episodes, path, format=format)
        snapshot = EpisodeStorage(1000)
        for episode in episodes:
            snapshot.append(episode)
        slice_len = rng.randrange(1, 4)
        from_disk = ClipDataset(path, slice_len, stride=stride)
        from_memory = ClipDataset(snapshot, slice_len, stride=stride)
        assert len(from_disk) == len(from_memory) == snapshot.num_clips(slice_len * stride)
        for i in range(len(from_disk)):
            assert_same(from_disk[i], from_memory[i])


def test_what_is_read_may_be_changed(format, tmp_path):
    path = new_path(tmp_path, format, "a")
    episodes, _ = random_data(5)
    episodes[0]["talk"] = [[{"content": "a"}] for _ in range(len(episodes[0]))]
    save_episodes(episodes[:1], path, format=format)
    dataset = EpisodeDataset(path)
    read = dataset.episode(0)
    read["talk"][0][0]["content"] = "changed"
    for key in dataset.keys:
        for item in read.get(key, as_list=True):
            if isinstance(item, torch.Tensor):
                item.zero_()
    assert_same(dataset.episode(0), episodes[0])


@pytest.mark.parametrize("first", ["x", ""])
def test_any_key_is_written_and_read_back(format, first, tmp_path):
    parts = [*ODD_NAMES, "", "%", "%2E", "%65p_len", "ep_len", "length", "metadata"]
    keys = [(first, part) if first else (part,) for part in parts if first or part]
    if format == "lance":
        keys = [key for key in keys if chr(0) not in key[-1]]
    written = {key: torch.full((2,), i) for i, key in enumerate(keys)}
    path = new_path(tmp_path, format, "a")
    save_episodes([written], path, format=format)
    episode = EpisodeDataset(path).episode(0)
    assert [episode[key].tolist() for key in keys] == [[i, i] for i in range(len(keys))]


def test_data_sets_of_an_earlier_release_are_read_and_added_to(format, tmp_path):
    shutil.unpack_archive(earlier.DATASETS, tmp_path)
    path = new_path(tmp_path, format, "earlier")
    written = earlier.episodes()
    save_episodes(written[:1], path, mode="append")
    storage = EpisodeStorage(100)
    load_episodes(path, storage)
    for got in (EpisodeDataset(path).episodes(), storage.episodes()):
        for episode, expected in zip(got, [*written, written[0]], strict=True):
            assert_same(episode, expected)
