"""Chat templates of the most used families, shortened after their published forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import sayings as say
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


THINKS = {"stable": False, "thinks": True}
OPENS = {**THINKS, "opens": True}


def family(name, file, stop, special, say=None, eos=None, **fields):
    """A family whose template is in a file; an answer's end is the end of sequence by default."""
    said = {} if say is None else {"say": say}
    return Family(name, template_of(file), stop, eos or stop, special=special, **said, **fields)


def im(name, file, say, **fields):
    """A family whose turns stand between ``<|im_start|>`` and ``<|im_end|>``."""
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    return family(name, file, "<|im_end|>", special, say, **fields)


def opened_hermes(message):
    return say.hermes(message, say.opened)


def opened_xml(message):
    return say.xml(message, say.opened)


def marked_python(message):
    return say.python(message, "<|tool_call_start|>", "<|tool_call_end|>")


def seed_xml(message):
    def think(message):
        return say.thoughts(message, "<seed:think>", "</seed:think>")

    return say.xml(message, think, "seed:tool_call")


def opened_list(message):
    listed = say.marked_list("<TOOLCALL>", "</TOOLCALL>")
    return say.opened(message) + listed({**message, "reasoning_content": None})


QWEN25 = im("Qwen2.5", "qwen25", say.hermes)
QWEN3 = im("Qwen3", "qwen3", say.hermes, **THINKS)
QWEN3_THINKING = im("Qwen3 Thinking 2507", "qwen3_thinking", opened_hermes, **OPENS)
QWEN3_CODER = im("Qwen3-Coder", "qwen3_coder", say.xml)
QWEN35 = im("Qwen3.5", "qwen35", opened_xml, **OPENS)
QWEN36 = im("Qwen3.6", "qwen36", opened_xml, **OPENS)
NEMOTRON3 = im("Nemotron 3 Nano", "nemotron3", opened_xml, **OPENS)
NEMOTRON2 = im("Nemotron Nano 2", "nemotron2", opened_list, **OPENS)
LFM2 = im("LFM2.5", "lfm2", marked_python, thinks=True)

_GLM = {
    "stop": "<|user|>",
    "eos": "<|endoftext|>",
    "special": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "call_stop": "<|observation|>",
}
GLM45 = family("GLM-4.5", "glm45", say=say.glm, **_GLM, **THINKS)
GLM47 = family("GLM-4.7", "glm47", say=say.glm, **_GLM, **THINKS)

GPT_OSS = family(
    *("gpt-oss", "gpt_oss", "<|return|>"),
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    say.harmony,
    **THINKS,
    several=False,
    says_and_calls=False,
    call_stop="<|call|>",
)

_DEEPSEEK = {
    "stop": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
    "special": (
        *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    ),
}
DEEPSEEK_R1 = family("DeepSeek-R1", "deepseek_r1", say=say.deepseek_fenced, **_DEEPSEEK, **OPENS)
DEEPSEEK_V3 = family(
    "DeepSeek-V3", "deepseek_v3", say=say.deepseek_fenced, **_DEEPSEEK, stable=False
)
DEEPSEEK_V31 = family("DeepSeek-V3.1", "deepseek_v31", say=say.deepseek_plain, **_DEEPSEEK)
DEEPSEEK_V32 = family("DeepSeek-V3.2", "deepseek_v32", say=say.dsml, **_DEEPSEEK, **OPENS)

_KIMI = {
    "stop": "<|im_end|>",
    "special": (
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
}
KIMI_K2 = family("Kimi K2", "kimi_k2", say=say.kimi, **_KIMI)
KIMI_K2_THINKING = family("Kimi K2 Thinking", "kimi_k2_thinking", say=say.kimi, **_KIMI, **THINKS)

MINIMAX_M2 = family("MiniMax-M2", "minimax_m2", "[e~[", ("]~!b[", "]~b]"), say.minimax, **OPENS)

_MISTRAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)
MISTRAL = family(
    *("Mistral Small 3.1", "mistral", "</s>", _MISTRAL[:7], say.mistral_list),
    bos="<s>",
    says_and_calls=False,
)
MAGISTRAL = family(
    "Magistral 1.2", "magistral", "</s>", _MISTRAL, say.mistral_args, bos="<s>", thinks=True
)

COHERE = family(
    *("Command R7B", "cohere", "<|END_OF_TURN_TOKEN|>"),
    (
        *("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    ),
    say.cohere,
    bos="<BOS_TOKEN>",
    says_and_calls=False,
    thinks=True,
)

_GEMMA = {"eos": "<eos>", "bos": "<bos>"}
GEMMA3 = family(
    *("Gemma 3", "gemma3", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    **_GEMMA,
    calls=False,
)
_GEMMA4 = {
    "stop": "<turn|>",
    "special": (
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"),
    ),
    "call_stop": "<|tool_response>",
}
GEMMA4 = family("Gemma 4", "gemma4", say=say.gemma, **_GEMMA, **_GEMMA4, **THINKS)
GEMMA4_PLAIN = family(
    *("Gemma 4, results before contents", "gemma4_plain"),
    say=say.gemma,
    **_GEMMA,
    **_GEMMA4,
    stable=False,
)
"""It writes what is said beside a call after the call's result."""

LLAMA31 = family(
    *("Llama 3.1", "llama31", "<|eot_id|>"),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    say.llama_json,
    bos="<|begin_of_text|>",
    several=False,
    says_and_calls=False,
)
LLAMA4 = family(
    *("Llama 4", "llama4", "<|eot|>"),
    ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
    say.python,
    bos="<|begin_of_text|>",
    says_and_calls=False,
)

PHI4_MINI = family(
    *("Phi-4-mini", "phi4_mini", "<|end|>"),
    ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool_call|>", "<|/tool_call|>"),
    say.marked_list("<|tool_call|>", "<|/tool_call|>"),
    eos="<|endoftext|>",
)
GRANITE = family(
    *("Granite 3.3", "granite", "<|end_of_text|>"),
    ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    say.marked_list("<|tool_call|>"),
)
SEED = family("Seed-OSS", "seed", "<seed:eos>", ("<seed:bos>",), seed_xml, thinks=True)

FAMILIES = [
    *(QWEN25, QWEN3, QWEN3_THINKING, QWEN3_CODER, QWEN35, QWEN36, GLM45, GLM47, GPT_OSS),
    *(DEEPSEEK_V3, DEEPSEEK_R1, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, KIMI_K2_THINKING, MINIMAX_M2),
    *(MISTRAL, MAGISTRAL, COHERE, GEMMA3, GEMMA4, LLAMA31, LLAMA4, NEMOTRON2, NEMOTRON3),
    *(PHI4_MINI, GRANITE, LFM2, SEED),
]
