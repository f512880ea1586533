"""Images of episodes are read as they were written, and others can read them too."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from tensordict import TensorDict

from tests.collectors.pictures import Screens, SeeingEngine, collect
from torchrl_mt.datasets import DatasetError, EpisodeDataset, save_episodes, to_hf_dataset
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import with_stored_images

from .episodes import Objects, Steps, assert_same, pack
from .every_format import LOSSLESS, new_path


def picture(seed, height=6, width=5):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def as_file(seed, form):
    file = BytesIO()
    StoredImage.of(picture(seed)).pil().save(file, form)
    return StoredImage.of(file.getvalue())


IMAGES = [StoredImage.of(picture(1)), as_file(2, "PNG"), as_file(3, "JPEG")]


def episode() -> TensorDict:
    """Three turns: two images, none, one; a tool answers with an image in a message."""
    new = [(IMAGES[0], IMAGES[1]), (), (IMAGES[2],)]
    texts = []
    for images in new:
        parts = [{"type": "image", "image": image} for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "go"}]}
        texts.append([message, {"role": "assistant", "content": "a"}])
    return pack(Steps(3, {("images", "new"): Objects(new), ("text",): Objects(texts)}))


@pytest.mark.parametrize("format", LOSSLESS)
def test_episodes_with_images_are_read_as_they_were_written(format, tmp_path):
    path = new_path(tmp_path, format, "images")
    written = episode()
    save_episodes([written, written], path, format=format)
    for read in EpisodeDataset(path).episodes():
        assert_same(read, written)
        assert read.get(("images", "new")).tolist() == written.get(("images", "new")).tolist()
        first = read.get("text").tolist()[0][0]["content"]
        # The same bytes are the same object.
        assert [part["image"] for part in first[:2]] == IMAGES[:2]


def test_lines_can_be_read_by_others(tmp_path):
    path = tmp_path / "a.jsonl"
    save_episodes([episode()], path)
    (line,) = map(json.loads, path.read_text().splitlines())
    shown = [
        part["image"]
        for message in line["messages"]
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
    kinds = [uri.split(";")[0].removeprefix("data:image/") for uri in shown]
    assert kinds == ["png", "png", "jpeg"]
    content = [{"type": "image", "image": uri} for uri in shown]
    (found,) = with_stored_images([{"role": "user", "content": content}])
    for part, image in zip(found["content"], IMAGES, strict=True):
        assert (part["image"].array() == image.array()).all()


@pytest.mark.parametrize(
    "value",
    [
        IMAGES[0],
        IMAGES[2],
        {"image": IMAGES[0]},
        {"type": "image", "image": IMAGES[0], "detail": "low"},
        {"image": IMAGES[1], "note": (1, b"x")},
        {"images": [IMAGES[0], (IMAGES[1],)]},
        {"type": "image", "image": "data:image/png;base64,"},
        {"type": "image", "image": "a.png", "__type__": "image"},
    ],
)
def test_every_place_of_an_image(value, tmp_path):
    save_episodes([({"a": [1]}, {"x": value})], tmp_path / "a.jsonl")
    read = EpisodeDataset(tmp_path / "a.jsonl").metadata(0)["x"]
    assert read == value
    assert repr(read) == repr(value)


def test_a_file_names_no_other_file(tmp_path):
    path = tmp_path / "a.jsonl"
    save_episodes([{"a": [IMAGES[0]]}] * 2, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[1]["crc32"]
    lines[1]["steps"]["a"][0]["image"] = "/etc/hostname"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DatasetError, match="data: URI"):
        EpisodeDataset(path).episode(1)


def test_hugging_face_rows_have_the_images_as_uris():
    _, processor = tiny_vl_model("qwen2_5_vl")
    (batch,) = collect(Screens(2), SeeingEngine(processor), processor)
    (row,) = to_hf_dataset(batch)
    written = json.dumps(row["messages"])
    assert written.count("data:image/png;base64,") == 2
