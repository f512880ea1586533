"""Prompts with images: sampled from as transformers' own forward pass has it, and shared by content."""

from __future__ import annotations

import asyncio
import copy
import threading
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torchrl.modules.llm import TransformersWrapper

from tests.tiers import few_or_many, slow
from torchrl_mt.engines import PolicyEngine, TransformersEngine
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.model import VisionModel

from .helpers import (
    changed_copy,
    check,
    each_version_is_its_own,
    endless,
    generate_all,
    held,
    idle,
    scripts,
    until,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")
"""The first has the code path of the second, and is left out of the fast tier."""
SIZES = ((16, 16), (16, 16), (8, 24), (32, 16), (48, 64))
"""Height and width of the pictures; the first two are told apart by their pixels alone."""


class Family:
    """A model, its processor, some pictures, and what transformers makes of them."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.processor = tiny_vl_model(name)
        self.tokenizer = self.processor.tokenizer
        self.vision = VisionProcessor.of(self.processor)
        self.facts = VisionModel.of(self.model.config)
        self.versions = [self.model, changed_copy(self.model)]
        generator = np.random.default_rng(0)
        self.pictures = [
            StoredImage.of(generator.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES
        ]

    def engine(self, **kwargs) -> TransformersEngine:
        return TransformersEngine(self.model, self.processor, **{"max_new_tokens": 6, **kwargs})

    def endless(self, **kwargs) -> TransformersEngine:
        return endless(self.model, self.processor, **kwargs)

    def message(self, shown, text="what is this ?") -> list[int]:
        """The tokens of a message and of the answer's beginning."""
        images = [self.pictures[i] for i in shown]
        parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
        made = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        return self.vision.expanded(self.tokenizer(made)["input_ids"], images)

    def ask(self, engine, shown, text="what is this ?", **kwargs):
        """A request, with ``images`` only if there are some."""
        return engine.generate(self.message(shown, text), **self.given(shown), **kwargs)

    def given(self, shown):
        return {"images": [self.pictures[i] for i in shown]} if shown else {}

    def log_probs(self, model, prompt, shown, answer) -> torch.Tensor:
        """The slow and obvious reference: transformers' forward pass over the whole row."""
        # One more token changes nothing; transformers 4 reads the one after each image's beginning.
        ids = torch.tensor([[*prompt, *answer.token_ids, 0]])
        given = self.vision.batch([self.pictures[i] for i in shown])
        if "image_grid_thw" in given and takes_token_types(model):
            given["mm_token_type_ids"] = (ids == self.facts.image_token_id).int()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}
        with torch.no_grad():
            inputs = {key: value.to(model.device) for key, value in inputs.items()}
            logits = model(**inputs).logits[0].cpu()
        logits[:, list(self.facts.barred)] = -torch.inf
        found = logits[len(prompt) - 1 : -2].log_softmax(-1)
        return found.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]

    def assert_sampled(self, prompt, shown, answer, model=None, atol=1e-4) -> None:
        expected = self.log_probs(model or self.model, prompt, shown, answer)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=atol, rtol=0)


def takes_token_types(model) -> bool:
    """Whether the processor tells the model which tokens are images, as from transformers 5 on."""
    return hasattr(model.model, "get_vision_position_ids")


@cache
def family(name: str) -> Family:
    return Family(name)


@pytest.fixture(params=[slow("qwen2_vl"), *FAMILIES[1:]])
def any_family(request) -> Family:
    return family(request.param)


@pytest.fixture
def qwen() -> Family:
    return family("qwen2_5_vl")


def count_seen(engine) -> list[int]:
    """Numbers of images in each pass of the engine's vision tower."""
    seen, see = [], engine._model.get_image_features

    def counting(pixel_values, image_grid_thw=None, **kwargs):
        seen.append(len(pixel_values if image_grid_thw is None else image_grid_thw))
        given = {} if image_grid_thw is None else {"image_grid_thw": image_grid_thw}
        return see(pixel_values=pixel_values, **given, **kwargs)

    engine._model.get_image_features = counting
    return seen


async def gather(requests):
    return await asyncio.gather(*requests)


# Exactness


@few_or_many(2, 12)
@pytest.mark.parametrize(
    "sizes", [slow({"cache_tokens": 8192}), {"cache_tokens": 192, "max_batch_tokens": 24}]
)
def test_log_probs_are_those_of_transformers_whatever_happens_meanwhile(
    any_family, sizes, examples
):
    """Several images or none, and pieces of images."""
    script = scripts(st.lists(st.integers(0, 4), max_size=3), 12)
    check(each_version_is_its_own, examples, script=script, family=any_family, **sizes)


@pytest.mark.parametrize("sharing", [True, False])
async def test_turns_that_add_images_are_exact_and_share_what_came_before(any_family, sharing):
    engine = any_family.engine(prefix_sharing=sharing, max_batch_tokens=20, max_new_tokens=3)
    seen = count_seen(engine)
    turns, prompt, shown = [], [], []
    for new in ([4, 0], [], [1], [2, 3]):
        prompt, shown = prompt + any_family.message(new), shown + new
        images = [any_family.pictures[i] for i in shown]
        answer = await engine.generate(prompt, images=images)
        turns.append((prompt, shown))
        any_family.assert_sampled(prompt, shown, answer)
        prompt = [*prompt, *answer.token_ids]
    stats = engine.stats()
    assert sum(seen) == 5  # each image once, also where the prompts are computed again
    computed = stats["prefill_tokens"]
    if sharing:
        # The last token of an answer is computed with the next turn.
        assert computed <= len(turns[-1][0])
        assert stats["shared_tokens"] >= sum(len(prompt) - 2 for prompt, _ in turns[:-1])
    else:
        assert computed == sum(len(prompt) for prompt, _ in turns)


def test_a_group_of_eight_sees_its_image_once(any_family):
    engine = any_family.engine(max_new_tokens=3)
    seen = count_seen(engine)
    prompt = any_family.message([4, 0])
    answers = asyncio.run(gather([any_family.ask(engine, [4, 0]) for _ in range(8)]))
    later = asyncio.run(gather([any_family.ask(engine, [4, 0], "what ?") for _ in range(8)]))
    stats = engine.stats()
    assert sum(seen) == 2
    assert stats["prefill_tokens"] < 2 * len(prompt)
    for answer in answers[::4]:
        any_family.assert_sampled(prompt, [4, 0], answer)
    for answer in later[::4]:
        any_family.assert_sampled(any_family.message([4, 0], "what ?"), [4, 0], answer)


async def test_answers_that_are_requeued_go_on_where_they_were(any_family):
    """Positions behind images are no places in the row, also of tokens that were sampled."""
    engine = any_family.endless(cache_tokens=96, prefix_sharing=False)
    shown = [[], [2], [0, 1], [3]]
    with held(engine):  # Together, the answers do not fit.
        requests = [any_family.ask(engine, each, max_new_tokens=20) for each in shown]
        tasks = [asyncio.create_task(request) for request in requests]
        await until(lambda: engine.stats()["waiting"] == len(shown))
    answers = await asyncio.gather(*tasks)
    stats = engine.stats()
    prompts = [any_family.message(each) for each in shown]
    assert stats["prefill_tokens"] > sum(map(len, prompts))
    for prompt, each, answer in zip(prompts, shown, answers, strict=True):
        any_family.assert_sampled(prompt, each, answer)


def test_images_of_the_same_size_are_not_mixed_up(any_family):
    """The prompts are equal token for token, and are asked one after the other, so that one is kept."""
    engine = any_family.engine(temperature=0)
    prompt = any_family.message([0])
    assert prompt == any_family.message([1])
    answers = [asyncio.run(any_family.ask(engine, [i], temperature=1.0, seed=3)) for i in (0, 1)]
    for i, answer in enumerate(answers):
        any_family.assert_sampled(prompt, [i], answer)
        other = any_family.log_probs(any_family.model, prompt, [1 - i], answer)
        assert (other - torch.tensor(answer.log_probs)).abs().max() > 1e-3


def test_an_image_twice_in_a_prompt_and_without_anything_between(any_family):
    image = any_family.vision.inputs(any_family.pictures[0])
    separated = any_family.message([0, 0])
    bare = [*any_family.message([]), *image.token_ids, *image.token_ids]  # ends with an image, too
    images = [any_family.pictures[0]] * 2
    engine = any_family.engine()
    requests = [engine.generate(prompt, images=images) for prompt in (separated, bare)]
    answers = asyncio.run(gather(requests))
    any_family.assert_sampled(separated, [0, 0], answers[0])
    if any_family.facts.merge_size is None:  # Qwen's own positions need something between
        any_family.assert_sampled(bare, [0, 0], answers[1])


def test_weights_changed_in_place_count_for_the_vision_tower(qwen):
    model = copy.deepcopy(qwen.model)
    engine = TransformersEngine(model, qwen.processor, max_new_tokens=4)
    asyncio.run(qwen.ask(engine, [0]))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.mul_(1.5)
    engine.update_weights(model)
    answer = asyncio.run(qwen.ask(engine, [0]))
    qwen.assert_sampled(qwen.message([0]), [0], answer, model)


def test_features_are_kept_within_the_size_of_the_cache(qwen):
    engine = qwen.engine(cache_tokens=64, max_new_tokens=1)
    seen, kept = count_seen(engine), engine._scheduler._model._features._kept
    for shown in ([4], [3], [2], [1], [0], [4]):
        answer = asyncio.run(qwen.ask(engine, shown))
        qwen.assert_sampled(qwen.message(shown), shown, answer)
        assert sum(map(len, kept.values())) <= 64
    assert sum(seen) == 6  # the first, of 48 tokens, had to go


# Text


@pytest.mark.parametrize("images", [None, [], ()])
def test_prompts_without_images_are_those_of_a_text_model(any_family, images):
    for tokenizer in (any_family.processor, any_family.tokenizer):
        engine = TransformersEngine(any_family.model, tokenizer, max_new_tokens=8)
        prompt = any_family.message([], "go ?")
        for answer in generate_all(engine, [prompt] * 3, images=images):
            any_family.assert_sampled(prompt, [], answer)


def test_image_tokens_are_never_sampled(any_family):
    model = copy.deepcopy(any_family.model)
    barred = list(any_family.facts.barred)
    likely = torch.zeros(len(any_family.tokenizer))
    likely[barred] = 50.0
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits + likely)
    engine = endless(model, any_family.processor)

    def ask(shown, **kwargs):
        return any_family.ask(engine, shown, max_new_tokens=12, **kwargs)

    requests = [ask([0]), ask([]), ask([0, 2], temperature=0), ask([1], top_k=2, seed=1)]
    answers = asyncio.run(gather(requests))
    for answer in answers:
        assert not set(answer.token_ids) & set(barred)
    # Their probability is shared out among the others.
    for shown, answer in zip(([0], []), answers[:2], strict=True):
        any_family.assert_sampled(any_family.message(shown), shown, answer, model)


# What is taken, and what is refused


def test_the_processor_comes_with_its_tokenizer(qwen):
    for engine in (
        TransformersEngine(qwen.model, qwen.processor),
        TransformersEngine(qwen.model, processor=qwen.processor),
        TransformersEngine(qwen.model, qwen.tokenizer, processor=qwen.vision),
    ):
        assert engine.tokenizer is qwen.tokenizer
        assert asyncio.run(qwen.ask(engine, [0], max_new_tokens=1)).token_ids


def test_requests_whose_images_do_not_fit_are_refused_and_leave_nothing(qwen, tmp_path):
    engine = qwen.engine(seed=5, max_new_tokens=5)
    one, text = qwen.message([0]), qwen.message([])
    first, other = qwen.pictures[0], qwen.pictures[3]
    swapped = qwen.message([0, 3])
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    refused = [
        (one, [], ValueError, r"images must hold .* got none for 4 image tokens"),
        (text, [first], ValueError, r"got 0 for 1 images with 4 tokens"),
        (one, [first, first], ValueError, r"got 4 for 2 images with 8 tokens"),
        (one, [other], ValueError, r"got 4 for 1 images with 8 tokens"),
        (swapped, [other, first], ValueError, r"do not fit images: the 8 tokens of image 0"),
        (one, [broken], ValueError, r"images\[0\]: image must be a file that Pillow can read"),
        (one, ["nowhere.png"], ValueError, r"images\[0\]: .*nowhere\.png"),
        (one, [5], TypeError, r"images\[0\]: image must be"),
        (one, first, TypeError, r"images must be a list .* got StoredImage"),
        (one, "picture.png", TypeError, r"images must be a list .* got str"),
        ([*one, 10**6], [first], ValueError, "prompt_ids must be token ids"),
        ([*text, qwen.processor.video_token_id], [], ValueError, "prompt_ids must .* videos"),
    ]
    for prompt, images, error, message in refused:
        with pytest.raises(error, match=f"(?s){message}"):
            asyncio.run(engine.generate(prompt, images=images))
    assert idle(engine)
    got = asyncio.run(qwen.ask(engine, [0]))
    fresh = qwen.engine(seed=5, max_new_tokens=5)
    assert got.token_ids == asyncio.run(qwen.ask(fresh, [0])).token_ids


def test_a_new_size_is_looked_at_in_a_thread(qwen, monkeypatch):
    picture = StoredImage.of(np.zeros((24, 40, 3), np.uint8))
    _, processor = tiny_vl_model("qwen2_5_vl")
    other = VisionProcessor.of(processor)
    prompt = [5, *qwen.vision.size(picture).token_ids]
    threads, prepare = [], other._inputs
    monkeypatch.setattr(
        other, "_inputs", lambda image: threads.append(threading.current_thread()) or prepare(image)
    )
    engine = TransformersEngine(qwen.model, processor, max_new_tokens=1)
    asyncio.run(engine.generate(prompt, images=[picture]))
    assert [thread.name for thread in threads] == ["torchrl_mt-call"]


def test_images_need_a_processor(qwen):
    engine = TransformersEngine(qwen.model, qwen.tokenizer)
    with pytest.raises(TypeError, match="images need the model's processor"):
        asyncio.run(qwen.ask(engine, [0]))
    with pytest.raises(ValueError, match="images must hold"):
        asyncio.run(engine.generate(qwen.message([0])))


OTHER_WORDS = "more words than the other one has a b c d e f g h i"


def test_processors_of_others_are_refused(qwen, model, tokenizer):
    other = type("Other", (), {"tokenizer": qwen.tokenizer, "image_token_id": 3})()
    larger = tiny_vl_model("qwen2_5_vl", OTHER_WORDS)[1]
    for given, error, message in [
        ((qwen.model, other), TypeError, r"processor must be one of Qwen2VLProcessor.* got Other"),
        ((model, qwen.processor), ValueError, r"a model that takes images.* LlamaForCausalLM"),
        ((qwen.model, larger), ValueError, "processor must have the model's image token"),
    ]:
        with pytest.raises(error, match=message):
            TransformersEngine(*given)
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        TransformersEngine(qwen.model, tokenizer, processor=qwen.processor)


def test_models_and_policies_for_text_refuse_images_by_name(qwen, model, tokenizer):
    engine = TransformersEngine(model, tokenizer)
    policy = PolicyEngine(TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens"))
    for each, name in ((engine, "LlamaForCausalLM"), (policy, "PolicyEngine")):
        with pytest.raises(TypeError, match=f"^images cannot be given to .*{name}"):
            asyncio.run(each.generate([5, 6], images=[qwen.pictures[0]]))
        assert asyncio.run(each.generate([5, 6], images=[], max_new_tokens=1)).token_ids
