"""The format ``video``: PyAV alone reads its files, and any frame is that of the whole file."""

from __future__ import annotations

import logging
import os
import random
import threading

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.episodes import assert_same
from tests.datasets.formats.test_folder import cut, files_of, foreign, random_images
from tests.tiers import examples
from torchrl_mt.datasets import ClipDataset, DatasetError, EpisodeDataset, open_episodes


def smooth(T, *shape):
    """Images that change smoothly, of a layout: ``[T, *shape]``."""
    *_, height, width = [side for side in shape if side not in (1, 3)]
    t, y, x = np.mgrid[:T, :height, :width]
    channels = [127 + 100 * np.sin(x / 30 + t / 9 + k) * np.cos(y / 25 - t / 7) for k in range(3)]
    if len(shape) == 2:
        images = channels[0]
    else:
        axis = -1 if shape[-1] in (1, 3) else 1
        images = np.stack(channels[: shape[axis] if axis == -1 else shape[0]], axis)
    assert images.shape[1:] == shape
    return torch.from_numpy(images.astype(np.uint8))


def write(path, *episodes, **options):
    with open_episodes(path, format="video", **options) as out:
        out.write_episodes(episodes)
    return EpisodeDataset(path)


def with_next(images):
    """An episode whose next images are the images one step later."""
    return {"pixels": images[:-1], "next": {"pixels": images[1:]}}


def frames_of(file, format="rgb24"):
    """Decode a whole file from its beginning, with PyAV alone."""
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format=format) for frame in container.decode(video=0)])


def psnr(got, expected):
    error = (got.double() - expected.double()).square().mean()
    return 10 * torch.log10(255**2 / error).item()


# ---- what is in the files -----------------------------------------------------------------------


def test_pyav_alone_reads_the_frames_in_order(tmp_path):
    images = smooth(9, 48, 64, 3)
    dataset = write(tmp_path / "set", with_next(images), fps=12)
    file = files_of(tmp_path / "set") / "pixels.mp4"
    assert sorted(os.listdir(file.parent)) == [file.name, "~crc32.json"]
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == ("h264", 12, 9)
    frames = torch.from_numpy(frames_of(file))
    assert psnr(frames, images) > 30
    got = dataset.episode(0)
    assert torch.equal(got["pixels"], frames[:-1])
    assert torch.equal(got["next", "pixels"], frames[1:])


def test_next_images_that_disagree_follow_all_others(tmp_path):
    agreeing, images = with_next(smooth(6, 16, 16, 3)), smooth(5, 16, 16, 3)
    disagreeing = {"pixels": images, "next": {"pixels": images.flip(0)}}
    dataset = write(tmp_path / "set", agreeing, disagreeing, crf=0)
    assert len(frames_of(files_of(tmp_path / "set", 1) / "pixels.mp4")) == 10
    got = dataset.episode(1)
    assert torch.equal(got["pixels"], images)
    assert torch.equal(got["next", "pixels"], images.flip(0))


@pytest.mark.parametrize(
    "shape",
    [(64, 64, 3), (3, 65, 47), (47, 65, 3), (48, 64), (49, 63, 1), (1, 48, 64), (3, 240, 320)],
)
def test_smooth_images_are_close(shape, tmp_path):
    images = smooth(5, *shape)
    got = write(tmp_path / "set", {"pixels": images}).episode(0)["pixels"]
    assert (got.shape, got.dtype) == (images.shape, torch.uint8)
    assert psnr(got, images) > 30


def test_what_is_no_picture_is_stored_as_in_the_format_folder(tmp_path):
    images = [random_images(5 + t, 6, 3, seed=t) for t in range(4)]
    data = {
        "rgba": random_images(4, 8, 9, 4),
        "stack": random_images(4, 4, 8, 9),
        "ragged": images,
        "labels": random_images(4, 8, 9).short(),
        "bytes": random_images(4, 7),
        "text": ["a", "b", "c", "d"],
    }
    dataset = write(tmp_path / "set", data)
    names = " ".join(sorted(os.listdir(files_of(tmp_path / "set"))))
    assert names == "bytes.npy labels.npy ragged rgba stack text.jsonl ~crc32.json"
    write(tmp_path / "folder", data)
    assert_same(dataset.episode(0), EpisodeDataset(tmp_path / "folder").episode(0))
    assert torch.equal(dataset.episode(0)["rgba"], data["rgba"])


# ---- any frame ----------------------------------------------------------------------------------


@examples(30, few=5)
@given(
    T=st.sampled_from([1, 2, 15, 16, 17, 33]) | st.integers(1, 70),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    layout=st.sampled_from(["hw", "hw1", "hw3", "1hw", "3hw"]),
    is_noise=st.booleans(),
    crf=st.sampled_from([None, 0, 40]),
    fps=st.sampled_from([1, 7, 24, 30, 60, 1000]),
    seed=st.integers(0, 1000),
)
def test_frames_read_alone_are_those_of_the_whole_file(
    T, height, width, layout, is_noise, crf, fps, seed, tmp_path_factory
):
    shape = [{"h": height, "w": width}.get(each) or int(each) for each in layout]
    if is_noise or {height, width} & {1, 3}:
        images = random_images(T, *shape, seed=seed)
    else:
        images = smooth(T, *shape)
    path = tmp_path_factory.mktemp("data") / "set"
    dataset = write(path, {"pixels": images}, crf=crf, fps=fps)
    whole = dataset.episode(0)["pixels"]
    assert whole.shape == images.shape
    if crf == 0:
        assert torch.equal(whole, images)
    rng = random.Random(seed)
    for row in {0, T - 1, rng.randrange(T), rng.randrange(T)}:
        stride = rng.choice([each for each in (1, 2, 5, 17) if row + each <= T])
        number = min(rng.randrange(1, 20), (T - row) // stride)
        clip = ClipDataset(dataset, number, stride=stride)[row]["pixels"]
        assert torch.equal(clip, whole[row::stride][:number])


def test_clips_read_the_frames_of_their_steps(tmp_path):
    images = smooth(41, 24, 32, 3)
    dataset = write(tmp_path / "set", with_next(images), with_next(images[:20]))
    whole = [dataset.episode(i) for i in range(2)]
    clips = ClipDataset(dataset, 4)
    for number, (i, start) in {0: (0, 0), 20: (0, 20), 36: (0, 36), 40: (1, 3)}.items():
        clip = clips[number]
        assert torch.equal(clip["pixels"], whole[i]["pixels"][start : start + 4])
        assert torch.equal(clip["next", "pixels"], whole[i]["next", "pixels"][start : start + 4])


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux lists what is open")
def test_nothing_is_left_open(tmp_path):
    def left():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    write(tmp_path / "first", {"x": smooth(3, 16, 16, 3)}).episode(0)
    before, threads = left(), threading.active_count()
    dataset = write(tmp_path / "set", {"x": smooth(20, 64, 64, 3)})
    dataset.episode(0)
    assert left() == before
    assert threading.active_count() == threads


# ---- options ------------------------------------------------------------------------------------


def test_options_are_remembered(tmp_path):
    path, data = tmp_path / "set", {"x": random_images(5, 9, 11, 3)}
    write(path, data, crf=0, fps=5)
    dataset = write(path, data, mode="append")
    write(path, data, mode="append", crf=0, fps=5)
    assert torch.equal(dataset.episode(1)["x"], data["x"])
    with pytest.raises(ValueError, match=r"crf must be that of the data set .* 0, got 23"):
        open_episodes(path, mode="append", crf=23)
    with pytest.raises(ValueError, match=r"fps must be that of the data set .* 5, got 30"):
        open_episodes(path, mode="append", fps=30)


@pytest.mark.parametrize(
    "option", [{"crf": 52}, {"crf": -1}, {"crf": "23"}, {"fps": 0}, {"fps": 29.97}, {"fps": True}]
)
def test_options_are_checked(option, tmp_path):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} must be an integer from .*, got"):
        open_episodes(tmp_path / "set", format="video", **option)
    with pytest.raises(TypeError, match="codec"):
        open_episodes(tmp_path / "set", format="video", codec="libx264")
    assert not os.listdir(tmp_path)


def test_that_it_is_lossy_is_said_once_for_a_data_set(tmp_path, caplog):
    data = {"x": random_images(2, 8, 8, 3), "n": [1, 2], "y": random_images(2, 8, 8)}
    with caplog.at_level(logging.WARNING, logger="torchrl_mt"):
        write(tmp_path / "numbers", {"n": [1, 2]})
        write(tmp_path / "lossless", data, crf=0)
        assert not caplog.records
        write(tmp_path / "first", data, data)
        write(tmp_path / "first", data, mode="append")
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"{tmp_path / 'first'}: 'x', 'y' are written as video, which is lossy" in said
    assert "crf=0" in said


# ---- damage -------------------------------------------------------------------------------------


def another(*shape):
    """Puts another video in the place of a file."""

    def harm(file):
        other = write(file.parents[4] / "other", {"x": smooth(*shape)}, mode="overwrite")
        os.replace(files_of(other.path) / "x.mp4", file)

    return harm


@pytest.mark.parametrize(
    "harm",
    [cut, foreign, os.unlink, another(5, 16, 16, 3), another(6, 16, 18, 3)],
    ids=["cut", "foreign", "missing", "shorter", "wider"],
)
def test_a_damaged_file_is_named_and_other_episodes_are_read(harm, tmp_path):
    data = {"x": random_images(6, 16, 16, 3)}
    dataset = write(tmp_path / "set", data, data, data, crf=0)
    harm(files_of(tmp_path / "set", 1) / "x.mp4")
    with pytest.raises(DatasetError, match=r"episode 1 of .*/x\.mp4 is (damaged|missing)"):
        dataset.episode(1)
    for i in (0, 2):
        assert torch.equal(dataset.episode(i)["x"], data["x"])


def test_frames_that_the_decoder_would_make_up_are_refused(tmp_path):
    dataset = write(tmp_path / "set", {"x": smooth(20, 48, 64, 3)}, crf=10)
    file = files_of(tmp_path / "set") / "x.mp4"
    content, rng, noticed = file.read_bytes(), random.Random(0), 0
    for _ in range(40):
        damaged = bytearray(content)
        damaged[rng.randrange(1000, len(content) // 2)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            dataset.episode(0)
        except DatasetError:
            noticed += 1
    # A flipped bit may also mean another color, so not all can be noticed.
    assert noticed > 15
