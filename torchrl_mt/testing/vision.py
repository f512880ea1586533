"""Tiny vision-language models and their processors; they work without torchvision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from torchrl_mt.checks import check_choice
from torchrl_mt.testing import chat

__all__ = ["Family", "tiny_vl_model"]

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"]
"""Model types of transformers."""

_WORDS = "what is in this picture ? red green blue black white up down left right go stop yes no"
_IMAGE, _VIDEO, _START, _END = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
)
_SIDE = 16
"""Height and width of every picture that the tiny LLaVA sees."""

_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}> "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %} {{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_vl_model(
    family: Family = "qwen2_5_vl",
    words: str | Iterable[str] = _WORDS,
    *,
    extra_roles: str | Iterable[str] = (),
    max_pixels: int = 4096,
    text_config: dict[str, Any] | None = None,
    vision_config: dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Build a two-layer vision-language model with random weights, and its processor.

    Qwen's models see patches of 4 x 4 pixels, of which 2 x 2 make a token: 16 x 16 pixels are 4 tokens.
    LLaVA sees 16 x 16 pixels as 16 tokens.

    Args:
        family: model type of transformers.
        words: the vocabulary; see :func:`~torchrl_mt.testing.tiny_chat_tokenizer`.
        extra_roles: roles of messages besides ``"user"`` and ``"assistant"``.
        max_pixels: larger pictures are made smaller (Qwen).
        text_config: entries of the text model's configuration to set.
        vision_config: entries of the vision tower's configuration to set; not Qwen's
            ``spatial_merge_size``, which is 2.

    Returns:
        The model, with less than 100,000 parameters, and the processor with its ``tokenizer``. Qwen's
        processor takes no videos: ``type(processor).from_pretrained`` loads what it saved, and
        ``AutoProcessor`` does not.

    Raises:
        ValueError: if the family is unknown.

    Examples:
        >>> model, processor = tiny_vl_model("qwen3_vl")
        >>> model.num_parameters() < 100_000
        True
        >>> import numpy as np
        >>> message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go ?"}]}
        >>> text = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        >>> text
        '<user> <|vision_start|><|image_pad|><|vision_end|> go ? <end><assistant>'
        >>> pixels = np.zeros((16, 16, 3), np.uint8)
        >>> inputs = processor(images=[pixels], text=[text], return_tensors="pt")
        >>> inputs["image_grid_thw"].tolist(), inputs["input_ids"].shape
        ([[1, 4, 4]], torch.Size([1, 11]))
        >>> model(**inputs).logits.shape == (1, 11, len(processor.tokenizer))
        True
    """
    check_choice("family", family, get_args(Family))
    tokenizer = chat.tiny_chat_tokenizer(words, extra_roles=extra_roles)
    tokenizer.add_special_tokens({"additional_special_tokens": [_IMAGE, _VIDEO, _START, _END]})
    image = _IMAGE if family == "llava" else f"{_START}{_IMAGE}{_END}"
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", image)
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    text = {**chat.text_config(tokenizer), **sizes, **heads, **(text_config or {})}
    vision = {**sizes, "initializer_range": 0.1, **(vision_config or {})}
    build = _llava if family == "llava" else _qwen
    model, processor = build(family, tokenizer, max_pixels, text, vision)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval(), processor


def _qwen(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    max_pixels: int,
    text: dict[str, Any],
    vision: dict[str, Any],
) -> tuple[PreTrainedModel, ProcessorMixin]:
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    # Rotary dimensions for time, height and width, half the size of a head together.
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    section = [half - 2 * (half // 4), half // 4, half // 4]
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": section}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1, **vision}
    vision["spatial_merge_size"] = 2
    if family == "qwen2_vl":
        size = vision.pop("hidden_size")
        mlp = vision.pop("intermediate_size") // size
        vision = {"embed_dim": size, "mlp_ratio": mlp, "hidden_size": text["hidden_size"], **vision}
    else:
        vision["out_hidden_size"] = text["hidden_size"]
    if family == "qwen2_5_vl":
        vision = {"window_size": 16, "fullatt_block_indexes": [1], **vision}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        vision = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], **vision}
    ids = [tokenizer.convert_tokens_to_ids(name) for name in (_IMAGE, _VIDEO, _START, _END)]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    if transformers.__version__ >= "5":
        text["rope_parameters"] = {**rope, "rope_theta": 10_000.0}
    else:
        text |= {"rope_scaling": rope, "rope_theta": 10_000.0, "tie_word_embeddings": True}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        **dict(zip(names, ids, strict=True)),
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    images = _pil("Qwen2VLImageProcessor")(
        patch_size=vision["patch_size"], temporal_patch_size=vision["temporal_patch_size"],
        merge_size=2, min_pixels=(2 * vision["patch_size"]) ** 2, max_pixels=max_pixels,
    )  # fmt: skip
    kind = getattr(transformers, f"{name}Processor")
    return model, _without_videos(kind, tokenizer, images)


def _llava(
    family: str,
    tokenizer: PreTrainedTokenizerFast,
    max_pixels: int,
    text: dict[str, Any],
    vision: dict[str, Any],
) -> tuple[PreTrainedModel, ProcessorMixin]:
    vision = {
        "model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2,
        "patch_size": 4, "image_size": _SIDE, "projection_dim": 32, **vision,
    }  # fmt: skip
    image: Any = tokenizer.convert_tokens_to_ids(_IMAGE)
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        image_token_index=image,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    side = {"height": vision["image_size"], "width": vision["image_size"]}
    images = _pil("CLIPImageProcessor")(size=side, crop_size=side)
    processor = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=vision["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=_IMAGE,
        chat_template=tokenizer.chat_template,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _pil(name: str) -> Any:
    """Return an image processor that needs Pillow alone; up to transformers 4 it is the plain one."""
    later = f"{name}Pil"
    return getattr(transformers, later if hasattr(transformers, later) else name)


def _without_videos(kind: Any, tokenizer: PreTrainedTokenizerFast, images: Any) -> Any:
    """Build a processor that takes no videos, whose processor needs torchvision."""

    def initialize(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        self.image_token, self.video_token = _IMAGE, _VIDEO
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([_IMAGE, _VIDEO])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def reduce(self: Any) -> Any:  # The class itself cannot be pickled.
        return _without_videos, (kind, self.tokenizer, self.image_processor)

    attributes = {
        "__init__": initialize,
        "__module__": kind.__module__,
        "__reduce__": reduce,
        # What transformers 4 reads.
        "attributes": ["image_processor", "tokenizer"],
        "tokenizer_class": "AutoTokenizer",
    }
    made: Any = type(kind.__name__, (kind,), attributes)
    return made(images, tokenizer, chat_template=tokenizer.chat_template)
