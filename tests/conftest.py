"""What the tests share: a chat model small enough to build on the spot."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from torchrl_mt.testing import tiny_chat_model, tiny_chat_tokenizer

WORDS = ["guess", "to", "higher", "lower", "correct", "invalid", *map(str, range(1, 17))]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_chat_tokenizer(WORDS)


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return tiny_chat_model(WORDS, hidden_size=32, intermediate_size=64)[0]
