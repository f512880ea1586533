"""Chat templates of well-known shapes, and tokenizers built on the spot that they run on."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the user asks a question and the assistant thinks about the answer",
    "guess a number from one to sixteen, higher or lower, system rules",
    "tool result: correct, invalid, next round",
]
THINK, UNTHINK = "<think>", "</think>"


@dataclass(frozen=True)
class Shape:
    """A chat template and the tokens it is written with."""

    name: str
    template: str
    stop: str
    """The token that ends an answer."""
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    """Further special tokens."""
    stable: bool = True
    system: bool = True
    """Whether it takes a system message."""
    thinks: bool = False
    opens: bool = False
    """Whether the generation prompt opens the thinking."""

    def on(self, base: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        """A tokenizer with this template."""
        tokenizer = copy.deepcopy(base)
        named = {"eos_token": self.eos} | ({"bos_token": self.bos} if self.bos else {})
        tokenizer.add_special_tokens({**named, "additional_special_tokens": [*self.special]})
        tokenizer.add_tokens([AddedToken(word, special=False) for word in (THINK, UNTHINK)])
        tokenizer.chat_template = self.template
        return tokenizer


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: every text is encoded and comes back as it was."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@cache
def sentence_piece(prepend_scheme: str = "first") -> PreTrainedTokenizerFast:
    """Llama 2's kind: spaces belong to words, and a text's beginning gets one."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=80, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            {word: k for k, word in enumerate(words)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


CHATML = Shape(
    name="chatml",
    template="""
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\nbe helpful<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n[result]\n' + message.content + '\n[/result]<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}""",
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=("<|im_start|>", "<|endoftext|>"),
)

LLAMA3 = Shape(
    name="llama3",
    template="""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    stop="<|eot_id|>",
    eos="<|end_of_text|>",
    bos="<|begin_of_text|>",
    special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

MISTRAL = Shape(
    name="mistral",
    template="""
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}""",
    stop="</s>",
    eos="</s>",
    bos="<s>",
    system=False,
)

MISTRAL_SYSTEM_LAST = Shape(
    name="mistral with the system's message before the last user's",
    template="""
{{- bos_token }}
{%- set rules = namespace(text='') %}
{%- if messages[0].role == 'system' %}
    {%- set rules.text = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (rules.text if loop.last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}""",
    stop="</s>",
    eos="</s>",
    bos="<s>",
    special=("[INST]", "[/INST]"),
    stable=False,
)

GEMMA = Shape(
    name="gemma",
    template="""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- raise_exception('system role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}""",
    stop="<end_of_turn>",
    eos="<eos>",
    bos="<bos>",
    special=("<start_of_turn>", "<end_of_turn>"),
    system=False,
)

_QWEN3 = """
{%- set query = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set query.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n[result]\n' + message.content + '\n[/result]<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought and loop.index0 > query.last %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""

QWEN3 = Shape(
    name="qwen3",
    template=_QWEN3,
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=("<|im_start|>", "<|endoftext|>"),
    stable=False,
    thinks=True,
)

QWEN3_OPENS = Shape(
    name="qwen3 that opens the thinking",
    template=_QWEN3.replace(
        "{{- '<|im_start|>assistant\n' }}\n{%- endif %}",
        "{{- '<|im_start|>assistant\n<think>\n' }}\n{%- endif %}",
    ),
    stop="<|im_end|>",
    eos="<|im_end|>",
    special=("<|im_start|>", "<|endoftext|>"),
    stable=False,
    thinks=True,
    opens=True,
)

DEEPSEEK_R1 = Shape(
    name="deepseek-r1",
    template="""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content }}
    {%- elif message.role == 'user' %}
        {{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|Assistant|><think>\n' }}
{%- endif %}""",
    stop="<|end_of_sentence|>",
    eos="<|end_of_sentence|>",
    bos="<|begin_of_sentence|>",
    special=("<|User|>", "<|Assistant|>"),
    stable=False,
    thinks=True,
    opens=True,
)

ROUNDS = Shape(
    name="numbered rounds",
    template="""
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[round ' ~ (loop.index0 // 2 + 1) ~ ']\n' }}
    {%- endif %}
    {{- message.role + ': ' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}""",
    stop="<|end|>",
    eos="<|end|>",
    stable=False,
)

PLAIN = Shape(
    name="plain words",
    template="""
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\n' + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant:' }}
{%- endif %}""",
    stop="</s>",
    eos="</s>",
)

SHAPES = [
    *(CHATML, LLAMA3, MISTRAL, MISTRAL_SYSTEM_LAST, GEMMA),
    *(QWEN3, QWEN3_OPENS, DEEPSEEK_R1, ROUNDS),
]
