"""Format lerobot: LeRobot's layout v3.0 is read as it was written, and as TorchRL reads it."""

from __future__ import annotations

import json
import shutil
import sys
import tracemalloc

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.bridges.lerobot.lerobot_folder import FEATURES, TASKS, write_folder
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.datasets import ClipDataset, DatasetError, EpisodeDataset, load_episodes

LENGTHS = (4, 7, 1)
PLAIN = {name: each for name, each in FEATURES.items() if each["dtype"] not in ("video", "image")}
KEYS = {
    ("observation", "state"): "observation.state",
    ("observation", "map"): "observation.map",
    "action": "action",
    ("next", "reward"): "next.reward",
    "timestamp": "timestamp",
    "frame": "frame_index",
    "episode": "episode_index",
    "index": "index",
    "task_index": "task_index",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("lerobot")
    return root, write_folder(root, LENGTHS)


# ---- what is read -------------------------------------------------------------------------------


def test_it_equals_what_was_written(folder):
    root, episodes = folder
    dataset = EpisodeDataset(root)
    assert dataset.format == "lerobot"
    assert dataset.lengths.tolist() == [*LENGTHS]
    for i, frames in enumerate(episodes):
        got = dataset.episode(i)
        for key, name in KEYS.items():
            values = torch.as_tensor(frames[name])
            assert got[key].dtype == values.dtype
            assert torch.equal(got[key].reshape(values.shape), values), key
        assert list(got["note"]) == frames["note"]
        assert got["next", "reward"].shape == (LENGTHS[i], 1)
        assert dataset.metadata(i) == {"episode_index": i, "tasks": [TASKS[i % 2]]}


def test_images_have_the_shapes_of_their_features(folder):
    root, episodes = folder
    for i, frames in enumerate(episodes):
        image = EpisodeDataset(root, [("observation", "image")]).episode(i)["observation", "image"]
        wrist = torch.from_numpy(frames["observation.images.wrist"]).permute(0, 3, 1, 2)
        assert torch.equal(image["wrist"], wrist)
        # A video is lossy; a frame is told by its brightness.
        video = torch.from_numpy(frames["observation.images.top"])
        assert image["top"].shape == video.shape
        assert (image["top"].float() - video.float()).abs().max() < 6


def test_the_next_observation_is_that_of_the_following_frame_or_the_last_once_more(folder):
    root, episodes = folder
    dataset = EpisodeDataset(root, ["observation", ("next", "observation")])
    for i in range(len(episodes)):
        got = dataset.episode(i)
        follows = torch.arange(1, LENGTHS[i] + 1).clamp(max=LENGTHS[i] - 1)
        for key in got["observation"].keys(include_nested=True, leaves_only=True):
            here = got["observation"][key]
            assert torch.equal(got["next", "observation"][key], here[follows]), key


def test_an_episode_ends_truncated_unless_it_says_otherwise(folder, tmp_path):
    root, _ = folder
    dataset = EpisodeDataset(root, ["next"])
    for i in range(3):
        last = torch.arange(LENGTHS[i])[:, None] == LENGTHS[i] - 1
        end = dataset.episode(i)["next"]
        assert torch.equal(end["done"], last)
        assert torch.equal(end["terminated"], last & (i % 2 == 0))
        assert torch.equal(end["truncated"], last & (i % 2 == 1))
    features = {name: each for name, each in PLAIN.items() if not name.startswith("next")}
    write_folder(tmp_path / "b", LENGTHS, features=features)
    end = EpisodeDataset(tmp_path / "b").episode(1)["next"]
    assert sorted(end.keys()) == ["done", "observation", "terminated", "truncated"]
    assert end["truncated"][:, 0].tolist() == [False] * 6 + [True]
    assert torch.equal(end["done"], end["truncated"])
    assert not end["terminated"].any()


def test_the_frames_of_a_video_are_those_of_pyav(folder):
    """Any frames, read in any order, are bit for bit those that PyAV decodes from the beginning."""
    root, _ = folder
    file = root / "videos" / "observation.images.top" / "chunk-000" / "file-000.mp4"
    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 4 + 7
    clips = ClipDataset(EpisodeDataset(root, [("observation", "image", "top")]), 1)
    for i in np.random.default_rng(0).permutation(11).tolist():
        got = clips[i]["observation", "image", "top"][0]
        assert np.array_equal(got.numpy(), frames[i])


@pytest.mark.slow
def test_it_equals_what_torchrl_reads(folder, tmp_path, monkeypatch):
    lerobot = pytest.importorskip("torchrl.data.datasets.lerobot")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write_folder(tmp_path / "a", LENGTHS, features=PLAIN)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "a"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    snapshot = lerobot._LeRobotSnapshot("any/thing")
    columns = lerobot.LeRobotExperienceReplay._extract_columns(snapshot)
    theirs = lerobot.lerobot_columns_to_tensordict(columns)
    ours = torch.cat(list(EpisodeDataset(tmp_path / "a").episodes()))
    for key in KEYS:
        their = theirs[key]
        assert torch.equal(their.reshape(ours[key].shape), ours[key].to(their.dtype)), key
    tasks = [task for each in range(3) for task in [TASKS[each % 2]] * LENGTHS[each]]
    assert theirs.get("language_instruction").tolist() == tasks


# ---- into other places --------------------------------------------------------------------------


def test_loading_needs_the_memory_of_some_episodes_only(tmp_path):
    features = {"observation.state": {"dtype": "float32", "shape": [4000]}, "index": PLAIN["index"]}
    write_folder(tmp_path, (20,) * 40, files=(0,) * 40, features=features)
    dataset, storage = EpisodeDataset(tmp_path), EpisodeStorage(40)
    dataset.episode(0)
    tracemalloc.start()
    assert load_episodes(dataset, storage) == 40
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 20 * 4000 * 4 / 2
    assert storage.episode(0)["index"][0] == 38 * 20


# ---- refusals and damage ------------------------------------------------------------------------


def test_other_layouts_and_damage_are_named(tmp_path):
    write_folder(tmp_path, LENGTHS, features=PLAIN)
    file = tmp_path / "meta" / "info.json"
    [episodes] = (tmp_path / "meta" / "episodes").rglob("*.parquet")
    info, table, whole = (
        json.loads(file.read_text()),
        pq.read_table(episodes),
        episodes.read_bytes(),
    )

    def refused(match):
        with pytest.raises(DatasetError, match=match):
            EpisodeDataset(tmp_path)

    file.write_text(json.dumps(info | {"codebase_version": "v2.1"}))
    refused(r"layout v2\.1, expected v3\.0: convert")
    file.write_text(json.dumps({"codebase_version": "v3.0"}))
    refused(r"info\.json is no description of LeRobot: KeyError")
    file.write_text(json.dumps(info))
    episodes.write_bytes(whole[:200])
    refused(r"file-000\.parquet cannot be read")
    pq.write_table(table.drop("length"), episodes)
    refused(r"episodes: .*length")
    episodes.unlink()
    refused("has no Parquet files")


def test_a_damaged_file_loses_only_its_episodes(tmp_path):
    write_folder(tmp_path, LENGTHS, files=(0, 1, 2))
    (tmp_path / "data" / "chunk-000" / "file-001.parquet").write_bytes(b"PAR1 and no more")
    dataset = EpisodeDataset(tmp_path)
    with pytest.raises(DatasetError, match=r"episode 1 of .*file-001\.parquet"):
        dataset.episode(1)
    (tmp_path / "videos" / "observation.images.top" / "chunk-000" / "file-002.mp4").unlink()
    with pytest.raises(DatasetError, match=r"episode 2 of .*file-002\.mp4"):
        dataset.episode(2)
    assert len(dataset.episode(0)) == 4
    table = pq.read_table(tmp_path / "data" / "chunk-000" / "file-002.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "data" / "chunk-000" / "file-002.parquet")
    with pytest.raises(DatasetError, match=r"episode 2 of .*has 0 rows, and should have row 0"):
        EpisodeDataset(tmp_path, ["action"]).episode(2)


def test_a_video_that_is_too_short_is_named(tmp_path):
    features = {name: FEATURES[name] for name in ("observation.images.top", "action", "index")}
    write_folder(tmp_path, (4, 7), files=(0, 0), features=features)
    other = tmp_path / "other"
    write_folder(other, (4, 2), files=(0, 0), features=features)
    name = "videos/observation.images.top/chunk-000/file-000.mp4"
    (tmp_path / name).write_bytes((other / name).read_bytes())
    dataset = EpisodeDataset(tmp_path)
    assert len(dataset.episode(0)) == 4
    said = r"episode 1 of .*file-000\.mp4 has no frame at 0\.600 s"
    with pytest.raises(DatasetError, match=said):
        dataset.episode(1)


def test_a_missing_library_is_named(folder, monkeypatch):
    root, _ = folder
    dataset = EpisodeDataset(root)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"torchrl-mt\[video\]"):
        dataset.episode(0)
    assert len(EpisodeDataset(root, ["action"]).episode(0)) == 4
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"torchrl-mt\[arrow\]"):
        EpisodeDataset(root)


def test_a_name_that_is_also_the_beginning_of_others_is_not_split(tmp_path):
    features = {name: PLAIN[name] for name in ("action", "index")}
    frames = write_folder(tmp_path, LENGTHS, features=features)
    file = tmp_path / "meta" / "info.json"
    named = {"features": {**features, "action.left": PLAIN["next.reward"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    dataset = EpisodeDataset(tmp_path, ["action"])
    assert torch.equal(dataset.episode(0)["action"], torch.from_numpy(frames[0]["action"]))
    assert "action.left" in EpisodeDataset(tmp_path).keys


@pytest.mark.parametrize("name", ["data_path", "video_path"])
@pytest.mark.parametrize("place", ["../file-{file_index:03d}.x", "ABSOLUTE/{file_index}"])
def test_files_outside_that_it_names_are_not_read(name, place, folder, tmp_path):
    shutil.copytree(folder[0], tmp_path / "set")
    info = tmp_path / "set" / "meta" / "info.json"
    about = json.loads(info.read_text())
    info.write_text(json.dumps({**about, name: place.replace("ABSOLUTE", str(tmp_path))}))
    with pytest.raises(DatasetError, match=r"names '.*', which lies outside"):
        EpisodeDataset(tmp_path / "set").episode(0)
