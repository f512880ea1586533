"""Images in requests of agents: exactly those of each prompt are in the ledger."""

from __future__ import annotations

import base64
import random
from contextlib import closing

import pytest

openai = pytest.importorskip("openai", reason="agents need the extra [agents]")
pytest.importorskip("uvicorn", reason="agents need the extra [agents]")

from tests.collectors.pictures import SeeingEngine  # noqa: E402
from tests.collectors.runs import run_of  # noqa: E402
from tests.tiers import first_fast  # noqa: E402
from tests.vision.episodes import QWEN, family, random_image  # noqa: E402
from torchrl_mt.agents import AgentServer, export_interactions, openai_client  # noqa: E402
from torchrl_mt.engines import TransformersEngine  # noqa: E402
from torchrl_mt.testing import tiny_vl_model  # noqa: E402
from torchrl_mt.transforms import MergeTurns, VisionInputs  # noqa: E402
from torchrl_mt.vision import RowImages, StoredImage  # noqa: E402
from torchrl_mt.vision.messages import with_stored_images  # noqa: E402
from torchrl_mt.vision.rows import NEW, RAW  # noqa: E402

from .helpers import ask, client_of, post, session_of, user  # noqa: E402

NAME = "qwen2_5_vl"


def engine_of(name=NAME):
    return SeeingEngine(family(name)[1])


def picture(seed):
    """A PNG file, as the server will see it."""
    return StoredImage.of(random_image(random.Random(seed)).data_uri())


def part(image):
    return {"type": "image_url", "image_url": {"url": image.data_uri(), "detail": "high"}}


def shows(*content, role="user"):
    parts = [
        part(c) if isinstance(c, StoredImage) else {"type": "text", "text": c} for c in content
    ]
    return {"role": role, "content": parts}


def rendered(processor, messages):
    """The tokens that the processor itself makes of a dialogue."""
    stored = with_stored_images(messages)
    plain, images = [], []
    for message in stored:
        content = message["content"]
        if not isinstance(content, str):
            images += [p["image"].pil() for p in content if p["type"] == "image"]
            content = [{"type": "image"} if p["type"] == "image" else p for p in content]
        plain.append({**message, "content": content})
    text = processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    return processor(text=[text], images=images or None)["input_ids"][0]


@pytest.mark.parametrize("name", first_fast(["llava", *QWEN]))
async def test_images_of_requests_reach_the_ledger(name):
    one, two = picture(1), picture(2)
    engine, processor = engine_of(name), family(name)[1]

    async with session_of(engine, processor=processor) as session:
        client = client_of(session)
        messages = [shows("what is", one, "?")]
        reply = await ask(client, messages)
        said = reply.choices[0].message
        messages += [said.model_dump(exclude_none=True), shows(two, "left", one)]
        await ask(client, messages)
        await ask(client, [user("stop")])
        turns = session.turns()
    assert [turn.images for turn in turns] == [(one,), (one, two, one), ()]
    assert engine.images == [(one,), (one, two, one), ()]
    assert [list(turn.prompt_ids) for turn in turns] == [prompt for prompt, _ in engine.calls]
    assert list(turns[0].prompt_ids) == list(rendered(processor, messages[:1]))
    assert list(turns[1].prompt_ids) == list(rendered(processor, messages))
    assert [turn.parent for turn in turns] == [-1, 0, -1]
    assert reply.usage.prompt_tokens == len(turns[0].prompt_ids)


async def test_a_dialogue_with_another_image_is_another_dialogue():
    one, two = picture(1), picture(2)
    same = StoredImage.of(two.pil())  # The same pixels in other bytes.
    engine = engine_of()

    async with session_of(engine, processor=family(NAME)[1]) as session:
        said = (await post(session, [shows("what", one)]))["choices"][0]["message"]
        for image in (one, two, same):
            await post(session, [shows("what", image), said, user("go")])
        turns = session.turns()
    assert [turn.parent for turn in turns] == [-1, 0, -1, -1]
    assert [len(turn.images) for turn in turns] == [1, 1, 1, 1]
    assert turns[1].images[0] is one
    assert turns[2].images[0] is two


async def test_streams_tools_and_several_texts():
    one = picture(1)
    engine = engine_of()
    spread = {"role": "user", "content": [{"type": "text", "text": "what "}, part(one)]}
    spread["content"] += [{"type": "text", "text": "is "}, {"type": "text", "text": "this"}]
    joined = shows("what ", one, "is this")

    async with session_of(engine, processor=family(NAME)[1]) as session:
        stream = await ask(client_of(session), [spread], stream=True)
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
        said = {"role": "assistant", "content": text}
        await post(session, [joined, said, shows("go", one)])
        turns = session.turns()
    assert [turn.parent for turn in turns] == [-1, 0]
    assert turns[1].images == (one, one)


async def test_interactions_have_their_images():
    one, two = picture(1), picture(2)

    async with session_of(engine_of(), processor=family(NAME)[1]) as session:
        messages = [shows("what", one)]
        reply = await post(session, messages)
        messages += [reply["choices"][0]["message"], shows("go", two)]
        await post(session, messages)
        transcript, calls = session.transcript, export_interactions(session)
    assert transcript[1]["request"]["messages"] == messages
    # Requests share the messages that they repeat.
    before, after = (entry["request"]["messages"][0] for entry in transcript)
    assert before is after
    assert [call.images for call in calls.values()] == [(one,), (one, two)]
    assert [list(call.messages) for call in calls.values()] == [messages[:1], messages]


# Refusals


def at(url):
    return {"type": "image_url", "image_url": url}


PLACE = "messages[0].content[0]"
REFUSED = {
    f"{PLACE}: image_url must be a base64 data: URI": [at({"url": "https://a.b/c"})],
    "got '/etc/hostname': nothing is downloaded and no file is opened": [at("/etc/hostname")],
    f"{PLACE}: image must be a base64 data: URI": [
        {"type": "image", "path": "/etc/hostname"},
        {"type": "image", "image": [[0]]},
    ],
    "must have its image under one of": [{"type": "image_url"}],
    "messages[0]['content'][0]: image must be a base64 data: URI": [at("data:image/png,xx")],
    "a file that Pillow can read, got 3 bytes": [at("data:image/png;base64,AAAA")],
    "content must be text and images": [{"type": "input_audio"}],
    "messages[0].content must be text": [part(picture(1))],
}


@pytest.mark.parametrize(
    ("error", "content"), [(error, each) for error, parts in REFUSED.items() for each in parts]
)
async def test_other_images_are_refused(error, content):
    engine, role = engine_of(), "assistant" if error.endswith("must be text") else "user"
    messages = [{"role": role, "content": [content]}, user("go")]
    async with session_of(engine, processor=family(NAME)[1]) as session:
        reply = await session.http_client.post("/chat/completions", json={"messages": messages})
        assert (session.turns(), engine.calls) == ([], [])
    said = reply.json()["error"]
    assert reply.status_code == 400
    assert error in said["message"]
    assert said["param"] == "messages"


async def test_huge_images_are_refused_before_they_are_decoded(monkeypatch):
    engine, shown = engine_of(), shows("what", picture(11))
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", None)
    # Images in memory are known.
    monkeypatch.setattr(StoredImage, "_known", {})

    async with session_of(engine, processor=family(NAME)[1]) as session:
        reply = await session.http_client.post("/chat/completions", json={"messages": [shown]})
    assert reply.status_code == 400
    said = reply.json()["error"]
    assert said["message"].startswith("messages[0]['content'][1]: image must have fewer pixels")
    assert (said["param"], engine.calls) == ("messages", [])


async def test_models_of_text_refuse_images():
    engine = engine_of()
    asked = {"messages": [shows("what", picture(1))]}
    seeing = {"processor": family(NAME)[1], "models": {"judge": engine_of()}}
    for options, body in (({}, asked), (seeing, {**asked, "model": "judge"})):
        async with session_of(engine, **options) as session:
            reply = await session.http_client.post("/chat/completions", json=body)
        assert reply.status_code == 400
        assert "processor=" in reply.json()["error"]["message"]
    assert not engine.calls


async def test_a_processor_may_take_the_tokenizers_place():
    _, processor = family(NAME)

    async with AgentServer(engine_of(), processor) as server:
        session = server.open()
        await post(session, [shows(picture(1))])
        (turn,) = session.turns()
        await session.close()
    assert turn.images == (picture(1),)
    other = tiny_vl_model(NAME, "other words")[1]
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        AgentServer(engine_of(), processor=other)
    with pytest.raises(TypeError, match="processor must be one of"):
        AgentServer(engine_of(), processor=processor.tokenizer)


# Collectors


class Looks:
    """Shows two images, one after the other."""

    async def run(self, data, *, base_url, api_key, http_client):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        return await self.look(client, data)

    async def look(self, client, data):
        messages = []
        for image in data["images"]:
            messages.append(shows("what", StoredImage.of(image)))
            messages.append((await ask(client, messages)).choices[0].message)
        return 1.0


class LooksByClient:
    """The same as a workflow."""

    async def arun_episode(self, engine, data):
        return await Looks().look(openai_client(engine, processor=family(NAME)[1]), data)


@pytest.mark.parametrize("program", [Looks, LooksByClient])
def test_episodes_of_agents_become_rows_with_images(program):
    model, processor = family(NAME)
    one, two = picture(1), picture(2)
    data = [{"images": [base64.b64decode(i.data_uri().partition(",")[2]) for i in (one, two)]}]
    options = {"processor": processor, "n": 2, "group_size": 2, "total_episodes": 2}
    with closing(TransformersEngine(model, processor, max_new_tokens=3)) as engine:
        ((batch,), _) = run_of(program(), engine, data, **options)
    assert batch.get(NEW).tolist() == [(one,), (two,)] * 2
    rows = VisionInputs(processor)(MergeTurns()(batch))
    assert rows.get(RAW).tolist() == [(one, two)] * 2
    assert RowImages.of(rows).count.tolist() == [2, 2]
    if program is Looks:
        first = export_interactions(batch[:2])
        assert [call.images for call in first.values()] == [(one,), (one, two)]
