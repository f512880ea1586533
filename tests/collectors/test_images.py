"""Images in episodes: exactly those of each prompt reach the engine, and each is kept once."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torchrl.data import ReplayBuffer

from tests.buffers import buffer_of
from tests.collectors.pictures import (
    Screens,
    SeeingEngine,
    collect,
    image_part,
    new_images,
    picture,
    text_part,
    user,
)
from tests.collectors.runs import lists
from tests.collectors.scripted import ScriptedEngine
from torchrl_mt.collectors import ChatOptions, Limits
from torchrl_mt.collectors.episode import Episode, Turn, episodes_to_tensordict
from torchrl_mt.collectors.limits import StopReason
from torchrl_mt.collectors.recorder import Recorder
from torchrl_mt.data import EpisodeStorage
from torchrl_mt.engines import Completion
from torchrl_mt.envs import TextEnv, TextStep, Tool, ToolEnv
from torchrl_mt.envs.tools import ToolError, call_tool
from torchrl_mt.testing import tiny_chat_tokenizer, tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.messages import images_of

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"]


@pytest.fixture(scope="module")
def processor():
    return tiny_vl_model("qwen2_5_vl")[1]


class Text(TextEnv):
    """One turn without images."""

    def reset(self, data=None):
        return [{"role": "user", "content": "what"}]

    def step(self, response):
        return TextStep(done=True)


def refusal_of(*args, **options):
    """What the error says that ends a run of one episode."""
    with pytest.raises(RuntimeError) as caught:
        collect(*args, **options)
    return str(caught.value.__cause__)


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
    assert lists(batch, "tokens", "prompt") == [prompt for prompt, _ in engine.calls]


def threads_of_preparation(monkeypatch):
    """The threads in which an image is prepared from now on."""
    threads, prepare = [], VisionProcessor.inputs

    def inputs(vision, image):
        threads.append(threading.current_thread())
        return prepare(vision, image)

    monkeypatch.setattr(VisionProcessor, "inputs", inputs)
    return threads


def test_other_episodes_do_not_wait_while_an_image_of_a_new_size_is_prepared(monkeypatch):
    _, processor = tiny_vl_model("qwen2_5_vl")
    threads = threads_of_preparation(monkeypatch)
    collect(Screens(2, (24, 40)), SeeingEngine(processor), processor)
    assert {thread.name for thread in threads} == {"torchrl_mt-call"}


def test_text_alone_has_no_images(processor):
    (batch,) = collect(Text(), SeeingEngine(processor), processor, data=[{}])
    assert new_images(batch) == [()]
    tokenizer = tiny_chat_tokenizer("what go")
    plain = ScriptedEngine(tokenizer, lambda prompt: tokenizer("go<end>")["input_ids"])
    (batch,) = collect(Text(), plain, None, data=[{}])
    assert "images" not in batch.keys()  # noqa: SIM118  (TensorDict)


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
    engine, longest = SeeingEngine(processor), 40
    (batch,) = collect(Screens(9), engine, processor, chat=ChatOptions(max_prompt_tokens=longest))
    lengths = [len(prompt) for prompt, _ in engine.calls]
    assert max(lengths) <= longest
    assert len(lengths) == 9
    assert len(engine.images[-1]) < 9
    for (prompt, _), images in zip(engine.calls, engine.images, strict=True):
        assert prompt.count(processor.image_token_id) == 4 * len(images)
        assert images[0] is engine.images[0][0]
    assert batch["turn", "parent"].tolist() != list(range(-1, 8)), "it goes on in other rows"
    chat = ChatOptions(max_prompt_tokens=5)
    assert "max_prompt_tokens=5" in refusal_of(Screens(9), engine, processor, chat=chat)


def test_limits_count_expanded_tokens(processor):
    engine = SeeingEngine(processor)
    limits = Limits(max_episode_tokens=25)
    (batch,) = collect(Screens(9), engine, processor, limits=limits)
    assert batch["stop_reason"][-1] == StopReason.MAX_EPISODE_TOKENS.value
    assert all(len(prompt) < 25 for prompt, _ in engine.calls)


def test_images_without_a_processor_are_refused_by_name(processor):
    engine = SeeingEngine(processor)
    refusal = refusal_of(Screens(), engine, None)
    assert "processor=" in refusal
    assert "Screens.reset" in refusal
    assert engine.calls == []

    class Workflow:
        async def arun_episode(self, engine, data):
            await engine.generate([5], images=[picture(1)])
            return 1.0

    assert "processor=" in refusal_of(Workflow(), engine, None)


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

    for env, named in ((Videos(), "'video'"), (Broken(), "messages[0]['content'][1]")):
        refusal = refusal_of(env, engine, processor)
        assert named in refusal
        assert f"{type(env).__name__}.reset" in refusal


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


def test_sequences_of_areal_keep_the_images_of_recorded_calls(processor):
    prompt = [5, *[processor.image_token_id] * 4]

    class Workflow:
        def __init__(self, changed):
            self.changed = changed

        async def arun_episode(self, engine, data):
            first = await engine.generate(prompt, images=[picture(1)])
            longer = [*prompt, *first.token_ids, 6]
            second = await engine.generate(longer, images=[picture(1)])
            ids = torch.tensor([[*longer, *second.token_ids]])
            ids[0, -3] += self.changed
            sampled = torch.zeros_like(ids)
            sampled[0, len(prompt) : len(prompt) + 2] = sampled[0, -2:] = 1
            masks = {"attention_mask": torch.ones_like(ids), "loss_mask": sampled.float()}
            return {"input_ids": ids, **masks, "rewards": torch.ones(1)}

    (batch,) = collect(Workflow(0), SeeingEngine(processor), processor)
    assert new_images(batch) == [(StoredImage.of(picture(1)),), ()]
    refusal = refusal_of(Workflow(1), SeeingEngine(processor), processor)
    assert "'input_ids' must be those of the engine's calls" in refusal


def test_none_is_no_image_for_the_recorder(processor):
    episode = Episode(None, shows_images=True)
    recorder = Recorder(SeeingEngine(processor), episode, Limits())
    asyncio.run(recorder.generate([1, 2], images=None))
    assert episode.turns[0].images == ()


def test_a_buffer_of_collectors_with_and_without_a_processor_names_the_cause(processor):
    seeing = SeeingEngine(processor)
    with_entry, without = (collect(Text(), seeing, each)[0] for each in (processor, None))
    for first, second in ((with_entry, without), (without, with_entry)):
        buffer = buffer_of(9)
        buffer.extend(first)
        with pytest.raises(ValueError, match=r"'images', 'new'.*collectors with processor="):
            buffer.extend(second)


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


def test_a_group_of_eight_with_ten_screenshots_keeps_73(tmp_path):
    _, processor = tiny_vl_model("qwen2_5_vl", max_pixels=256)
    screens, engine = Screens(10, (128, 128)), SeeingEngine(processor)
    (batch,) = collect(screens, engine, processor, group_size=8, n=8)
    storage = EpisodeStorage(1000)
    buffer_of(storage).extend(batch)
    episodes = list(storage.episodes())
    assert len(episodes) == 8
    for source in ([batch], episodes):
        new = [images for part in source for images in new_images(part)]
        assert [len(images) for images in new] == [1] * 80
        told = [images_of(turn) for part in source for turn in part.get("text").tolist()]
        assert len({id(image) for images in (*new, *told) for image in images}) <= 73
    first = [new_images(episode)[0][0] for episode in episodes]
    assert all(image is first[0] for image in first)
    images = {image for episode in episodes for new in new_images(episode) for image in new}
    once = sum(image.nbytes for image in images)
    assert once == 73 * 128 * 128 * 3
    storage.dumps(tmp_path)
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    for saved in (on_disk, len(pickle.dumps(storage.state_dict()))):
        assert once < saved < 1.2 * once


def test_a_dump_has_each_image_once(processor, tmp_path):
    engine = SeeingEngine(processor)
    (batch,) = collect(Screens(3), engine, processor, dump_dir=tmp_path, group_size=2, n=2)
    images = {image for new in new_images(batch) for image in new}
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    assert len(images) == len(files) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"0.jsonl", "images"}
    lines = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    named = [part["image"] for line in lines for part in image_parts(line["messages"])]
    assert len(named) == 6
    assert set(named) == files
    assert {StoredImage.of(StoredImage.of(tmp_path / name).array()) for name in named} == images
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}
    collect(Screens(1), engine, processor, dump_dir=tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}


def image_parts(messages):
    return [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]


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


def test_ten_large_screenshots_take_their_own_bytes():
    """Pixels of 1024 x 768, an episode of ten turns."""
    _, processor = tiny_vl_model("qwen2_5_vl", max_pixels=1024)
    (batch,) = collect(Screens(10, (768, 1024)), SeeingEngine(processor), processor)
    storage = EpisodeStorage(100)
    storage.append(batch)
    size, episode = 10 * 1024 * 768 * 3, storage.episode(0)
    held = reachable_bytes([*new_images(episode), *episode.get("text").tolist()])
    assert size <= held <= 1.01 * size
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


def test_images_of_items_are_kept_once(processor):
    pixels = picture(7)

    class Ask(Screens):
        def reset(self, data):
            self.data, self.step_number = {"first": 0}, 0
            return data["messages"]

    pil = StoredImage.of(pixels).pil()
    messages = [user(text_part("what"), image_part(pixels))]
    item = {"messages": messages, "image": pil, "task_id": "a", "n": [1]}
    (batch,) = collect(Ask(2), SeeingEngine(processor), processor, [item], group_size=2, n=2)
    stored = batch["data"]
    assert all(each is stored[0] for each in stored)
    image = StoredImage.of(pixels)
    assert stored[0]["image"] is images_of(stored[0]["messages"])[0] is image
    assert stored[0]["n"] is item["n"]
    assert item["image"] is pil
    assert item["messages"][0]["content"][1]["image"] is pixels
    assert new_images(batch)[0] == (image,)


class Draws(ToolEnv):
    """The model calls a tool that draws."""

    def __init__(self, form):
        self.form = form
        self.judged = []
        super().__init__([self.draw], reward=self.judge)

    def draw(self):
        """Draw a picture."""
        return self.form(picture(8))

    def judge(self, messages, data):
        return float(len(images_of(messages)))


FORMS = {
    "PIL": lambda pixels: StoredImage.of(pixels).pil(),
    "stored": StoredImage.of,
    "part": image_part,
    "texts and images": lambda pixels: ["go", StoredImage.of(pixels).pil()],
    "parts": lambda pixels: [text_part("go"), image_part(pixels)],
}


@pytest.mark.parametrize("form", FORMS)
def test_tools_return_images(form):
    _, processor = tiny_vl_model("qwen3_vl", "what go draw it", extra_roles="tool")
    tokenizer = processor.tokenizer
    answers = iter(["draw<end>", "go<end>"])
    engine = SeeingEngine(processor, lambda prompt: tokenizer(next(answers))["input_ids"])
    env = Draws(FORMS[form])
    env._parser = lambda text: [{"name": "draw", "arguments": {}}] if "draw" in text else []
    env.whole_text = True
    data = {"messages": [{"role": "user", "content": "what"}]}
    (batch,) = collect(env, engine, processor, data=[data])
    assert engine.images == [(), (StoredImage.of(picture(8)),)]
    assert new_images(batch) == engine.images
    assert batch["next", "reward"].flatten().tolist() == [0.0, 1.0]
    tool = next(m for turn in batch["text"] for m in turn if m["role"] == "tool")
    assert images_of([tool]) == [StoredImage.of(picture(8))]
    assert ("go" in str(tool["content"])) == ("text" in form or form == "parts")


def test_tools_without_images_are_as_before():
    def result_of(value):
        tool = Tool(lambda: value, {"name": "get", "parameters": {"type": "object"}})
        return asyncio.run(call_tool(tool, {}))

    links = [{"type": "image", "url": "https://a.b/c.png", "image": "c"}]
    for value in (links, links[0], ["a", "b"], {"type": "text", "text": "a"}, {"type": "image"}):
        assert result_of(value) == json.dumps(value)
    uri = StoredImage.of(picture(1)).data_uri()
    (shown,) = result_of({"type": "image_url", "image_url": {"url": uri}})
    np.testing.assert_array_equal(shown["image"].array(), picture(1))
    with pytest.raises(ToolError, match=r"get returned no image: .*file that can be read"):
        result_of({"type": "image", "image": "no such file.png"})
