"""Prompts with images, sent to servers that behave as vLLM and SGLang do."""

from __future__ import annotations

import random
from operator import setitem
from typing import Any

import pytest

from tests.engines.completions_server import CompletionsServer, sampled
from tests.engines.helpers import ask as ask_one
from tests.faulty_server import running, status
from tests.tiers import first_fast
from tests.vision.episodes import QWEN, family, random_dialogue, random_image
from tests.waiting import PATIENCE
from torchrl_mt.engines import CompletionsEngine
from torchrl_mt.engines.completions.engine import CompletionsError
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor

pytest.importorskip("httpx")
pytest.importorskip("tenacity")

APIS = ("vllm", "sglang")
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
RENDER = "/v1/chat/completions/render"


class ImageServer(CompletionsServer):
    """Takes images in both forms; ``seen_prompts`` are the prompts and images of its model."""

    processor: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.seen_prompts: list[tuple[list[int], list[StoredImage]]] = []
        self.items: dict[str, StoredImage] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.paths.append(path)
        if path == RENDER:
            return 200, self.change(self.render(body))
        if path == GENERATE["vllm"]:
            return 200, self.change(self.vllm(body))
        if path == GENERATE["sglang"]:
            return 200, self.change(self.sglang(body))
        return super().answer(path, body)

    def render(self, body: dict[str, Any]) -> dict[str, Any]:
        ((part,),) = (message["content"] for message in body["messages"])
        image = StoredImage.of(part["image_url"]["url"])
        ids = VisionProcessor.of(self.processor).inputs(image).token_ids
        self.items[f"data of {image.key}"] = image
        return {
            "model": body["model"],
            "token_ids": [4, *ids, 5],
            "features": {
                "mm_hashes": {"image": [f"hash of {image.key}"]},
                "mm_placeholders": {"image": [{"offset": 1, "length": len(ids)}]},
                "kwargs_data": {"image": [f"data of {image.key}"]},
            },
            "sampling_params": {},
        }

    def vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        features, tokens, params = body["features"], body["token_ids"], body["sampling_params"]
        images = [self.items[data] for data in features["kwargs_data"]["image"]]
        assert features["mm_hashes"]["image"] == [f"hash of {image.key}" for image in images]
        spans = [(p["offset"], p["length"]) for p in features["mm_placeholders"]["image"]]
        assert spans == self.spans(tokens, images)
        self.seen_prompts.append((tokens, images))
        answer, log_probs, reason = sampled(tokens, params["max_tokens"])
        content = [
            {"token": f"token_id:{token}", "logprob": log_prob}
            for token, log_prob in zip(answer, log_probs, strict=True)
        ]
        choice = {"finish_reason": reason, "token_ids": answer, "logprobs": {"content": content}}
        return {"request_id": "1", "choices": [{"index": 0, **choice}]}

    def sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        images = [StoredImage.of(uri) for uri in body["image_data"]]
        tokens = VisionProcessor.of(self.processor).expanded(body["input_ids"], images)
        self.seen_prompts.append((tokens, images))
        answer, log_probs, reason = sampled(tokens, body["sampling_params"]["max_new_tokens"])
        return {
            "text": "not to be used",
            "prompt_token_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": reason, "matched": answer[-1]},
                "output_token_logprobs": [
                    [log_prob, token, None]
                    for token, log_prob in zip(answer, log_probs, strict=True)
                ],
                "weight_version": "7",
            },
        }

    def spans(self, tokens: list[int], images: list[StoredImage]) -> list[tuple[int, int]]:
        vision = VisionProcessor.of(self.processor)
        left, out, at = list(images), [], 0
        while at < len(tokens):
            if tokens[at] == vision.image_token_id:
                out.append((at, len(vision.inputs(left.pop(0)).token_ids)))
                at += out[-1][1]
            else:
                at += 1
        assert not left
        return out


@pytest.fixture
def server():
    with running(ImageServer()) as server:
        server.processor = family("qwen2_5_vl")[1]
        yield server


@pytest.fixture
def make(server):
    def make(api="vllm", name="qwen2_5_vl", **kwargs):
        _, server.processor = family(name)
        settings = {
            "backoff": 0.01, "timeout": PATIENCE, "image_api": api, "max_total_tokens": 10_000,
            "max_new_tokens": 6,
        }  # fmt: skip
        return CompletionsEngine(server.url, "tiny", server.processor, **{**settings, **kwargs})

    return make


def ask(engine, turns, **kwargs):
    images = [{"images": turn.images} if turn.images else {} for turn in turns]
    given = zip(turns, images, strict=True)
    return [ask_one(engine, turn.prompt, **each, **kwargs) for turn, each in given]


def dialogue(name="qwen2_5_vl", seed=0, turns=4):
    rng = random.Random(seed)
    pool = [random_image(rng) for _ in range(3)]
    return random_dialogue(family(name)[1], rng, pool, turns)


def with_image(seed=0):
    """One turn that shows images."""
    turns = (turn for k in range(99) for turn in dialogue(seed=seed + k))
    return next(turn for turn in turns if turn.images)


# What is sent and what comes back


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", first_fast(["llava", *QWEN], 2))
def test_the_server_sees_the_prompt_and_its_images(make, server, api, name):
    turns = dialogue(name, seed=3)
    shown = [turn for turn in turns if turn.images]
    assert shown
    answers = ask(make(api, name), turns)
    for turn, answer in zip(turns, answers, strict=True):
        tokens, log_probs, reason = sampled(turn.prompt, 6)
        assert list(answer.token_ids) == tokens
        assert list(answer.log_probs) == log_probs
        assert (answer.finish_reason, answer.sampling) == (reason, {})
    assert len(server.seen_prompts) == len(shown)
    for turn, (tokens, images) in zip(shown, server.seen_prompts, strict=True):
        assert tokens == turn.prompt
        pixels = [[image.array().tolist() for image in each] for each in (images, turn.images)]
        assert pixels[0] == pixels[1]
    # Text goes where it always did.
    assert server.paths.count("/v1/completions") == len(turns) - len(shown)


def test_each_image_is_prepared_once(make, server):
    turns = dialogue(seed=3) * 3
    ask(make("vllm"), turns)
    assert server.paths.count(RENDER) == len({i for turn in turns for i in turn.images})


@pytest.mark.parametrize("api", APIS)
def test_sampling_parameters_have_the_servers_names(make, server, api):
    asked = {"top_p": 0.9, "priority": 3, "logit_bias": {"5": 2.0}}
    engine = make(api, extra_body=asked, logprobs_mode="processed_logprobs")
    (answer,) = ask(engine, [with_image()], seed=4, temperature=0.5, max_new_tokens=3, stop="x")
    body = server.seen[-1]
    params = body["sampling_params"]
    vision = VisionProcessor.of(server.processor)
    assert body["priority"] == 3
    assert params.pop("logit_bias") == {"5": 2.0, **{str(t): -100.0 for t in vision.barred}}
    own = {"vllm": ("max_tokens", "seed"), "sglang": ("max_new_tokens", "sampling_seed")}[api]
    assert [params.pop(name) for name in own] == [3, 4]
    if api == "vllm":
        assert params.pop("logprobs") == 1
    assert params == {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "stop": ["x"],
    }  # fmt: skip
    assert answer.sampling == {"temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": 2.0}}


@pytest.mark.parametrize("api", [*APIS, None])
def test_image_tokens_are_barred_in_text_too(make, server, api):
    ask_one(make(api))
    vision = VisionProcessor.of(server.processor)
    assert len(vision.barred) == 2
    assert server.seen[-1]["logit_bias"] == {str(token): -100.0 for token in vision.barred}


def test_sglang_reports_weight_versions(make):
    (answer,) = ask(make("sglang", version_key="metadata.weight_version"), [with_image()])
    assert set(answer.versions) == {7}


@pytest.mark.parametrize("api", APIS)
def test_failed_requests_are_retried(make, server, api):
    server.faults += [status(503), status(500)]
    turn = with_image()
    (answer,) = ask(make(api), [turn])
    assert list(answer.token_ids) == sampled(turn.prompt, 6)[0]


# Refusals


def test_images_that_cannot_be_sent_are_refused(make):
    turn, video = with_image(), family("qwen3_vl")[1].video_token_id
    for api, prompt, images, error, message in [
        (None, turn.prompt, turn.images, TypeError, "images cannot be sent .*image_api="),
        ("vllm", turn.prompt, turn.images[0], TypeError, "images must be a list"),
        ("vllm", turn.prompt, ["https://a.b/c.png"], ValueError, r"images\[0\]: .*https://a.b/c"),
        ("vllm", turn.prompt, None, ValueError, r"images must hold.*got none for \d+ image"),
        ("vllm", [5, video], [], ValueError, "prompt_ids must have none of the .* videos"),
    ]:
        with pytest.raises(error, match=message):
            ask_one(make(api), prompt, images=images)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"image_api": "openai"}, ValueError, r"image_api must be.*vllm.*got 'openai'"),
        ({"processor": None}, TypeError, "image_api needs the model's processor"),
        ({"tokenizer": "other"}, ValueError, "tokenizer and processor must belong together"),
        ({"processor": object()}, TypeError, "processor must be one of"),
    ],
)
def test_arguments_are_checked(server, kwargs, error, message):
    _, processor = family("qwen3_vl")
    if "tokenizer" in kwargs:
        kwargs = {"tokenizer": tiny_vl_model("qwen3_vl", "other words")[1].tokenizer}
    given = {"tokenizer": processor.tokenizer, "processor": processor, "image_api": "vllm"}
    with pytest.raises(error, match=message):
        CompletionsEngine(server.url, "tiny", **given | kwargs)


BROKEN = [
    ("vllm", lambda a: a.update(features=None), "features must describe"),
    ("vllm", lambda a: a["features"].update(mm_hashes={}), "features.mm_hashes.image must"),
    ("vllm", lambda a: a["features"].update(kwargs_data={"image": [None]}), "must have the image"),
    ("vllm answer", lambda a: a.update(choices=3), "the reply lacks"),
    ("sglang", lambda a: a.pop("prompt_token_ids"), r"prompt_token_ids must have.*SGLang"),
    ("sglang", lambda a: setitem(a["prompt_token_ids"], 0, 3), "differ at 0.*AVOID_RETOKENIZE"),
]


@pytest.mark.parametrize(("form", "edit", "error"), BROKEN)
def test_malformed_answers_are_named(make, server, form, edit, error):
    api, *whose = form.split()

    def change(answer):
        if api == "sglang" or ("features" in answer) != bool(whose):
            edit(answer)
        return answer

    server.change = change
    with pytest.raises(CompletionsError, match=error):
        ask(make(api, max_retries=0), [with_image()])


@pytest.mark.parametrize("api", APIS)
def test_prompts_must_have_the_tokens_of_their_images(make, server, api):
    turn = with_image()
    wrong = [token for token in turn.prompt if token != server.processor.image_token_id]
    with pytest.raises(ValueError, match=r"prompt_ids do not fit images: .*got 0 for"):
        ask_one(make(api), wrong, images=turn.images)
    assert not server.seen


def test_a_server_with_another_processor_is_refused(make, server):
    big = StoredImage.of(random_image(random.Random(0)).pil().resize((32, 32)))
    for api, error in [
        ("vllm", r"the server makes 4 tokens of an image that has 16 here.*pixels"),
        ("sglang", r"prompt_token_ids must be the 18 tokens that were sent, got 6.*differ at 5"),
    ]:
        engine = make(api)
        ids = VisionProcessor.of(server.processor).inputs(big).token_ids
        _, server.processor = tiny_vl_model("qwen2_5_vl", max_pixels=256)
        with pytest.raises(CompletionsError, match=error):
            ask_one(engine, [5, *ids, 6], images=[big])


def test_sglang_may_tell_the_prompt_with_hashes_for_images(make, server):
    def hashed(answer):
        image, seen = server.processor.image_token_id, answer["prompt_token_ids"]
        answer["prompt_token_ids"] = [10**9 if token == image else token for token in seen]
        return answer

    server.change = hashed
    turn = with_image()
    (answer,) = ask(make("sglang"), [turn])
    assert list(answer.token_ids) == sampled(turn.prompt, 6)[0]
