"""Format minari: Minari's own data sets are read as Minari and TorchRL read them."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.utils import unravel_key

from torchrl_mt.datasets import ClipDataset, DatasetError, EpisodeDataset

gym = pytest.importorskip("gymnasium")

every_layout = pytest.mark.parametrize(
    "layout", ["hdf5", "arrow", pytest.param("parquet", marks=pytest.mark.slow)]
)
BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
NESTED = gym.spaces.Dict(
    {
        "box": BOX,
        "scalar": gym.spaces.Box(-9, 9, (), np.float64),
        "pair": gym.spaces.Tuple(
            [gym.spaces.Discrete(4), gym.spaces.Dict({"bits": gym.spaces.MultiBinary(5)})]
        ),
        "grid": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "said": gym.spaces.Text(9),
    }
)
IMAGE = gym.spaces.Box(0, 255, (32, 40, 3), np.uint8)


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr("warnings.warn", lambda *args, **kwargs: None)
    return pytest.importorskip("minari")


def stacked(samples):
    """Samples of a space as Minari's buffers hold them."""
    if isinstance(samples[0], dict):
        return {key: stacked([sample[key] for sample in samples]) for key in samples[0]}
    if isinstance(samples[0], tuple):
        return tuple(stacked(list(part)) for part in zip(*samples, strict=True))
    return samples if isinstance(samples[0], str) else np.array(samples)


def make(
    minari, layout, *, lengths=(3, 5, 1), obs=NESTED, act=None, infos=True, name="demo", **more
):
    """Save a data set of random episodes; return Minari's own view of it."""
    from minari.data_collector import EpisodeBuffer

    act = act or gym.spaces.Dict(
        {"a": gym.spaces.MultiDiscrete([2, 3]), "b": gym.spaces.Discrete(3)}
    )
    obs.seed(0)
    act.seed(0)
    rng = np.random.default_rng(0)
    buffers = [
        EpisodeBuffer(
            id=i,
            seed=10 + i,
            options={"level": {"number": i}, "name": "easy"},
            observations=stacked([obs.sample() for _ in range(T + 1)]),
            actions=stacked([act.sample() for _ in range(T)]),
            rewards=rng.random(T).tolist(),
            terminations=[False] * (T - 1) + [i % 2 == 0],
            truncations=[False] * (T - 1) + [i % 2 == 1],
            infos={
                "speed": rng.random((T + 1, 2)),
                "inner": {"count": np.arange(T + 1)},
                "note": [f"note {t}" for t in range(T + 1)],
            }
            if infos
            else None,
        )
        for i, T in enumerate(lengths)
    ]
    return minari.create_dataset_from_buffers(
        f"{name}-v0",
        buffers,
        observation_space=obs,
        action_space=act,
        data_format=layout,
        algorithm_name="random",
        author="nobody",
        author_email="nobody@example.org",
        code_permalink="here",
        description="made by a test",
        **more,
    )


def columns(tree, path=()):
    """Flat columns of Minari's nested arrays."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, tuple):
        parts = enumerate(tree)
    else:
        return {path: tree}
    found = {}
    for name, part in parts:
        found |= columns(part, (*path, str(name)))
    return found


def expected_of(episode):
    """The entries of an episode, from what Minari returns."""
    entries = columns(episode.actions, ("action",))
    infos = dict(episode.infos or {})
    # Minari does not decode nested ones of Arrow.
    if infos and not isinstance(infos["inner"], dict):
        infos["inner"] = {"count": np.concatenate([each["count"] for each in infos["inner"]])}
    with_reset = columns(episode.observations, ("observation",)) | columns(infos, ("info",))
    for path, values in with_reset.items():
        entries[path] = values[:-1]
        entries[("next", *path)] = values[1:]
    entries["next", "reward"] = episode.rewards[:, None]
    entries["next", "terminated"] = episode.terminations[:, None]
    entries["next", "truncated"] = episode.truncations[:, None]
    entries["next", "done"] = entries["next", "terminated"] | entries["next", "truncated"]
    return entries


def assert_equals_minari(path, view):
    dataset = EpisodeDataset(path)
    assert dataset.format == "minari"
    assert dataset.lengths.tolist() == [len(episode.rewards) for episode in view.iterate_episodes()]
    about = view.storage.get_episode_metadata(range(len(dataset)))
    for i, (episode, metadata) in enumerate(zip(view.iterate_episodes(), about, strict=True)):
        got, expected = dataset.episode(i), expected_of(episode)
        keys = {key if isinstance(key, tuple) else (key,) for key in dataset.keys}
        assert keys == expected.keys()
        for path, values in expected.items():
            found = got[unravel_key(path)]
            if not isinstance(found, torch.Tensor):
                decoded = [v.decode() if isinstance(v, bytes) else v for v in values]
                assert list(found) == decoded, path
            else:
                assert found.numpy().dtype == np.asarray(values).dtype, path
                assert np.array_equal(found.numpy(), values), path
        assert dataset.metadata(i) == json.loads(json.dumps(metadata, default=lambda v: v.tolist()))


@every_layout
def test_it_equals_what_minari_reads(minari, layout, tmp_path):
    view = make(minari, layout)
    assert_equals_minari(tmp_path / "demo-v0", view)
    assert_equals_minari(tmp_path / "demo-v0" / "data", view)
    assert EpisodeDataset(tmp_path / "demo-v0").metadata(1) == {
        "id": 1,
        "seed": 11,
        "options": {"level": {"number": 1}, "name": "easy"},
        "total_steps": 5,
    }


@every_layout
def test_plain_spaces_and_images(minari, layout, tmp_path):
    act = gym.spaces.Box(-1, 1, (2, 2), np.float64)
    view = make(minari, layout, obs=BOX, act=act, infos=False, name="plain")
    assert_equals_minari(tmp_path / "plain-v0", view)
    for jpeg in (True, False):
        name = f"image{jpeg:d}"
        view = make(minari, layout, obs=IMAGE, act=act, name=name, jpeg_encoding=jpeg)
        assert_equals_minari(tmp_path / f"{name}-v0", view)


def test_images_whose_jpeg_files_have_one_size(minari, tmp_path):
    """HDF5 then has a table of bytes."""
    from minari.data_collector import EpisodeBuffer

    images = np.full((3, 32, 40, 3), 99, dtype=np.uint8)
    buffer = EpisodeBuffer(
        id=0,
        observations=images,
        actions=np.zeros((2, 3), dtype=np.float32),
        rewards=[0.0, 1.0],
        terminations=[False, True],
        truncations=[False, False],
    )
    view = minari.create_dataset_from_buffers(
        "same-v0", [buffer], observation_space=IMAGE, action_space=BOX
    )
    with h5py.File(tmp_path / "same-v0" / "data" / "main_data.hdf5") as file:
        assert file["episode_0/observations"].ndim == 2
    assert_equals_minari(tmp_path / "same-v0", view)


@pytest.mark.slow
def test_it_equals_what_torchrl_reads(minari, tmp_path, monkeypatch):
    from torchrl.data.datasets import MinariExperienceReplay

    # TorchRL 0.14 copies the shapes only, and so returns zeros.
    monkeypatch.setattr(TensorDict, "memmap_like", TensorDict.memmap)
    obs = gym.spaces.Dict({"box": BOX, "other": gym.spaces.Box(-9, 9, (2, 2), np.float64)})
    make(minari, "hdf5", obs=obs, act=BOX, infos=False)
    theirs = MinariExperienceReplay(
        "demo-v0", batch_size=None, root=tmp_path / "torchrl", load_from_local_minari=True
    )[:]
    ours = torch.cat(list(EpisodeDataset(tmp_path / "demo-v0").episodes()))
    assert len(theirs) == len(ours) == 9
    for key in ours.keys(include_nested=True, leaves_only=True):
        assert torch.equal(theirs[key], ours[key]), key
        assert theirs[key].dtype == ours[key].dtype


# ---- clips, and into other places ---------------------------------------------------------------


def test_only_the_rows_that_are_needed_are_read(minari, tmp_path, monkeypatch):
    make(minari, "hdf5", obs=BOX, infos=False, lengths=(50, 60))
    clips = ClipDataset(tmp_path / "demo-v0", 4)
    read, seen = h5py.Dataset.__getitem__, []

    def counted(self, part):
        values = read(self, part)
        seen.append(len(values))
        return values

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counted)
    clips[70]
    assert set(seen) == {4}


def test_infos_that_came_with_steps_alone(minari, tmp_path):
    make(minari, "hdf5", obs=BOX, infos=False, lengths=(3, 2))
    with h5py.File(tmp_path / "demo-v0" / "data" / "main_data.hdf5", "a") as file:
        for i, T in ((0, 3), (1, 2)):
            file[f"episode_{i}/infos/late"] = np.arange(T)
            file[f"episode_{i}/infos/odd"] = np.arange(T + 7)
    dataset = EpisodeDataset(tmp_path / "demo-v0")
    assert [key for key in dataset.keys if "info" in key] == [("next", "info", "late")]
    assert dataset.episode(0)["next", "info", "late"].tolist() == [0, 1, 2]


# ---- refusals and damage ------------------------------------------------------------------------


@every_layout
def test_a_damaged_episode_is_named_and_the_others_are_read(minari, layout, tmp_path):
    make(minari, layout, lengths=(3, 5, 1))
    data = tmp_path / "demo-v0" / "data"
    if layout == "hdf5":
        with h5py.File(data / "main_data.hdf5", "a") as file:
            del file["episode_1/observations/box"]
            file["episode_1/observations/box"] = np.zeros((2, 3), dtype=np.float32)
        match = r"episode 1 .*observations/box has 2 rows, expected 6 for 5 steps"
    else:
        [part] = (data / "1").glob("part*")
        part.write_bytes(part.read_bytes()[:700])
        match = r"episode 1 .*"
    dataset = EpisodeDataset(tmp_path / "demo-v0")
    with pytest.raises(DatasetError, match=match):
        dataset.episode(1)
    assert [len(dataset.episode(i)) for i in (0, 2)] == [3, 1]
    dataset.close()
    # Without its length, it has no clips.
    if layout == "hdf5":
        with h5py.File(data / "main_data.hdf5", "a") as file:
            del file["episode_0"]
    else:
        shutil.rmtree(data / "0")
    dataset = EpisodeDataset(tmp_path / "demo-v0")
    assert dataset.lengths.tolist() == [0, 5, 1]
    with pytest.raises(DatasetError, match="episode 0 of "):
        dataset.episode(0)
    with pytest.raises(DatasetError, match=r"metadata of episode 0 of .* cannot be read"):
        dataset.metadata(0)
    assert len(dataset.episode(2)) == 1


def test_foreign_and_broken_folders_are_refused(minari, tmp_path):
    make(minari, "hdf5")
    data = tmp_path / "demo-v0" / "data"
    about = json.loads((data / "metadata.json").read_text())

    def refused(text, match):
        (data / "metadata.json").write_text(text)
        with pytest.raises(DatasetError, match=match):
            EpisodeDataset(tmp_path / "demo-v0")

    refused("{", r"metadata\.json is no metadata of Minari")
    refused("{}", r"metadata\.json is no metadata of Minari: KeyError\('total_episodes'\)")
    refused(json.dumps(about | {"data_format": "csv"}), "data_format is 'csv', expected hdf5")
    (data / "metadata.json").unlink()
    with pytest.raises(DatasetError, match=r"Minari before 0\.5"):
        EpisodeDataset(tmp_path / "demo-v0")
    whole = (data / "main_data.hdf5").read_bytes()
    (data / "main_data.hdf5").write_bytes(whole[: len(whole) // 2])
    refused(json.dumps(about), r"cannot be read as 'minari'.*truncated")


def test_episodes_that_are_in_another_file_are_not_read(minari, tmp_path):
    make(minari, "hdf5")
    data = tmp_path / "demo-v0" / "data"
    with h5py.File(data / "main_data.hdf5", "a") as file, h5py.File(tmp_path / "x", "w") as other:
        file.copy("episode_0", other)
        del file["episode_0"]
        file["episode_0"] = h5py.ExternalLink(str(tmp_path / "x"), "episode_0")
    dataset = EpisodeDataset(tmp_path / "demo-v0")
    for read in (dataset.episode, dataset.metadata):
        with pytest.raises(DatasetError, match=r"episode_0.* is .*a link, which is not followed"):
            read(0)
    assert len(dataset.episode(1)) > 0


def test_a_missing_library_is_named(minari, tmp_path, monkeypatch):
    make(minari, "parquet", obs=BOX)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"torchrl-mt\[arrow\]"):
        EpisodeDataset(tmp_path / "demo-v0")
