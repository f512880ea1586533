"""The format ``folder``: its files are read by NumPy and Pillow alone, and damage is told by file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict, lazy_stack

from tests.datasets.episodes import assert_same
from tests.tiers import first_fast
from torchrl_mt.datasets import ClipDataset, DatasetError, EpisodeDataset, open_episodes
from torchrl_mt.datasets._files import image_files
from torchrl_mt.datasets.formats import folder as folder_format

T = 4


def random_images(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def write(path, *episodes, **options):
    with open_episodes(path, format="folder", **options) as out:
        out.write_episodes(episodes)
    return EpisodeDataset(path)


def files_of(path, episode=0):
    """The folder of an episode."""
    (folder,) = path.glob(f"data-*/chunk-*/episode-{episode:06d}")
    return folder


def episode(seed=0, **more):
    """An episode with an entry of every kind."""
    image = random_images(T + 1, 5, 6, 3, seed=seed)
    words = [torch.arange(n) + seed for n in (2, 0, 3, 1)]
    return TensorDict(
        {
            "action": torch.arange(T * 2.0).reshape(T, 2) + seed,
            "text": [f"line {t}\nof {seed}, ünïcode\u2028" for t in range(T)],
            "tokens": lazy_stack([TensorDict({"prompt": each}) for each in words]),
            "pixels": image[:-1],
            "next": {"pixels": image[1:], "reward": torch.zeros(T, 1)},
            **more,
        },
        [T],
    )


# ---- what is in the files -----------------------------------------------------------------------


def test_numpy_pillow_and_json_alone_read_the_files(tmp_path):
    data = episode()
    write(tmp_path / "set", data)
    folder = files_of(tmp_path / "set")
    names = " ".join(sorted(os.listdir(folder)))
    assert names == "action.npy next.reward.npy pixels text.jsonl tokens.prompt ~crc32.json"
    action = np.load(folder / "action.npy", mmap_mode="r")
    assert isinstance(action, np.memmap)
    assert action.tolist() == data["action"].tolist()
    lines = (folder / "text.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line) for line in lines] == data["text"]
    values, shapes = (np.load(folder / "tokens.prompt" / f"{x}.npy") for x in ("values", "shapes"))
    assert values.tolist() == [0, 1, 0, 1, 2, 0]
    assert shapes.tolist() == [[2], [0], [3], [1]]
    # Images of T steps and the last next one.
    names = sorted(os.listdir(folder / "pixels"))
    assert names == [f"{i:06d}.png" for i in range(T + 1)]
    images = np.stack([np.asarray(Image.open(folder / "pixels" / name)) for name in names])
    assert (images[:-1] == data["pixels"].numpy()).all()
    assert (images[1:] == data["next", "pixels"].numpy()).all()


def test_next_images_that_disagree_follow_all_others(tmp_path):
    agreeing, disagreeing = episode(), episode(1)
    disagreeing["next", "pixels"] = disagreeing["next", "pixels"].flip(0)
    dataset = write(tmp_path / "set", agreeing, disagreeing)
    names = sorted(os.listdir(files_of(tmp_path / "set", 1) / "pixels"))
    assert names == [f"{i:06d}.png" for i in range(2 * T)]
    assert_same(dataset.episode(1), disagreeing)


NO_IMAGES = [(), (7,), (5, 6, 2), (0, 4), (3, 0, 4), (2, 3, 4, 1), (1, 70_000)]
IMAGES = [(5, 6), (1, 1), (5, 6, 1), (5, 6, 3), (5, 6, 4), (1, 5, 6), (3, 5, 6), (4, 5, 6)]


@pytest.mark.parametrize("shape", [*NO_IMAGES, *IMAGES])
def test_bytes_that_may_be_images_are_files_of_images(shape, tmp_path):
    data = TensorDict({"x": random_images(T, *shape)}, [T])
    data["ragged"] = lazy_stack([TensorDict({"r": each}) for each in data["x"].unbind(0)])
    dataset = write(tmp_path / "set", data)
    assert len([*tmp_path.rglob("*.png")]) == (2 * T if shape in IMAGES else 0)
    assert_same(dataset.episode(0), data)


def test_an_episode_of_ragged_bytes_is_images_if_all_its_rows_are(tmp_path):
    def data(*shapes):
        steps = [TensorDict({"r": random_images(*shape)}) for shape in shapes]
        return TensorDict({"x": lazy_stack(steps)}, [len(shapes)])

    images, arrays = data((2, 3, 1), (1, 2, 3), (4, 5, 4)), data((2, 3, 1), (2, 2, 2))
    dataset = write(tmp_path / "set", images, arrays)
    first, second = (sorted(os.listdir(files_of(tmp_path / "set", i) / "x.r")) for i in (0, 1))
    assert first[:2] == ["000000.png", "000001.png"]
    assert second == ["shapes.npy", "values.npy"]
    assert_same(dataset.episode(0), images)
    assert_same(dataset.episode(1), arrays)


def test_thousands_of_episodes_are_not_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_format, "_CHUNK", 2)
    path = tmp_path / "set"
    dataset = write(path, *({"x": [i]} for i in range(5)))
    chunks = [sorted(os.listdir(chunk)) for chunk in sorted(path.glob("data-*/chunk-*"))]
    assert list(map(len, chunks)) == [2, 2, 1]
    assert [each["x"].item() for each in dataset.episodes()] == [*range(5)]


def test_a_data_set_can_be_moved(tmp_path):
    write(tmp_path / "set", episode())
    shutil.move(tmp_path / "set", tmp_path / "elsewhere")
    assert_same(EpisodeDataset(tmp_path / "elsewhere").episode(0), episode())


# ---- reading ------------------------------------------------------------------------------------


def test_a_clip_opens_the_images_of_its_steps_alone(tmp_path):
    data = {"pixels": random_images(20, 4, 4, 3)}
    write(tmp_path / "set", data)
    for row in {*range(20)} - {7, 8, 9, 12, 15}:
        (files_of(tmp_path / "set") / "pixels" / f"{row:06d}.png").unlink()
    clips = ClipDataset(tmp_path / "set", 3)
    assert torch.equal(clips[7]["pixels"], data["pixels"][7:10])
    clips = ClipDataset(tmp_path / "set", 3, stride=3)
    assert torch.equal(clips[9]["pixels"], data["pixels"][9:16:3])
    with pytest.raises(DatasetError, match=r"000010\.png is missing"):
        ClipDataset(tmp_path / "set", 4)[7]


@pytest.mark.parametrize("keys", first_fast([None, ["pixels"], ["next"], ["next", "pixels"]]))
def test_an_image_that_is_in_two_entries_is_decoded_once(keys, tmp_path, monkeypatch):
    """By a private function: what is read does not tell how often."""
    decoded = []

    def read_image(entry, row, *rest):
        decoded.append((entry.folder.name, row))
        return image_files.read_image(entry, row, *rest)

    disagreeing = episode(2)
    disagreeing["next", "pixels"] = disagreeing["next", "pixels"].flip(0)
    episodes = [episode(0), episode(1), disagreeing]
    write(tmp_path / "set", *episodes)
    dataset = EpisodeDataset(tmp_path / "set", keys)
    monkeypatch.setattr(folder_format, "read_image", read_image)
    for i, each in enumerate(episodes):
        assert_same(dataset.episode(i), each if keys is None else each.select(*keys))
        both = 2 * T if i == 2 else T + 1
        assert len(decoded) == len(set(decoded)) == (T if keys in (["pixels"], ["next"]) else both)
        decoded.clear()


# ---- options ------------------------------------------------------------------------------------


def test_jpeg_is_small_and_close_and_remembered(tmp_path):
    y, x = np.mgrid[:40, :60]
    smooth = np.stack([127 + 90 * np.sin(x / 25 + k) * np.cos(y / 20 - k) for k in range(3)], -1)
    image = torch.from_numpy(smooth.astype(np.uint8))
    data = {"rgb": image[None], "gray": image[None, ..., 0], "rgba": random_images(1, 4, 5, 4)}
    path = tmp_path / "set"
    write(path, data, jpeg_quality=90)
    write(path, data, mode="append")
    write(path, data, mode="append", jpeg_quality=90)
    said = "jpeg_quality must be that of the data set .*"
    with pytest.raises(ValueError, match=f"{said} 90, got 80"):
        open_episodes(path, mode="append", jpeg_quality=80)
    dataset = EpisodeDataset(path)
    for i in range(3):
        assert Image.open(files_of(path, i) / "rgb" / "000000.jpg").format == "JPEG"
        got = dataset.episode(i)
        assert torch.equal(got["rgba"], data["rgba"])
        for key in ("rgb", "gray"):
            assert (got[key].float() - data[key].float()).abs().mean() < 3
    write(path, data, mode="overwrite")
    assert torch.equal(EpisodeDataset(path).episode(0)["rgb"], data["rgb"])
    with pytest.raises(ValueError, match=f"{said} None, got 90"):
        open_episodes(path, mode="append", jpeg_quality=90)


@pytest.mark.parametrize("quality", [0, 101, -1, 90.0, "90", True])
def test_jpeg_quality_is_checked(quality, tmp_path):
    with pytest.raises(ValueError, match="jpeg_quality must be an integer from 1 to 100, got"):
        open_episodes(tmp_path / "set", jpeg_quality=quality)
    assert not os.listdir(tmp_path)


def test_only_images_need_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert len(write(tmp_path / "numbers", {"x": [1.0, 2.0]}).episode(0)) == 2
    with pytest.raises(ImportError, match=r"pip install 'torchrl-mt\[images\]'"):
        write(tmp_path / "set", episode())
    assert os.listdir(tmp_path) == ["numbers"]
    monkeypatch.undo()
    dataset = write(tmp_path / "set", episode())
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"torchrl-mt\[images\]"):
        dataset.episode(0)


# ---- damage and failures ------------------------------------------------------------------------


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def other_array(file):
    np.save(file, np.zeros((T, 5), dtype=np.float16))


def pickled_array(file):
    np.save(file, np.array([{}] * T), allow_pickle=True)


def short_array(file):
    np.save(file, np.load(file)[:-1])


def other_image(file):
    Image.new("L", (2, 2)).save(file)


def foreign(file):
    file.write_bytes(b"PK\x03\x04 nonsense \xff\xfe")


ARRAYS = ["action.npy", "tokens.prompt/values.npy", "tokens.prompt/shapes.npy"]
DAMAGE = [
    *((name, harm) for name in ARRAYS for harm in (cut, os.unlink, other_array, pickled_array)),
    ("action.npy", foreign),
    ("action.npy", short_array),
    ("tokens.prompt/values.npy", short_array),
    ("tokens.prompt/shapes.npy", short_array),
    *(("pixels/000002.png", harm) for harm in (cut, os.unlink, foreign, other_image)),
    *(("text.jsonl", harm) for harm in (cut, os.unlink, foreign)),
]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A data set of three episodes, for tests that repair what they damage."""
    path = tmp_path_factory.mktemp("three") / "set"
    write(path, *map(episode, range(3)))
    return path


@pytest.mark.parametrize(("name", "harm"), DAMAGE)
def test_a_damaged_file_is_named_and_other_episodes_are_read(name, harm, three, request):
    dataset = EpisodeDataset(three)
    file = files_of(three, 1) / name
    request.addfinalizer(partial(file.write_bytes, file.read_bytes()))
    harm(file)
    # Too few shapes are seen by the values that they do not explain.
    told = "tokens.prompt" if harm is short_array and "prompt" in name else name
    with pytest.raises(DatasetError, match=f"episode 1 of .*{told}.* Restore it from a copy"):
        dataset.episode(1)
    for i in (0, 2):
        assert_same(dataset.episode(i), episode(i))
    assert len([*dataset.episodes(skip_unreadable=True)]) == 2


@pytest.mark.parametrize("place", ["files", "list"])
def test_a_write_that_fails_leaves_nothing_and_the_next_one_counts(place, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "set"
    with open_episodes(path) as out:
        out.write_episode(episode(0))
        before = sorted(tmp_path.rglob("*"))
        with monkeypatch.context() as patch:
            if place == "files":
                patch.setattr(folder_format, "write_rows", fail)
            else:
                patch.setattr(out._writer._folder, "commit", fail)
            with pytest.raises(OSError, match="No space"):
                out.write_episode(episode(1))
        assert sorted(tmp_path.rglob("*")) == before
        out.write_episode(episode(2))
    dataset = EpisodeDataset(path)
    assert len(dataset) == 2
    assert_same(dataset.episode(1), episode(2))


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    path = tmp_path / "set"
    write(path, episode(0))
    folder = files_of(path)
    for leftover in (folder.with_name("episode-000001"), folder.parents[1] / ".unfinished"):
        shutil.copytree(folder, leftover)
        (leftover / "odd.npy").touch()
    assert len(EpisodeDataset(path)) == 1
    dataset = write(path, episode(1), mode="append")
    assert_same(dataset.episode(1), episode(1))
    assert sorted(os.listdir(files_of(path, 1))) == sorted(os.listdir(folder))
    assert not (folder.parents[1] / ".unfinished").exists()
