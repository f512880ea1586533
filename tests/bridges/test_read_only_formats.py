"""What formats of other libraries promise alike: they are read only, in clips, copies and workers."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.datasets.episodes import assert_same
from tests.tiers import slow
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import (
    ClipDataset,
    EpisodeDataset,
    load_episodes,
    open_episodes,
    save_episodes,
)


@pytest.fixture(params=["lerobot", "minari hdf5", "minari arrow", slow("minari parquet")])
def path(request, tmp_path, monkeypatch):
    """A data set of several episodes, in one file or more."""
    name, _, layout = request.param.partition(" ")
    if name == "lerobot":
        from tests.bridges.lerobot.lerobot_folder import write_folder

        write_folder(tmp_path, (9, 5, 12), files=(0, 0, 1), one_row_group=True)
        return tmp_path
    pytest.importorskip("gymnasium")
    from tests.bridges.minari.test_format import make

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
    make(pytest.importorskip("minari"), layout, lengths=(9, 2, 7))
    return tmp_path / "demo-v0"


@pytest.mark.parametrize("stride", [1, 2])
def test_clips_are_parts_of_episodes(path, stride):
    dataset, storage = EpisodeDataset(path), EpisodeStorage(100)
    assert load_episodes(dataset, storage) == 3
    assert [storage.metadata(i) for i in range(3)] == [dataset.metadata(i) for i in range(3)]
    some = EpisodeDataset(path, ["observation", "next"])
    from_disk, from_memory = (ClipDataset(each, 3, stride=stride) for each in (some, storage))
    assert len(from_disk) == len(from_memory) == storage.num_clips(3 * stride)
    order = np.random.default_rng(0).permutation(len(from_disk)).tolist()
    for i, clip in zip(order, from_disk.__getitems__(order), strict=True):
        assert_same(clip, from_memory[i].select("observation", "next"))
        assert_same(clip, from_disk[i])


@pytest.mark.parametrize("format", ["hdf5", "jsonl"])
def test_it_becomes_another_data_set(path, format):
    source = EpisodeDataset(path)
    assert save_episodes(source, path / "copy", format=format) == 3
    copy = EpisodeDataset(path / "copy")
    for i in range(3):
        assert_same(source.episode(i), copy.episode(i))
        assert copy.metadata(i) == source.metadata(i)


def test_it_is_not_written(path):
    format = EpisodeDataset(path).format
    for options in ({"mode": "append"}, {"format": format}):
        target = path if "mode" in options else path / "new"
        with pytest.raises(ValueError, match=f"'{format}' can be read only"):
            open_episodes(target, **options)


@pytest.mark.slow
def test_workers_of_a_loader_read_it(path):
    clips = ClipDataset(EpisodeDataset(path, ["action", ("next", "reward")]), 3)
    expected = sorted(clip["next", "reward"].tolist() for clip in clips)
    loader = DataLoader(clips, batch_size=2, num_workers=2, multiprocessing_context="fork")
    seen = [clip for batch in loader for clip in batch["next", "reward"].tolist()]
    assert sorted(seen) == expected
