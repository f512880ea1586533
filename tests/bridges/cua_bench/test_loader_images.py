"""The loader's prompts with images: batches and stored rows are those of the model's processor."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from tests.bridges.cua_bench.loops import answers
from tests.collectors.pictures import Screens, picture
from torchrl_mt.bridges.cua_bench import MultiTurnDataLoader
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor

MARKED = "<|vision_start|>{}<|vision_end|>"


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava"])
def model(request):
    return tiny_vl_model(request.param)


class Worker:
    """An environment in cua-bench's form: the whole prompt as text, screenshots in base64 in it."""

    def __init__(self, config):
        self.config = config

    def reset(self):
        self.turn = 0
        self.obs = f"what is in this picture ? {self.screen()}"
        return {"obs": self.obs}, {"uid": "0"}

    def screen(self):
        image = StoredImage.of(picture(10 * self.config["n"] + self.turn))
        return MARKED.format(base64.b64encode(image.file()[1]).decode())

    def step(self, text):
        self.turn += 1
        self.obs += f" {text} {self.screen()}"
        return {"obs": self.obs, "reward": 1.0, "done": self.turn == 3}, {"uid": "0"}


def loader_of(own, env=None, **options):
    """A loader with a processor and its tokenizer, unless others are given."""
    lengths = {"max_prompt_length": 200, "max_response_length": 4}
    of_model = {"processor": own, "tokenizer": own.tokenizer}
    return MultiTurnDataLoader(env, **{"batch_size": 1, **of_model, **lengths, **options})


def answered(batch, tokenizer, text="go <end>"):
    return answers(batch, lambda row: tokenizer(text)["input_ids"])


def check_row(model, ids, mask, positions, data, inputs):
    """A row is what the model takes, by transformers' own means."""
    model, processor = model
    real = ids[mask.bool()]
    grid = inputs.get("image_grid_thw")
    assert len(data["image"]) == (len(inputs["pixel_values"]) if grid is None else len(grid))
    expected = VisionProcessor.of(processor).batch([StoredImage.of(x) for x in data["image"]])
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    if grid is None:
        assert positions[mask.bool()].tolist() == list(range(len(real)))
        return
    is_image = (real == processor.image_token_id).int()[None]
    kwargs = {"image_grid_thw": grid, "attention_mask": torch.ones_like(real)[None]}
    try:
        wanted, _ = model.model.get_rope_index(real[None], is_image, **kwargs)
    except (TypeError, AttributeError):  # Up to transformers 4 it takes no types of tokens.
        wanted, _ = model.model.get_rope_index(real[None], **kwargs)
    assert torch.equal(positions[:, mask.bool()], wanted[:, 0])


def check_rows(model, batch):
    """The same of all rows of a batch, or of a sample."""
    for row in range(len(batch["worker_id"])):
        check_row(
            model,
            *(batch[name][row] for name in ("input_ids", "attention_mask", "position_ids")),
            batch["multi_modal_data"][row],
            batch["multi_modal_inputs"][row],
        )


def play(loader, model, steps):
    """Answer until ``steps`` are stored; return the prompts in order."""
    seen = []
    for batch in loader:
        check_rows(model, batch)
        for row, ids in enumerate(batch["input_ids"]):
            images = batch["multi_modal_data"][row]["image"]
            assert batch["raw_prompt_ids"][row].count(model[1].image_token_id) == len(images)
            seen.append(ids[batch["attention_mask"][row].bool()].tolist())
        loader.async_step(answered(batch, model[1].tokenizer))
        if len(loader.storage) >= steps:
            return seen
    return seen


def test_observations_with_images(model):
    processor = model[1]
    of_class = {"env_class": Worker, "env_configs": [{"n": 0}, {"n": 1}], "is_multi_modal": True}
    with loader_of(processor, batch_size=2, **of_class) as loader:
        seen = play(loader, model, 6)
        steps = loader.sample_from_buffer(6)
    images = [picture(0), picture(1)]
    start, end = MARKED.split("{}") if "Qwen" in type(processor).__name__ else ("", "")
    mark = f"{start}{processor.image_token}{end}"
    text = f"what is in this picture ? {mark} go {mark}"
    whole = processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
    assert whole in seen
    check_rows(model, steps)
    for row in range(6):
        shown = steps["multi_modal_data"][row]["image"]
        tokens = VisionProcessor.of(processor)
        count = sum(len(tokens.inputs(StoredImage.of(each)).token_ids) for each in shown)
        prompt = steps[row]["tokens", "prompt"]
        assert int((prompt == processor.image_token_id).sum()) == count > 0


def test_messages_with_images(model):
    processor = model[1]
    with loader_of(processor, Screens(3), task_configs=[{"first": 1}]) as loader:
        batch = next(loader)
        barred = answered(batch, processor.tokenizer, processor.image_token)
        with pytest.raises(ValueError, match="stand for images"):
            loader.async_step(barred)
        loader.async_step(answered(batch, processor.tokenizer))
        play(loader, model, 3)
        stored = len(loader.storage)  # Further episodes may have ended meanwhile.
        steps = loader.sample_from_buffer(stored)
    lengths = sorted(len(data["image"]) for data in steps["multi_modal_data"])
    assert lengths == sorted([1, 2, 3] * (stored // 3))
    first = {np.asarray(data["image"][0]).tobytes() for data in steps["multi_modal_data"]}
    assert len(first) == 1


def test_the_switch_for_images(model):
    processor = model[1]
    with pytest.raises(ValueError, match="processor must be that of the model"):
        loader_of(processor, Screens(), processor=None, is_multi_modal=True)
    _, other = tiny_vl_model("qwen2_vl", "quite other words")
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        loader_of(processor, Screens(), tokenizer=other.tokenizer)
    with loader_of(processor, Screens(), is_multi_modal=False) as loader:
        assert loader._vision is None
