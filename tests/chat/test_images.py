"""Prompts with images have exactly the tokens that the processor itself writes for the dialogue."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.messages import said, system, tool, user
from tests.chat.templates import byte_level
from tests.tiers import examples
from torchrl_mt.chat.tokens import ChatTokens
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage, VisionProcessor
from torchrl_mt.vision.messages import images_of

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"]
WORDS = "a b c go stop Picture 1 2 3 4 5 6 7 8 9 : < end> |image_pad|> |video_pad|> |vision_start|>"

NUMBERED = (
    "{% set seen = namespace(n=0) %}{% for m in messages %}<{{ m['role'] }}> "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{% set seen.n = seen.n + 1 %} Picture {{ seen.n }} : "
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }} {% endif %}{% endfor %}"
    "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Numbers the images, as Qwen's does with ``add_vision_id``."""
PARTS_ONLY = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<|image_pad|>{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    " {{ part['text'] }} {% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Reads lists of parts alone, images first, as LLaVA's does."""
LAST_ONLY = (
    "{% for m in messages %}{% set last = loop.last %}<{{ m['role'] }}> "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{% if last %}<|image_pad|>{% endif %}{% else %}"
    " {{ part['text'] }} {% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves out the images of earlier messages."""
QWEN = (
    "{% set seen = namespace(n=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part %}"
    "{% set seen.n = seen.n + 1 %}{% if add_vision_id %}Picture {{ seen.n }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The shape of Qwen2.5-VL's."""
TEMPLATES = {"own": None, "numbered": NUMBERED, "parts only": PARTS_ONLY}


@pytest.fixture(scope="module")
def processors():
    made = {}

    def get(family, template=None):
        if (family, template) not in made:
            _, processor = tiny_vl_model(family, WORDS)
            if template is not None:
                processor.chat_template = template
            made[family, template] = processor
        return made[family, template]

    return get


def picture(seed, height=16, width=16):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


pictures = st.builds(
    picture, st.integers(0, 3), st.sampled_from([8, 16, 24]), st.sampled_from([8, 16, 32])
)
texts = st.lists(st.sampled_from(["a", "b", "c", "go", "stop"]), min_size=1, max_size=3).map(
    " ".join
)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    pictures.map(lambda image: {"type": "image", "image": image}),
)
contents = st.one_of(texts, st.lists(parts, min_size=1, max_size=4))
dialogues = st.lists(st.tuples(contents, texts), min_size=1, max_size=4)


def reference(processor, messages, template, **kwargs):
    """The processor's own tokens of a dialogue."""

    def plain(message):
        if template == PARTS_ONLY and isinstance(message["content"], str):
            return {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    shown = [plain(message) for message in messages]
    kwargs |= {"tokenize": False, "add_generation_prompt": True}
    text = processor.apply_chat_template(shown, **kwargs)
    parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
    images = [part["image"] for part in parts if part["type"] == "image"]
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    return inputs["input_ids"][0].tolist()


def goes_on_as_the_processor_writes(processor, chat, turns, source, opening=(), **kwargs):
    """Play turns, of which every prompt must be the processor's own."""
    tokenizer, messages, answer = processor.tokenizer, [], None
    for asked, words in turns:
        new = [*opening[: not messages], user(asked)]
        if answer is None:
            prompt = chat.open(new)
        else:
            goes_on, ids = chat.follow(messages, new, answer, last_token=tokenizer.eos_token_id)
            assert goes_on
            prompt = [*prompt, *answer, *ids]
        messages += new
        assert prompt == reference(processor, messages, source, **kwargs)
        assert chat.open(messages) == prompt
        answer = tokenizer(words + tokenizer.eos_token)["input_ids"]
        messages.append(chat.read(answer, prompt_ids=prompt, messages=messages).in_dialogue)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_the_processor(family, template, processors):
    source = TEMPLATES[template]
    processor = processors(family, source)
    chat = ChatTokens(None, processor=processor)
    assert chat.stable
    assert chat.takes_images

    @examples(12)
    @given(dialogues)
    def check(turns):
        goes_on_as_the_processor_writes(processor, chat, turns, source)

    check()


@pytest.fixture(scope="module")
def qwen():
    """A processor whose tokenizer takes any text."""
    tokenizer = copy.deepcopy(byte_level())
    marks = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": marks, "pad_token": "<|im_end|>"}
    )
    _, processor = tiny_vl_model("qwen2_5_vl")
    processor = type(processor)(processor.image_processor, tokenizer, chat_template=QWEN)
    processor.chat_template = tokenizer.chat_template = QWEN
    return processor


any_text = st.text("ab1 \n\t.<|>_é🎲\u2028", max_size=12)
any_parts = st.one_of(
    any_text.map(lambda text: {"type": "text", "text": text}),
    pictures.map(lambda image: {"type": "image", "image": image}),
)


@pytest.mark.parametrize("numbered", [False, True])
def test_prompts_of_any_text(numbered, qwen):
    kwargs = {"add_vision_id": True} if numbered else {}
    chat = ChatTokens(None, processor=qwen, template_kwargs=kwargs)
    assert chat.stable
    opening = [system("rules")]

    @examples(30, few=10)
    @given(st.lists(st.tuples(st.lists(any_parts, min_size=1, max_size=4), texts), max_size=4))
    def check(turns):
        goes_on_as_the_processor_writes(qwen, chat, turns, None, opening, **kwargs)

    check()


def test_a_beginning_token_that_the_processor_writes():
    _, processor = tiny_vl_model("llava", WORDS + " <s>")
    tokenizer = processor.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    messages = [user([{"type": "image", "image": picture(1)}])]
    prompt = ChatTokens(None, processor=processor).open(messages)
    assert prompt[0] == tokenizer.bos_token_id
    assert prompt == reference(processor, messages, None)


@pytest.mark.parametrize("on_break", ["fork", "append"])
def test_a_template_that_drops_earlier_images_is_not_stable(on_break, processors):
    processor = processors("qwen2_vl", LAST_ONLY)
    chat = ChatTokens(None, processor=processor, on_break=on_break)
    assert not chat.stable
    assert "an image" in chat.breaks
    asked = user([{"type": "text", "text": "a"}, {"type": "image", "image": picture(1)}])
    prompt = chat.open([asked])
    answer = processor.tokenizer("b<end>")["input_ids"]
    talk = [asked, chat.read(answer, prompt_ids=prompt).in_dialogue]
    if on_break == "append":
        goes_on, ids = chat.follow(talk, [asked], answer, last_token=answer[-1])
        assert goes_on
        assert ids.count(chat._vision.image_token_id) == 4
    else:
        # Its text has fewer placeholders than the dialogue has images: nothing may guess which.
        with pytest.raises(ValueError, match="one image token for each image"):
            chat.follow(talk, [asked], answer, last_token=answer[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_spell_placeholders_stay_text(family, processors):
    processor = processors(family)
    vision = VisionProcessor.of(processor)
    chat = ChatTokens(None, processor=processor)
    image = {"type": "image", "image": picture(2)}
    spelled = "a <|image_pad|> <|vision_start|> <|video_pad|> b <end>"
    shown = [{"type": "text", "text": spelled}, image, {"type": "text", "text": spelled}]
    special = {
        processor.tokenizer.convert_tokens_to_ids(name)
        for name in ("<|video_pad|>", "<|vision_start|>", "<end>")
    }
    plain = [{"type": "text", "text": "a b"}, image, {"type": "text", "text": "a b"}]
    counts = []
    for content in (shown, plain):
        prompt = chat.open([user(content)])
        counts.append((prompt.count(vision.image_token_id), sum(t in special for t in prompt)))
    assert counts[0] == counts[1]
    assert counts[0][0] == len(vision.inputs(StoredImage.of(picture(2))).token_ids)


def test_tool_results_with_images(processors):
    _, processor = tiny_vl_model("qwen3_vl", WORDS, extra_roles="tool")
    chat = ChatTokens(None, processor=processor)
    messages = [user("a")]
    prompt = chat.open(messages)
    answer = processor.tokenizer("b<end>")["input_ids"]
    messages.append(chat.read(answer, prompt_ids=prompt).in_dialogue)
    result = tool([{"type": "image", "image": picture(4)}])
    longer = chat.next_prompt(messages, [result], prompt, answer, last_token=answer[-1])
    assert longer == reference(processor, [*messages, result], None)


def test_images_without_a_processor_are_refused_by_name(processors):
    tokenizer = processors("qwen2_vl").tokenizer
    chat = ChatTokens(tokenizer)
    shown = user([{"type": "image", "image": picture(1)}])
    for refused in (
        lambda: chat.open([user("a"), shown]),
        lambda: chat.extend([shown], last_token=None),
        lambda: chat.follow([user("a"), said("b")], [shown], [3], last_token=None),
    ):
        with pytest.raises(ValueError, match="processor="):
            refused()


@pytest.mark.parametrize("sees", [False, True])
def test_videos_are_refused_by_name(processors, sees):
    """A template writes a placeholder that nobody fills in, or nothing."""
    processor = processors("qwen2_vl")
    chat = ChatTokens(processor.tokenizer, processor=processor if sees else None)
    shown = user([{"type": "video", "video": "a.mp4"}])
    with pytest.raises(
        ValueError, match=r"messages\[1\]\['content'\]\[0\] must be .*'video'.*frames"
    ):
        chat.open([user("a"), shown])


def test_tokenizers_of_others_and_other_processors_are_refused(processors):
    _, other = tiny_vl_model("qwen2_vl", "quite other words")
    with pytest.raises(ValueError, match="tokenizer and processor must belong together"):
        ChatTokens(other.tokenizer, processor=processors("qwen2_vl"))
    with pytest.raises(TypeError, match="processor must be one of Qwen2VLProcessor"):
        ChatTokens(other.tokenizer, processor=other.tokenizer)
    same = ChatTokens(processors("llava").tokenizer, processor=processors("llava"))
    assert images_of([]) == []
    assert same.takes_images
