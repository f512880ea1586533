"""Chat templates of well-known shapes, and tokenizers built on the spot that they run on."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the user asks a question and the assistant thinks about the answer",
    "guess a number from one to sixteen, higher or lower, system rules",
    "tool result: correct, invalid, next round",
]
_FOLDER = Path(__file__).parent / "jinja"
THINK, UNTHINK = "<think>", "</think>"


def template_of(name: str) -> str:
    """The chat template in a file."""
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


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
            *({word: k for k, word in enumerate(words)}, [tuple(pair) for pair in model["merges"]]),
            **{"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def shape(name: str, file: str, stop: str, eos: str | None = None, **fields: Any) -> Shape:
    """A shape whose template is in a file; an answer's end is the end of sequence by default."""
    return Shape(name, template_of(f"shape_{file}"), stop, eos or stop, **fields)


_IM = {"special": ("<|im_start|>", "<|endoftext|>")}
_THINKS = {"stable": False, "thinks": True}
CHATML = shape("chatml", "chatml", "<|im_end|>", **_IM)
LLAMA3 = shape(
    *("llama3", "llama3", "<|eot_id|>", "<|end_of_text|>"),
    bos="<|begin_of_text|>",
    special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
MISTRAL = shape("mistral", "mistral", "</s>", bos="<s>", system=False)
MISTRAL_SYSTEM_LAST = shape(
    *("mistral with the system's message before the last user's", "mistral_system_last", "</s>"),
    bos="<s>",
    special=("[INST]", "[/INST]"),
    stable=False,
)
GEMMA = shape(
    *("gemma", "gemma", "<end_of_turn>", "<eos>"),
    bos="<bos>",
    special=("<start_of_turn>", "<end_of_turn>"),
    system=False,
)
QWEN3 = shape("qwen3", "qwen3", "<|im_end|>", **_IM, **_THINKS)
QWEN3_OPENS = shape(
    *("qwen3 that opens the thinking", "qwen3_opens", "<|im_end|>"), **_IM, **_THINKS, opens=True
)
DEEPSEEK_R1 = shape(
    *("deepseek-r1", "deepseek_r1", "<|end_of_sentence|>"),
    **_THINKS,
    bos="<|begin_of_sentence|>",
    special=("<|User|>", "<|Assistant|>"),
    opens=True,
)
ROUNDS = shape("numbered rounds", "rounds", "<|end|>", stable=False)
PLAIN = shape("plain words", "plain", "</s>")
SHAPES = [
    *(CHATML, LLAMA3, MISTRAL, MISTRAL_SYSTEM_LAST, GEMMA),
    *(QWEN3, QWEN3_OPENS, DEEPSEEK_R1, ROUNDS),
]
