"""A tiny chat model and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["text_config", "tiny_chat_model", "tiny_chat_tokenizer"]

_ROLES = ("user", "assistant")
_SPECIAL = ("<pad>", "<end>", *map("<{}>".format, _ROLES))
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ROLES %}"
    "{{ raise_exception(\"the tiny tokenizer has no role '\" ~ message['role'] ~ \"': make it with \""
    " ~ \"extra_roles=['\" ~ message['role'] ~ \"']\") }}"
    "{% endif %}"
    "<{{ message['role'] }}> {{ message['content'] }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_chat_tokenizer(
    words: str | Iterable[str], *, extra_roles: str | Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are whole words, with a chat template.

    Args:
        words: the vocabulary; a string is split at white space.
        extra_roles: roles of messages besides ``"user"`` and ``"assistant"``, such as ``"system"`` and
            ``"tool"``. Their tokens come after the words. The chat template refuses other roles.

    Returns:
        A tokenizer with ``<pad>`` and ``<end>`` (end of sequence and of every message). It raises
        ``ValueError`` if it encodes an unknown word.

    Examples:
        >>> tokenizer = tiny_chat_tokenizer("hello world")
        >>> tokenizer("hello world")["input_ids"]
        [4, 5]
        >>> messages = [{"role": "user", "content": "hello"}]
        >>> tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        '<user> hello<end><assistant>'
        >>> tokenizer("hello moon")
        Traceback (most recent call last):
            ...
        ValueError: the tiny tokenizer does not know the word 'moon': make it with all words of prompts,
            environments and answers.
    """
    roles = [*dict.fromkeys((*_ROLES, *_listed(extra_roles)))]
    role_tokens = [f"<{role}>" for role in roles]
    tokens = dict.fromkeys((*_SPECIAL, *_listed(words), *role_tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = _WordTokenizer(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=role_tokens,
    )
    tokenizer.chat_template = _TEMPLATE.replace("ROLES", str(roles))
    return tokenizer


class _WordTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose errors name the unknown word."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_unknown_words(args, *kwargs.values()):
            return super().__call__(*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_unknown_words(args, *kwargs.values()):
            return super().encode(*args, **kwargs)

    @contextmanager
    def _naming_unknown_words(self, *arguments: Any) -> Iterator[None]:
        try:
            yield
        except Exception:
            special = "|".join(map(re.escape, self.all_special_tokens))
            for text in _texts(arguments):
                for word in re.sub(special, " ", text).split():
                    if word not in self.get_vocab():
                        raise ValueError(
                            f"the tiny tokenizer does not know the word {word!r}: make it with all "
                            "words of prompts, environments and answers."
                        ) from None
            raise


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)


_WordTokenizer.__name__ = PreTrainedTokenizerFast.__name__
"""The class name is saved with the tokenizer; under this one, any program can load it."""


def _listed(words: str | Iterable[str]) -> list[str]:
    """A list of words; a string is split at white space."""
    return words.split() if isinstance(words, str) else list(words)


def tiny_chat_model(
    words: str | Iterable[str], *, extra_roles: str | Iterable[str] = (), **config: Any
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Build a two-layer Llama with random weights, and its tokenizer.

    Args:
        words: the vocabulary; see :func:`tiny_chat_tokenizer`.
        extra_roles: further roles of messages; see :func:`tiny_chat_tokenizer`.
        **config: entries of the ``LlamaConfig`` to set.

    Returns:
        The model and the tokenizer.

    Examples:
        >>> model, tokenizer = tiny_chat_model("higher lower correct", hidden_size=32)
        >>> model.config.vocab_size == len(tokenizer) == 7
        True
    """
    tokenizer = tiny_chat_tokenizer(words, extra_roles=extra_roles)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 1024}
    heads = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    settings = {**text_config(tokenizer), **sizes, **heads, **config}
    return LlamaForCausalLM(LlamaConfig(**settings)), tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What the configurations of all tiny text models have in common."""
    return {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        # The usual 0.02 suits wide models; small ones learn faster from larger weights.
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
