"""Tiny models and random training rows, with holes in the masks and padding anywhere."""

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tests.scoring.helpers import tiny

VOCABULARY = 24


def make_model(seed: int = 0, **options) -> Qwen2ForCausalLM:
    return tiny(
        "Qwen2", seed, **{"max_position_embeddings": 256, "initializer_range": 0.5} | options
    )


@pytest.fixture(name="make_model")
def _make_model() -> Callable[..., Qwen2ForCausalLM]:
    return make_model


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return make_model()


@pytest.fixture
def other_model() -> Qwen2ForCausalLM:
    return make_model(1)


def make_rows(seed: int = 0, n: int = 6, s: int = 12, *, suffix_padding: bool = True) -> TensorDict:
    """Random rows as ``MergeTurns`` makes them; some episodes have two rows."""
    g = torch.Generator().manual_seed(seed)
    attention = torch.ones(n, s, dtype=torch.bool)
    if suffix_padding:
        length = torch.randint(3, s + 1, (n, 1), generator=g)
        attention = torch.arange(s) < length
    else:
        attention = torch.rand(n, s, generator=g) < 0.7
    first = attention.int().argmax(-1, keepdim=True)
    mask = attention & (torch.rand(n, s, generator=g) < 0.5) & (torch.arange(s) > first)
    episode = torch.arange(n) - (torch.arange(n) % 3 == 1).long()
    steps = (torch.rand(n, s, generator=g) < 0.3).long().cumsum(-1)
    turns = torch.where(attention, steps + 10 * (torch.arange(n) % 3 == 1)[:, None], -1)
    tokens = torch.randint(3, VOCABULARY, (n, s), generator=g)
    log_prob = -3 * torch.rand(n, s, generator=g)
    return TensorDict(
        {
            "tokens": {"full": torch.where(attention, tokens, 0)},
            "masks": {"all_attention_mask": attention, "all_assistant_mask": mask},
            "log_probs": {"full": torch.where(mask, log_prob, 0.0)},
            "versions": {"full": torch.where(mask, 0, -1)},
            "turns": {"full": turns},
            "rewards": {"full": torch.where(mask, torch.randn(n, s, generator=g), 0.0)},
            "episode": episode,
            "group": episode // 6,
        },
        batch_size=[n],
    )


@pytest.fixture
def rows() -> Callable[..., TensorDict]:
    return make_rows


@pytest.fixture
def spread() -> Callable[[TensorDict, int], TensorDict]:
    """The same rows with padding put before, between and after their tokens."""

    def scatter(rows: TensorDict, seed: int = 0) -> TensorDict:
        n, s = rows["tokens", "full"].shape
        g = torch.Generator().manual_seed(seed)
        wide = s + 7
        column = torch.rand(n, wide, generator=g).argsort(-1)[:, :s].sort(-1).values

        def move(value: Tensor) -> Tensor:
            if value.ndim == 1:
                return value
            fill = -1 if value.dtype is torch.long and bool((value == -1).any()) else 0
            base = torch.full((n, wide, *value.shape[2:]), fill, dtype=value.dtype)
            index = column.reshape(n, s, *[1] * (value.ndim - 2)).expand_as(value)
            return base.scatter(1, index, value)

        return rows.apply(move)

    return scatter


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer; TorchRL's wrapper reads its padding token even for token input."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    core = Tokenizer(WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
