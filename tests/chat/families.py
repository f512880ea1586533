"""Chat templates of the most used families, shortened after their published forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .sayings import (
    cohere,
    deepseek_fenced,
    deepseek_plain,
    dsml,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    marked_list,
    minimax,
    mistral_args,
    mistral_list,
    opened,
    python,
    thoughts,
    xml,
)
from .templates import Shape, template_of


@dataclass(frozen=True)
class Family(Shape):
    """A chat template, and how the model that it belongs to writes its answers."""

    say: Callable[[dict], str] = lambda message: message["content"]
    """Text of a message as it is sampled, without the stop token."""
    calls: bool = True
    """Whether it has a notation for tool calls that its template writes, too."""
    several: bool = True
    """Whether it calls several tools at once."""
    says_and_calls: bool = True
    """Whether it keeps what is said beside a call."""
    call_stop: str | None = None
    """The token that ends an answer that calls, if it is another."""


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def im(name, template, **fields):
    """A family whose turns stand between ``<|im_start|>`` and ``<|im_end|>``."""
    return Family(name, template, stop=_IM[1], eos=_IM[1], special=_IM, **fields)


QWEN25 = im(
    "Qwen2.5",
    template_of("qwen25"),
    say=hermes,
)


QWEN3 = im(
    "Qwen3",
    template_of("qwen3"),
    say=hermes,
    stable=False,
    thinks=True,
)

QWEN3_THINKING = im(
    "Qwen3 Thinking 2507",
    template_of("qwen3_thinking"),
    say=lambda message: hermes(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)


QWEN3_CODER = im(
    "Qwen3-Coder",
    template_of("qwen3_coder"),
    say=xml,
)

QWEN35 = im(
    "Qwen3.5",
    template_of("qwen35"),
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)
QWEN36 = im(
    "Qwen3.6",
    template_of("qwen36"),
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)

NEMOTRON3 = im(
    "Nemotron 3 Nano",
    template_of("nemotron3"),
    say=lambda message: xml(message, opened),
    stable=False,
    thinks=True,
    opens=True,
)

_GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM45 = Family(
    "GLM-4.5",
    template_of("glm45"),
    stop="<|user|>",
    eos="<|endoftext|>",
    special=_GLM_SPECIAL,
    say=glm,
    call_stop="<|observation|>",
    stable=False,
    thinks=True,
)
GLM47 = Family(
    "GLM-4.7",
    template_of("glm47"),
    stop="<|user|>",
    eos="<|endoftext|>",
    special=_GLM_SPECIAL,
    say=glm,
    call_stop="<|observation|>",
    stable=False,
    thinks=True,
)

GPT_OSS = Family(
    "gpt-oss",
    template_of("gpt_oss"),
    stop="<|return|>",
    eos="<|return|>",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    say=harmony,
    several=False,
    says_and_calls=False,
    call_stop="<|call|>",
    stable=False,
    thinks=True,
)

_DEEPSEEK_SPECIAL = (
    *(
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
)
_DEEPSEEK = {
    "stop": "<｜end▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
    "special": _DEEPSEEK_SPECIAL,
}
DEEPSEEK_R1 = Family(
    "DeepSeek-R1",
    template_of("deepseek_r1"),
    say=deepseek_fenced,
    stable=False,
    thinks=True,
    opens=True,
    **_DEEPSEEK,
)
DEEPSEEK_V3 = Family(
    "DeepSeek-V3",
    template_of("deepseek_v3"),
    say=deepseek_fenced,
    stable=False,
    **_DEEPSEEK,
)
DEEPSEEK_V31 = Family(
    "DeepSeek-V3.1",
    template_of("deepseek_v31"),
    say=deepseek_plain,
    **_DEEPSEEK,
)
DEEPSEEK_V32 = Family(
    "DeepSeek-V3.2",
    template_of("deepseek_v32"),
    say=dsml,
    stable=False,
    thinks=True,
    opens=True,
    **_DEEPSEEK,
)

_KIMI_SPECIAL = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    "<|tool_call_argument_begin|>",
)
KIMI_K2 = Family(
    "Kimi K2",
    template_of("kimi_k2"),
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=_KIMI_SPECIAL,
    say=kimi,
)
KIMI_K2_THINKING = Family(
    "Kimi K2 Thinking",
    template_of("kimi_k2_thinking"),
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=_KIMI_SPECIAL,
    say=kimi,
    stable=False,
    thinks=True,
)

MINIMAX_M2 = Family(
    "MiniMax-M2",
    template_of("minimax_m2"),
    stop="[e~[",
    eos="[e~[",
    special=("]~!b[", "]~b]"),
    say=minimax,
    stable=False,
    thinks=True,
    opens=True,
)

_MISTRAL_SPECIAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)
MISTRAL = Family(
    "Mistral Small 3.1",
    template_of("mistral"),
    stop="</s>",
    eos="</s>",
    bos="<s>",
    special=_MISTRAL_SPECIAL[:7],
    say=mistral_list,
    says_and_calls=False,
)
MAGISTRAL = Family(
    "Magistral 1.2",
    template_of("magistral"),
    stop="</s>",
    eos="</s>",
    bos="<s>",
    special=_MISTRAL_SPECIAL,
    say=mistral_args,
    thinks=True,
)

COHERE = Family(
    "Command R7B",
    template_of("cohere"),
    stop="<|END_OF_TURN_TOKEN|>",
    eos="<|END_OF_TURN_TOKEN|>",
    bos="<BOS_TOKEN>",
    special=(
        *("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    ),
    say=cohere,
    says_and_calls=False,
    thinks=True,
)

GEMMA3 = Family(
    "Gemma 3",
    template_of("gemma3"),
    stop="<end_of_turn>",
    eos="<eos>",
    bos="<bos>",
    special=("<start_of_turn>", "<end_of_turn>"),
    calls=False,
)

GEMMA4 = Family(
    "Gemma 4",
    template_of("gemma4"),
    stop="<turn|>",
    eos="<eos>",
    bos="<bos>",
    special=(
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"),
    ),
    say=gemma,
    call_stop="<|tool_response>",
    stable=False,
    thinks=True,
)

GEMMA4_PLAIN = Family(
    "Gemma 4, results before contents",
    template_of("gemma4_plain"),
    stop="<turn|>",
    eos="<eos>",
    bos="<bos>",
    special=GEMMA4.special,
    say=gemma,
    call_stop="<|tool_response>",
    stable=False,
)
"""It writes what is said beside a call after the call's result."""

_LLAMA = {
    "stop": "<|eot_id|>",
    "eos": "<|eot_id|>",
    "bos": "<|begin_of_text|>",
    "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
}
LLAMA31 = Family(
    "Llama 3.1",
    template_of("llama31"),
    say=llama_json,
    several=False,
    says_and_calls=False,
    **_LLAMA,
)
LLAMA4 = Family(
    "Llama 4",
    template_of("llama4"),
    stop="<|eot|>",
    eos="<|eot|>",
    bos="<|begin_of_text|>",
    special=("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
    say=python,
    says_and_calls=False,
)

PHI4_MINI = Family(
    "Phi-4-mini",
    template_of("phi4_mini"),
    stop="<|end|>",
    eos="<|endoftext|>",
    special=(
        "<|end|>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|tool_call|>",
        "<|/tool_call|>",
    ),
    say=marked_list("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE = Family(
    "Granite 3.3",
    template_of("granite"),
    stop="<|end_of_text|>",
    eos="<|end_of_text|>",
    special=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    say=marked_list("<|tool_call|>"),
)
NEMOTRON2 = im(
    "Nemotron Nano 2",
    template_of("nemotron2"),
    say=lambda message: (
        marked_list("<TOOLCALL>", "</TOOLCALL>")({**message, "reasoning_content": None})
        if message.get("reasoning_content") is None
        else opened(message)
        + marked_list("<TOOLCALL>", "</TOOLCALL>")({**message, "reasoning_content": None})
    ),
    stable=False,
    thinks=True,
    opens=True,
)
LFM2 = im(
    "LFM2.5",
    template_of("lfm2"),
    say=lambda message: python(message, "<|tool_call_start|>", "<|tool_call_end|>"),
    thinks=True,
)
SEED = Family(
    "Seed-OSS",
    template_of("seed"),
    stop="<seed:eos>",
    eos="<seed:eos>",
    special=("<seed:bos>",),
    say=lambda message: xml(
        message, lambda m: thoughts(m, "<seed:think>", "</seed:think>"), "seed:tool_call"
    ),
    thinks=True,
)

FAMILIES = [
    *(QWEN25, QWEN3, QWEN3_THINKING, QWEN3_CODER, QWEN35, QWEN36, GLM45, GLM47, GPT_OSS),
    *(DEEPSEEK_V3, DEEPSEEK_R1, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, KIMI_K2_THINKING, MINIMAX_M2),
    *(MISTRAL, MAGISTRAL, COHERE, GEMMA3, GEMMA4, LLAMA31, LLAMA4, NEMOTRON2, NEMOTRON3),
    *(PHI4_MINI, GRANITE, LFM2, SEED),
]
