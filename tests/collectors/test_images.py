"""Images in episodes: exactly those of each prompt reach the engine, and each is kept once."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from torchrl.data import ReplayBuffer

from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.collectors.episode import Episode, Turn, episodes_to_tensordict
from torchrl_mt.collectors.limits import StopReason
from torchrl_mt.collectors.recorder import Recorder
from torchrl_mt.data import EpisodeStorage, EpisodeWriter
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep
from torchrl_mt.testing import tiny_chat_tokenizer, tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor, images_of

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"]


def picture(seed, height=16, width=16):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image_part(image):
    return {"type": "image", "image": image}


def text_part(text):
    return {"type": "text", "text": text}


def user(*parts):
    return {"role": "user", "content": list(parts)}


class SeeingEngine(ScriptedEngine):
    """Also records the images of every call."""

    def __init__(self, processor, rule=None):
        tokenizer = processor.tokenizer
        said = tokenizer("go<end>")["input_ids"]
        super().__init__(tokenizer, rule or (lambda prompt: list(said)))
        self.images = []

    async def generate(self, prompt_ids, *, images=(), **arguments):
        answer = await super().generate(prompt_ids, **arguments)
        self.images.append(tuple(images))
        return answer


class Screens(TextEnv):
    """Shows screen ``data["first"]``, then one of its own after every response."""

    def __init__(self, turns=3, size=(16, 16), form=lambda pixels: pixels):
        self.turns, self.size, self.form = turns, size, form

    def reset(self, data=None):
        self.data, self.step_number = data, 0
        return [user(text_part("what"), image_part(self.screen(data["first"])))]

    def screen(self, seed):
        return self.form(picture(seed, *self.size))

    def step(self, response):
        self.step_number += 1
        done = self.step_number >= self.turns
        seed = random.randrange(2**31)
        new = [] if done else [user(image_part(self.screen(seed)), text_part("go ?"))]
        return TextStep(new, reward=1.0, done=done)


@pytest.fixture(scope="module")
def processor():
    return tiny_vl_model("qwen2_5_vl")[1]


def collect(env, engine, processor, data=({"first": 1},), **options):
    settings = {"episodes_per_batch": 1, "total_episodes": 1, "max_consecutive_failures": 1}
    with MultiTurnCollector(
        env, engine, list(data), processor=processor, **{**settings, **options}
    ) as collector:
        return list(collector)


def new_images(batch):
    return batch.get(("images", "new")).tolist()


def placeholders(processor, images):
    vision = VisionProcessor.of(processor)
    return sum(len(vision.inputs(image).token_ids) for image in images)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_gets_the_images_of_each_prompt(family):
    _, processor = tiny_vl_model(family)
    engine = SeeingEngine(processor)
    (batch,) = collect(Screens(4), engine, processor)
    assert [len(images) for images in engine.images] == [1, 2, 3, 4]
    image_id = processor.image_token_id
    for (prompt, _), images in zip(engine.calls, engine.images, strict=True):
        assert prompt.count(image_id) == placeholders(processor, images)
    shown = [image for message in batch["text"] for image in images_of(message)]
    assert shown == list(engine.images[-1])
    assert shown[0] is StoredImage.of(picture(1))
    assert new_images(batch) == [(image,) for image in shown]
    assert all(isinstance(new, tuple) for new in new_images(batch))
    assert batch["turn", "parent"].tolist() == [-1, 0, 1, 2]
    prompts = batch.get(("tokens", "prompt"), as_list=True)
    assert [p.tolist() for p in prompts] == [prompt for prompt, _ in engine.calls]


def test_text_alone_has_no_images(processor):
    class Text(TextEnv):
        def reset(self, data=None):
            return [{"role": "user", "content": "what"}]

        def step(self, response):
            return TextStep(done=True)

    (batch,) = collect(Text(), SeeingEngine(processor), processor, data=[{}])
    assert new_images(batch) == [()]
    tokenizer = tiny_chat_tokenizer("what go")
    plain = ScriptedEngine(tokenizer, lambda prompt: tokenizer("go<end>")["input_ids"])
    (batch,) = collect(Text(), plain, None, data=[{}])
    assert "images" not in batch.keys()


class Forgets(TextEnv):
    """Every third step, its history has only the newest screen."""

    def reset(self, data=None):
        self.n = 0
        return [user(text_part("what"), image_part(picture(0)))]

    def step(self, response):
        self.n += 1
        new = [user(image_part(picture(self.n)))]
        history = [user(text_part("what"))] if self.n == 3 else None
        return TextStep(new, done=self.n == 6, history=history)


def test_a_history_forks_and_has_its_own_images(processor):
    engine = SeeingEngine(processor)
    (batch,) = collect(Forgets(), engine, processor)
    seen = [[StoredImage.of(picture(k)) for k in range(n)] for n in range(1, 4)]
    seen += [[StoredImage.of(picture(k)) for k in range(3, n)] for n in range(4, 7)]
    assert list(map(list, engine.images)) == seen
    assert batch["turn", "parent"].tolist() == [-1, 0, 1, -1, 3, 4]
    assert [len(new) for new in new_images(batch)] == [1, 1, 1, 1, 1, 1]


def test_long_prompts_lose_whole_images(processor):
    """16 x 16 pixels are 4 tokens; every prompt has all placeholders of the images it has."""
    engine = SeeingEngine(processor)
    longest = 40
    (batch,) = collect(Screens(9), engine, processor, max_prompt_tokens=longest)
    image_id = processor.image_token_id
    lengths = [len(prompt) for prompt, _ in engine.calls]
    assert max(lengths) <= longest and len(lengths) == 9
    assert len(engine.images[-1]) < 9
    first = engine.images[0][0]
    for (prompt, _), images in zip(engine.calls, engine.images, strict=True):
        assert prompt.count(image_id) == 4 * len(images)
        assert images[0] is first
    assert -1 in batch["turn", "parent"].tolist()[1:]
    with pytest.raises(RuntimeError) as caught:
        collect(Screens(9), SeeingEngine(processor), processor, max_prompt_tokens=5)
    assert "max_prompt_tokens=5" in str(caught.value.__cause__)


def test_limits_count_expanded_tokens(processor):
    engine = SeeingEngine(processor)
    limits = Limits(max_episode_tokens=25)
    (batch,) = collect(Screens(9), engine, processor, limits=limits)
    assert batch["stop_reason"][-1] == StopReason.MAX_EPISODE_TOKENS.value
    assert all(len(prompt) < 25 for prompt, _ in engine.calls)


def test_images_without_a_processor_are_refused_by_name(processor):
    engine = SeeingEngine(processor)
    with pytest.raises(RuntimeError) as caught:
        collect(Screens(), engine, None)
    assert "processor=" in str(caught.value.__cause__)
    assert "Screens.reset" in str(caught.value.__cause__)
    assert engine.calls == []

    class Workflow:
        async def arun_episode(self, engine, data):
            await engine.generate([5], images=[picture(1)])
            return 1.0

    with pytest.raises(RuntimeError) as caught:
        collect(Workflow(), engine, None)
    assert "processor=" in str(caught.value.__cause__)


def test_other_processors_tokenizers_and_parts_are_refused_by_name(processor):
    engine = SeeingEngine(processor)
    with pytest.raises(TypeError, match="processor must be one of Qwen2VLProcessor"):
        collect(Screens(), engine, processor.tokenizer)
    _, other = tiny_vl_model("qwen2_5_vl", "quite other words")
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        collect(Screens(), engine, other)
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        collect(Screens(), engine, processor, tokenizer=other.tokenizer)

    class Videos(Screens):
        def reset(self, data=None):
            return [user({"type": "video", "video": "a.mp4"})]

    class Broken(Screens):
        def reset(self, data=None):
            return [user(text_part("what"), image_part("no such file.png"))]

    for env, named in ((Videos(), "'video'"), (Broken(), r"messages\[0\]\['content'\]\[1\]")):
        with pytest.raises(RuntimeError) as caught:
            collect(env, engine, processor)
        cause = caught.value.__cause__
        assert named.replace("\\", "") in str(cause) and f"{type(env).__name__}.reset" in str(cause)


def test_workflows_give_all_images_of_every_prompt(processor):
    image_id = processor.image_token_id
    one, two = (StoredImage.of(picture(k)) for k in (1, 2))

    class Workflow:
        async def arun_episode(self, engine, data):
            prompt = [5, *[image_id] * 4]
            first = await engine.generate(prompt, images=[picture(1)])
            longer = engine.continued([6, *[image_id] * 4], [two])
            await engine.generate(longer)
            # The same tokens with another image go on from nothing.
            await engine.generate([*prompt, *first.token_ids, 7], images=[two])
            await engine.generate([*prompt, *first.token_ids, 8], images=[one])
            with pytest.raises(TypeError, match="images must be a list"):
                await engine.generate(prompt, images=picture(1))
            return 1.0

    engine = SeeingEngine(processor)
    (batch,) = collect(Workflow(), engine, processor)
    assert engine.images == [(one,), (one, two), (two,), (one,)]
    assert batch["turn", "parent"].tolist() == [-1, 0, -1, 0]
    assert new_images(batch) == [(one,), (two,), (two,), ()]


def test_parents_found_later_agree_in_images(processor):
    one, two = (StoredImage.of(picture(k)) for k in (1, 2))
    answer = Completion([3], [-0.5], [0], "stop")
    turns = [
        Turn([1, 9], answer, images=(one,)),
        Turn([1, 9, 3, 9], answer, images=(one, two)),
        Turn([1, 9, 3, 4], answer, images=(two,)),
    ]
    episode = Episode(None, 0, 0, turns, StopReason.DONE, shows_images=True)
    assert episode.parents() == [-1, 0, -1]
    assert new_images(episodes_to_tensordict([episode])) == [(one,), (two,), (two,)]


def test_calls_that_overtake_each_other_keep_their_images(processor):
    one, two = (StoredImage.of(picture(k)) for k in (1, 2))
    episode = Episode(None, shows_images=True)

    class Slow(SeeingEngine):
        async def generate(self, prompt_ids, *, images=(), **arguments):
            for _ in range(prompt_ids[0]):
                await asyncio.sleep(0)
            return await super().generate(prompt_ids, images=images, **arguments)

    recorder = Recorder(Slow(processor), episode, Limits())

    async def play():
        first = recorder.generate([9, 1], images=[one])
        await asyncio.gather(first, recorder.generate([2, 1], images=[two]))

    asyncio.run(play())
    assert [turn.images for turn in episode.turns] == [(one,), (two,)]


def ids_of_images(columns):
    found = set()
    for new, messages in columns:
        found |= {id(image) for image in new}
        found |= {id(image) for image in images_of(messages)}
    return found


def test_a_group_of_eight_with_ten_screenshots_keeps_73(processor):
    storage = EpisodeStorage(1000)
    (batch,) = collect(
        Screens(10),
        SeeingEngine(processor),
        processor,
        group_size=8,
        episodes_per_batch=8,
        total_episodes=8,
    )
    writer = EpisodeWriter()
    writer.register_storage(storage)
    writer.extend(batch)
    episodes = list(storage.episodes())
    assert len(episodes) == 8
    for source in ([batch], episodes):
        pairs = [
            pair
            for part in source
            for pair in zip(new_images(part), part.get("text").tolist(), strict=True)
        ]
        assert len(pairs) == 80
        assert all(len(new) == 1 for new, _ in pairs)
        assert len(ids_of_images(pairs)) <= 73
    first = [new_images(episode)[0][0] for episode in episodes]
    assert all(image is first[0] for image in first)
    copied = pickle.loads(pickle.dumps(storage.state_dict()))
    del copied
    once = sum(
        image.nbytes for image in {i for e in episodes for new in new_images(e) for i in new}
    )
    assert len(pickle.dumps(storage.state_dict())) < 1.5 * once + 400_000


def reachable_bytes(root):
    """Bytes of all strings, arrays and tensors that are reachable from an object."""
    seen, todo, total = set(), [root], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, type(gc), type(reachable_bytes))):
            continue
        seen.add(id(each))
        if isinstance(each, (bytes, str)):
            total += len(each)
        elif isinstance(each, np.ndarray):
            total += each.nbytes
            todo += list(each.reshape(-1)) if each.dtype == object else []
        elif isinstance(each, torch.Tensor):
            total += each.untyped_storage().nbytes()
        elif isinstance(each, StoredImage):
            todo.append(each.data)
            continue
        todo += gc.get_referents(each)
    return total


def test_ten_large_screenshots_take_their_own_bytes(processor):
    """Pixels of 1024 x 768, an episode of ten turns."""
    _, processor = tiny_vl_model("qwen2_5_vl", max_pixels=1024)
    (batch,) = collect(Screens(10, (768, 1024)), SeeingEngine(processor), processor)
    storage = EpisodeStorage(100)
    storage.append(batch)
    size = 10 * 1024 * 768 * 3
    episode = storage.episode(0)
    assert (
        size
        <= reachable_bytes([*new_images(episode), *episode.get("text").tolist()])
        <= 1.01 * size
    )
    assert size <= reachable_bytes(storage._store) <= 1.1 * size


def test_what_leaves_the_storage_is_freed(processor, tmp_path):
    storage = EpisodeStorage(6)
    engine = SeeingEngine(processor)
    data = [{"first": k} for k in range(50, 54)]
    batches = collect(Screens(3), engine, processor, data, total_episodes=4)
    images = [weakref.ref(i) for batch in batches for new in new_images(batch) for i in new]
    for batch in batches:
        storage.append(batch)
    storage.dumps(tmp_path)
    engine.images.clear()
    del batches, batch
    # Processors keep the inputs of the last images that they have seen.
    VisionProcessor.of(processor).inputs.cache_clear()
    gc.collect()
    left = [ref() is not None for ref in images]
    assert left == [False] * 6 + [True] * 6
    kept = [new_images(episode) for episode in storage.episodes()]
    loaded = EpisodeStorage(6)
    loaded.loads(tmp_path)
    assert [new_images(episode) for episode in loaded.episodes()] == kept
    other = EpisodeStorage(6)
    other.load_state_dict(storage.state_dict())
    assert [new_images(episode) for episode in other.episodes()] == kept
    clip = storage.episode(1)[1:]
    assert new_images(clip) == kept[1][1:]
    ReplayBuffer(storage=storage).empty()
    del kept, clip, loaded, other
    gc.collect()
    assert [ref for ref in images if ref() is not None] == []
