"""Images in messages: every usual form is the same image."""

from __future__ import annotations

import base64
import random

import pytest
from PIL import Image

from tests.vision.episodes import random_image
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.messages import for_template, images_of, is_image_part, with_stored_images

PICTURE = StoredImage.of(random_image(random.Random(0)).data_uri())
URI = PICTURE.data_uri()
FORMS = [
    {"type": "image", "image": PICTURE},
    {"type": "image", "image": URI},
    {"type": "image", "image": PICTURE.data},
    {"type": "image", "url": URI},
    {"type": "image", "base64": base64.b64encode(PICTURE.data).decode()},
    {"type": "image", "base64": URI},
    {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    {"type": "image_url", "image_url": URI},
    {"type": "input_image", "image_url": URI},
    {"type": "image", "image": {"bytes": PICTURE.data, "path": None}},  # a row of Hugging Face's
]


@pytest.mark.parametrize("part", FORMS)
def test_forms_of_an_image(part):
    text = {"type": "text", "text": "what"}
    plain = {"role": "system", "content": "be good"}
    message = {"role": "user", "content": [text, part, text], "name": "x"}
    stored = with_stored_images([plain, message])
    assert stored[0] is plain
    assert stored[1] == {**message, "content": [text, {"type": "image", "image": PICTURE}, text]}
    assert stored[1]["content"][1]["image"] is PICTURE
    assert message["content"][1] is part  # The given message is unchanged.
    assert with_stored_images(stored) == stored
    assert images_of(stored) == [PICTURE]
    assert for_template(stored)[1] == {**message, "content": [text, {"type": "image"}, text]}
    assert for_template(stored)[0] is plain
    assert is_image_part(part)


def test_files(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PICTURE.data)
    parts = [{"type": "image", "path": str(path)}, {"type": "image", "image": path}]
    parts.append({"type": "image", "image": PICTURE.pil()})
    one, two, three = images_of(with_stored_images([{"role": "user", "content": parts}]))
    assert one is two is PICTURE
    assert three.format == "raw"


def test_messages_without_images_are_left_alone():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "image"}, "loose", 3]},
        {"role": "user", "content": ()},
    ]
    for made in (with_stored_images(messages), for_template(messages)):
        assert all(a is b for a, b in zip(made, messages, strict=True))
    assert images_of(messages) == []
    assert not is_image_part({"type": "text"})


@pytest.mark.parametrize(
    ("part", "kind", "error"),
    [
        ({"type": "image"}, ValueError, "a part of type 'image' must have its image under one of"),
        ({"type": "image_url", "image_url": {}}, TypeError, "got NoneType"),
        ({"type": "image", "image": 3}, TypeError, "got int"),
        ({"type": "image_url", "image_url": "https://a.b"}, ValueError, "download it first"),
        ({"type": "image", "image": "nowhere"}, ValueError, "nowhere"),
        ({**FORMS[0], "max_pixels": 64}, ValueError, "max_pixels.*processor"),
    ],
)
def test_errors_name_the_message_and_the_part(part, kind, error):
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": ["text", part]}]
    with pytest.raises(kind, match=rf"messages\[1\]\['content'\]\[1\]: .*{error}"):
        with_stored_images(messages)


def test_pictures_of_pillow_keep_their_pixels():
    image = Image.new("P", (9, 5))
    part = {"type": "image", "image": image}
    (stored,) = images_of(with_stored_images([{"role": "user", "content": [part]}]))
    assert (stored.height, stored.width) == (5, 9)
