"""Prepared images are those of the processor itself, for every family and size."""

from __future__ import annotations

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.vision.episodes import FAMILIES, QWEN, family, random_image
from torchrl_mt.testing import tiny_chat_model, tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.model import VisionModel
from torchrl_mt.vision.positions import rope_positions

SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", FAMILIES)
@given(seed=SEEDS)
def test_inputs_are_the_processors(name, seed):
    _, processor = family(name)
    vision, rng = VisionProcessor.of(processor), random.Random(seed)
    images = [random_image(rng) for _ in range(rng.randint(1, 3))]
    text = "go".join([" "] + [f" {processor.image_token} "] * len(images))
    made = processor(images=[i.pil() for i in images], text=[text], return_tensors="pt")
    batch = vision.batch(images)
    assert set(batch) == set(made) & {"pixel_values", "image_grid_thw"}
    for key, value in batch.items():
        assert torch.equal(value, made[key])
    ids = processor.tokenizer(text)["input_ids"]
    assert vision.expanded(ids, images) == list(made["input_ids"][0])
    assert vision.collapsed(vision.expanded(ids, images), images) == ids
    sizes = [len(vision.inputs(image).token_ids) for image in images]
    spans = vision.spans(vision.expanded(ids, images), sizes)
    assert [size for _, size in spans] == sizes
    for image, size in zip(images, sizes, strict=True):
        assert vision.size(image).token_ids == (vision.image_token_id,) * size
        grid = vision.size(image).grid
        if name in QWEN:
            assert grid is not None
            assert np.prod(grid) == 4 * size
        else:
            assert (grid, size) == (None, 16)


@pytest.mark.parametrize(
    ("height", "width", "grid", "tokens"), [(16, 16, (1, 4, 4), 4), (8, 24, (1, 2, 6), 3)]
)
@pytest.mark.parametrize("name", QWEN)
def test_known_sizes(name, height, width, grid, tokens):
    image = StoredImage.of(np.zeros((height, width, 3), np.uint8))
    inputs = VisionProcessor.of(family(name)[1]).inputs(image)
    assert (inputs.grid, len(inputs.token_ids)) == (grid, tokens)
    assert inputs.pixel_values.shape[0] == np.prod(grid)


def test_inputs_are_kept_for_the_next_turn():
    _, processor = family("qwen2_vl")
    vision = VisionProcessor.of(processor)
    assert VisionProcessor.of(processor) is vision
    assert VisionProcessor.of(vision) is vision
    assert pickle.loads(pickle.dumps(vision)).tokenizer.get_vocab() == vision.tokenizer.get_vocab()
    image = random_image(random.Random(1))
    assert vision.inputs(image) is vision.inputs(image)
    assert vision.batch([]) == {}


def test_a_new_size_is_prepared_once_for_all_threads(monkeypatch):
    vision = VisionProcessor(family("qwen2_vl")[1])
    image, prepare, prepared = random_image(random.Random(3)), vision._inputs, []

    def slowly(image):
        prepared.append(image)
        time.sleep(0.05)
        return prepare(image)

    monkeypatch.setattr(vision, "_inputs", slowly)
    assert not vision.knows_size(image)
    with ThreadPoolExecutor(8) as threads:
        sizes = list(threads.map(vision.size, [image] * 8))
    assert len(prepared) == len(set(sizes)) == 1
    assert vision.knows_size(image)


@pytest.mark.parametrize("name", FAMILIES)
def test_processor_and_configuration_agree(name):
    model, processor = family(name)
    vision, facts = VisionProcessor.of(processor), VisionModel.of(model.config)
    assert vision.image_token_id == facts.image_token_id
    assert set(vision.barred) == set(facts.barred)
    assert (vision.merge_size, facts.merge_size) == ((2, 2) if name in QWEN else (None, None))


def test_placeholders_must_fit():
    vision = VisionProcessor.of(family("qwen3_vl")[1])
    image, token = random_image(random.Random(2)), vision.image_token_id
    with pytest.raises(ValueError, match=r"got 0 for 1 images.*list of parts"):
        vision.expanded([5], [image])
    with pytest.raises(ValueError, match="got 2 for 1 images"):
        vision.expanded([token, 5, token], [image])
    with pytest.raises(ValueError, match=r"got 3 for 1 images with 2 tokens"):
        vision.spans([token] * 3, [2])
    with pytest.raises(ValueError, match="2 tokens of image 1 must be side by side"):
        vision.spans([token, token, 5, token], [1, 2])
    assert vision.spans([token, 5, token, token, token], [1, 2, 1]) == [(0, 1), (2, 2), (4, 1)]


def test_other_families_are_refused():
    processor = family("llava")[1]
    with pytest.raises(TypeError, match=r"one of Qwen2VLProcessor.*LlavaProcessor.*got \w+:"):
        VisionProcessor.of(processor.tokenizer)
    with pytest.raises(TypeError, match="got SimpleNamespace"):
        VisionProcessor(SimpleNamespace(tokenizer=None, image_processor=None))


def test_a_processor_that_writes_other_tokens_is_refused():
    class LlavaProcessor:
        image_token, image_token_id, tokenizer = "<image>", 3, None
        image_processor = None

        def __call__(self, **kwargs):
            return {"input_ids": torch.tensor([[1, 3]]), "pixel_values": torch.zeros(1)}

    vision = VisionProcessor(LlavaProcessor())
    with pytest.raises(ValueError, match=r"replace '<image>' by itself repeated.*\[1, 3\]"):
        vision.inputs(random_image(random.Random(3)))


# Models


def test_models_of_text_are_none():
    model, _ = tiny_chat_model("hello")
    assert VisionModel.of(model.config) is None
    assert VisionModel.of(None) is None
    assert VisionModel.of(SimpleNamespace(model_type="gemma3")) is None


def test_plain_models_have_the_positions_of_text():
    facts = VisionModel.of(family("llava")[0].config)
    assert facts.positions(torch.tensor([True, False]), []) is None


def test_positions_need_all_of_an_images_tokens():
    with pytest.raises(ValueError, match="images have 4 tokens, and the row has 3 placeholders"):
        rope_positions(torch.tensor([True] * 3), [(1, 2, 2)])
    assert rope_positions(torch.zeros(3).bool(), []).tolist() == [[0, 1, 2]] * 3


def test_other_limits_of_pixels_count_from_the_next_use():
    _, processor = tiny_vl_model("qwen2_5_vl")
    image = random_image(random.Random(4))
    before = VisionProcessor.of(processor)
    tokens = before.size(image).token_ids
    processor.image_processor.patch_size = 2
    assert VisionProcessor.of(processor) is not before
    assert len(VisionProcessor.of(processor).size(image).token_ids) > len(tokens)


def test_a_refused_image_is_named():
    _, processor = tiny_vl_model("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"4 x 4000 pixels.*Qwen2_5_VLProcessor"):
        VisionProcessor.of(processor).size(StoredImage.of(np.zeros((4, 4000), np.uint8)))
