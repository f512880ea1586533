"""Pretrained chat models built small: the configurations of their families, without weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.chat.templates import CHATML, LLAMA3, Shape, byte_level


def qwen2() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Qwen2.5-0.5B-Instruct: 14 heads over 2 of keys, biases, tied embeddings."""
    tokenizer, options = _parts(CHATML)
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 14 * 4}
    return Qwen2ForCausalLM(Qwen2Config(**options, **heads, max_window_layers=2)), tokenizer


def llama() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Llama-3.2-1B-Instruct: 32 heads over 8 of keys, stretched positions, two ends of a text."""
    tokenizer, options = _parts(LLAMA3)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 32 * 4}
    stretched = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**options, **heads, rope_scaling=stretched)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(LLAMA3.stop)]
    config.eos_token_id = ends
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = ends
    return model, tokenizer


def _parts(shape: Shape) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    torch.manual_seed(0)
    tokenizer = shape.on(byte_level())
    return tokenizer, {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


SMALL_FAMILIES = {"Qwen2.5": qwen2, "Llama 3.2": llama}
