"""Tiny models and tokenizers for examples, tutorials and tests.

Nothing is downloaded. They are ordinary Hugging Face models, tokenizers and processors.
"""

from torchrl_mt.testing.chat import tiny_chat_model, tiny_chat_tokenizer
from torchrl_mt.testing.vision import tiny_vl_model

__all__ = ["tiny_chat_model", "tiny_chat_tokenizer", "tiny_vl_model"]
