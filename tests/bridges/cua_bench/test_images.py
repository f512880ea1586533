"""Screenshots reach the engine as images, those of whole turns alone, and each is kept once."""

from __future__ import annotations

import base64

from tests.bridges.cua_bench.fake_worker import FakeWorker, png
from tests.bridges.cua_bench.test_collected import DONE, KEY
from tests.bridges.cua_bench.test_computer_env import env_on
from tests.collectors.pictures import SeeingEngine, collect, new_images
from tests.faulty_server import running
from torchrl_mt.bridges.cua_bench.actions import describe_actions
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage

MAX_STEP, MAX_HIST = 9, 2


def shot(step):
    return StoredImage.of(base64.b64decode(png(16, 16, step)))


def test_screenshots_in_a_collector():
    lines = [f'{i}. key("a") task{i}' for i in range(2 * MAX_STEP)]
    words = [describe_actions(), "Your first steps were:", KEY, DONE, *lines]
    _, processor = tiny_vl_model("qwen2_5_vl", " ".join(words))
    tokenizer = processor.tokenizer
    engine = SeeingEngine(processor, lambda prompt: tokenizer(f"{KEY} <end>")["input_ids"])
    with running(FakeWorker(lambda steps: {"screenshot": png(16, 16, steps)})) as server:
        env = env_on(server, max_step=MAX_STEP, max_hist=MAX_HIST)
        (batch,) = collect(env, engine, processor, data=[{"task": 0}])
    # After 2 h responses, the first h pairs become lines; their screenshots leave as a whole.
    left_out = [MAX_HIST * max(0, step // MAX_HIST - 1) for step in range(MAX_STEP)]
    expected = [tuple(map(shot, range(first, step + 1))) for step, first in enumerate(left_out)]
    assert engine.images == expected
    for (prompt, _), images in zip(engine.calls, engine.images, strict=True):
        assert prompt.count(processor.image_token_id) == 4 * len(images)
    kept = {image for new in new_images(batch) for image in new}
    assert kept == set(map(shot, range(MAX_STEP)))
    parents = batch["turn", "parent"].tolist()
    for k, (new, parent) in enumerate(zip(new_images(batch), parents, strict=True)):
        assert new == expected[k][len(expected[parent]) if parent >= 0 else 0 :]
    assert [k for k, parent in enumerate(parents) if parent < 0] == [0, 4, 6, 8]
