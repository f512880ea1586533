"""What the tests of scores share: entries of rows, tiny models, and an attention over lengths."""

from itertools import pairwise

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]
INPUTS = {
    "input_ids": torch.arange(3, 21).view(3, 6),
    "attention_mask": torch.ones(3, 6, dtype=torch.long),
}
_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NAMES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def entries(rows):
    masks = rows["masks"]
    return rows["tokens", "full"], masks["all_attention_mask"], masks["all_assistant_mask"]


def close(got, expected, atol=1e-5, rtol=1e-5):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def assert_within_limits(model, attended, score, *, tokens=None, size=None):
    """Check that no pass of ``score()`` is larger than it may be; a longer row is one of its own."""
    shapes = []

    def note(_, args, kwargs):
        shapes.append(kwargs["input_ids"].shape)

    with model.register_forward_pre_hook(note, with_kwargs=True):
        score()
    assert shapes
    assert size is None or all(count <= size for count, _ in shapes)
    most = None if tokens is None else max(tokens, int(attended.sum(-1).max()))
    assert most is None or all(shape.numel() <= most for shape in shapes)


def assert_same_gradients(got, expected):
    """The same gradients by name, each up to a share of its largest number."""
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        scale = expected[name].abs().max().clamp(min=0.01)
        assert (gradient - expected[name]).abs().max() <= 1e-4 * scale, name


def tiny(family, seed=0, **options):
    """A tiny language model of a family; the same each time."""
    torch.manual_seed(seed)
    of_text = family + "Text" * (family == "Llama4")
    config = getattr(transformers, f"{of_text}Config")(**_SIZES | options)
    name = _NAMES.get(family, f"{family}ForCausalLM")
    return getattr(transformers, name)._from_config(config).eval()


def attention_over_lengths(found):
    """Register an attention that is told the lengths of rows, or finds them in the positions."""

    def attend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **kwargs):
        assert attention_mask is None or attention_mask.ndim == 2
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        ends, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
        causal = module.is_causal if is_causal is None else is_causal
        if ends is not None:
            assert query.shape[0] == 1
            ends = ends.tolist()
        else:
            starts = [0] if positions is None else (positions[0] == 0).nonzero().flatten().tolist()
            ends = [*starts, query.shape[2]]
        if causal:
            found.append(len(ends) - 1)
        parts = [
            nn.functional.scaled_dot_product_attention(
                *(x[:, :, a:b] for x in (query, key, value)), scale=scaling, is_causal=causal
            )
            for a, b in pairwise(ends)
        ]
        return torch.cat(parts, 2).transpose(1, 2), None

    AttentionInterface.register("lengths_flash", attend)
    AttentionMaskInterface.register("lengths_flash", lambda *_, attention_mask=None, **__: None)
