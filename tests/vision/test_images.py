"""An image is its content, however it was given, and is in memory once."""

from __future__ import annotations

import base64
import copy
import gc
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.waiting import in_thread
from torchrl_mt.vision import StoredImage, images

SIDE = st.integers(5, 12)


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def file_of(image, form="PNG", **options):
    out = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(out, form, **options)
    return out.getvalue()


@given(SIDE, SIDE, st.sampled_from([1, 3, 4]), st.integers(0, 99))
def test_pixels_are_kept_as_rgb(height, width, channels, seed):
    pixels = noise(height, width, channels, seed)
    rgb = np.repeat(pixels, 3, -1) if channels == 1 else pixels[..., :3]
    plain = pixels[..., 0] if channels == 1 else pixels
    forms = [pixels, pixels.transpose(2, 0, 1), torch.tensor(pixels), np.asfortranarray(pixels)]
    forms += [pixels[::-1][::-1], torch.tensor(pixels).permute(2, 0, 1), plain]
    image, *others = map(StoredImage.of, [*forms, Image.fromarray(plain)])
    assert all(other is image for other in others)
    assert (image.height, image.width, image.format) == (height, width, "raw")
    assert image.nbytes == height * width * 3
    assert np.array_equal(image.array(), rgb)
    assert np.array_equal(np.asarray(image.pil()), rgb)
    image.array()[:] = 0  # A copy.
    assert np.array_equal(image.array(), rgb)
    again = StoredImage.of(image.data_uri())
    assert again.format == "png"
    assert np.array_equal(again.array(), rgb)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_files_are_kept_as_they_are(form, tmp_path):
    data = file_of(noise(9, 7), form)
    path = tmp_path / "a picture"
    path.write_bytes(data)
    uri = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    given = [data, bytearray(data), memoryview(data), path, str(path), uri]
    image, *others = map(StoredImage.of, given)
    assert all(other is image for other in others)
    assert (image.data, image.format) == (data, form.lower())
    assert (image.height, image.width) == (9, 7)
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(image.array(), np.asarray(opened.convert("RGB")))
    assert StoredImage.of(image.data_uri()) is image
    assert StoredImage.of(image) is image


def test_homes_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(file_of(noise(8, 8)))
    assert StoredImage.of("~/a.png").height == 8


def test_transparency_is_dropped():
    pixels = noise(8, 8, 4)
    image = StoredImage.of(file_of(pixels))
    assert np.array_equal(image.array(), pixels[..., :3])
    assert image.pil().mode == "RGB"


def test_images_that_differ_are_others():
    pixels = noise(6, 8)
    image = StoredImage.of(pixels)
    other = pixels.copy()
    other[0, 0, 0] += 1
    for each in (other, pixels.reshape(8, 6, 3), file_of(pixels)):
        assert StoredImage.of(each) is not image
        assert StoredImage.of(each).key != image.key


def test_an_image_is_in_memory_once():
    image = StoredImage.of(noise(8, 8))
    assert copy.copy(image) is image
    assert copy.deepcopy([image, {"a": image}])[1]["a"] is image
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(image, protocol)) is image
    assert repr(image) == "StoredImage(height=8, width=8, format='raw', nbytes=192)"
    data, gone = pickle.dumps(image), weakref.ref(image)
    del image
    gc.collect()
    assert gone() is None
    assert np.array_equal(pickle.loads(data).array(), noise(8, 8))


def test_threads_share_an_image():
    data = [file_of(noise(8, 8, seed=k)) for k in range(4)]
    barrier = threading.Barrier(8)

    def read():
        barrier.wait()
        return [StoredImage.of(each) for each in data * 3]

    found = [wait() for wait in [in_thread(read) for _ in range(8)]]
    assert len({id(image) for images in found for image in images}) == 4


def test_a_known_file_is_not_decoded_again(monkeypatch):
    data = file_of(noise(8, 8))
    image = StoredImage.of(data)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)
    assert StoredImage.of(data) is image


PNG = file_of(noise(8, 8))
DEEP = Image.new("I;16", (8, 8))
PROGRAM = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("given", "kind", "error"),
    [
        (3, TypeError, "a PIL image, uint8 pixels, a path, a data: URI or the bytes.*got int"),
        (None, TypeError, "got NoneType"),
        (noise(8, 8) / 255, TypeError, "uint8 pixels from 0 to 255, got float64: scale"),
        (torch.zeros(3, 8, 8), TypeError, "got float32"),
        (noise(8, 8, 2), ValueError, r"1, 3 or 4 channels, got \[8, 8, 2\]"),
        (noise(0, 8), ValueError, r"got \[0, 8, 3\]"),
        (noise(8, 8)[None], ValueError, r"got \[1, 8, 8, 3\]"),
        (np.zeros(3, np.uint8), ValueError, r"got \[3\]"),
        ("no such file.png", ValueError, "a file that can be read, got 'no such file.png'"),
        ("/", ValueError, "a file that can be read, got '/'"),
        ("https://a.b/c.png", ValueError, "the address 'https://a.b/c.png': download it first"),
        ("data:image/png,xyz", ValueError, "a base64 data: URI .*got 'data:image/png'"),
        ("data:image/png;base64", ValueError, "a base64 data: URI"),
        ("data:image/png;base64,?", ValueError, "a valid base64 data: URI, but"),
        ("data:image/png;base64,AAAA", ValueError, "Pillow can read, got 3 bytes"),
        (b"", ValueError, "Pillow can read, got 0 bytes"),
        (PNG[: len(PNG) // 2], ValueError, "Pillow can read"),
        (PROGRAM, ValueError, "Pillow can read"),
        *((each, ValueError, "8 bits") for each in (DEEP, file_of(DEEP), Image.new("F", (8, 8)))),
        (torch.zeros(3, 8, 3, dtype=torch.uint8), ValueError, "which dimension .*permute"),
    ],
)
def test_what_is_no_image_is_refused(given, kind, error):
    with pytest.raises(kind, match=f"image must .*{error}"):
        StoredImage.of(given)


def test_an_array_has_its_channels_last_where_both_fit():
    assert StoredImage.of(np.zeros((4, 8, 3), np.uint8)).height == 4


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    assert StoredImage.of(file_of(noise(10, 10))).height == 10
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)
    for side, error in ((11, "at most 100 pixels .*got 10 x 11: make"), (40, "fewer .*400 pixels")):
        with pytest.raises(ValueError, match=f"image must have {error}") as caught:
            StoredImage.of(file_of(noise(10, side)))
        assert caught.type is ValueError
    monkeypatch.undo()
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", None)
    assert StoredImage.of(file_of(noise(10, 11, seed=7))).width == 11


@pytest.mark.parametrize("given", [b"no picture", PNG[: len(PNG) // 2], "data:image/png;base64,é"])
def test_errors_tell_nothing_of_this_process(given):
    with pytest.raises(ValueError, match="image must be") as caught:
        StoredImage.of(given)
    assert not any(word in str(caught.value) for word in ("object at", "0x", "BytesIO", "/"))


def test_a_jpeg_file_with_further_pictures_is_a_jpeg_file():
    """As some cameras write it; servers know no image/mpo."""
    first, second = (Image.fromarray(noise(8, 8, seed=k)) for k in range(2))
    file = io.BytesIO()
    first.save(file, "MPO", save_all=True, append_images=[second])
    image = StoredImage.of(file.getvalue())
    assert image.format == "jpeg"
    assert image.data_uri().startswith("data:image/jpeg;")
    assert StoredImage.of(image.data_uri()) is image
    assert pickle.loads(pickle.dumps(image)) is image


def test_images_are_made_by_of():
    with pytest.raises(TypeError, match=r"StoredImage.of\(image\)"):
        StoredImage()


def test_pillow_is_an_extra(monkeypatch):
    def missing(module, extra):
        raise ImportError(f"pip install torchrl-mt[{extra}]")

    monkeypatch.setattr(images, "import_extra", missing)
    image = StoredImage.of(noise(8, 8))  # Pixels need none.
    assert image.array().shape == (8, 8, 3)
    with pytest.raises(ImportError, match="images"):
        StoredImage.of(PNG + b" ")


def test_what_others_might_see_otherwise_is_kept_as_pixels_that_all_see():
    """A server that turns pictures or paints behind them would sample from another one."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 48, 4), dtype=np.uint8)
    shown = StoredImage.of(file_of(Image.fromarray(pixels, "RGBA")))
    assert Image.open(io.BytesIO(shown.data)).mode == "RGB"
    np.testing.assert_array_equal(shown.array(), pixels[..., :3])
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = np.rot90(pixels[..., :3], -1)
    opaque = Image.fromarray(pixels[..., :3])
    for file in (file_of(opaque, exif=exif), Image.open(io.BytesIO(file_of(opaque, exif=exif)))):
        shown = StoredImage.of(file)
        assert (shown.height, shown.width) == (48, 8)
        np.testing.assert_array_equal(shown.array(), turned)
    plain = file_of(opaque)
    assert StoredImage.of(plain).data == plain


def test_errors_are_short(tmp_path):
    with pytest.raises(ValueError, match="must be a file") as caught:
        StoredImage.of("A" * 100_000)
    assert len(str(caught.value)) < 300
    file = tmp_path / "a.png"
    file.write_bytes(file_of(Image.new("RGB", (8, 8))))
    uri = StoredImage.of(file).data_uri()
    assert StoredImage.of(f"file://{file}") is StoredImage.of(file)
    assert StoredImage.of(f"DATA{uri[4:40]}\n{uri[40:]}") is StoredImage.of(file)
