"""Models of many families: each is sampled from exactly, or refused by name."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.tiers import some_fast
from torchrl_mt.engines import TransformersEngine

from .helpers import (
    assert_all_sampled_by,
    changed_copy,
    generate_all,
    plain_log_probs,
    started,
    until,
)

pytestmark = pytest.mark.filterwarnings("error:.*deprecated:FutureWarning")

VOCABULARY = 61
TOKENIZER: Any = SimpleNamespace(eos_token_id=1, pad_token_id=0)

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 2048, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
WIDE_HEADS = {**GROUPED, "head_dim": 16}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 1024}
GPT |= {"initializer_range": 0.2, "eos_token_id": 1}

WINDOW = {**GROUPED, "sliding_window": 8}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EAGER = {"attn_implementation": "eager"}
TWO_OF_FOUR = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LLAMA4 = {**GROUPED, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4}
LLAMA4 |= {"num_experts_per_tok": 1, "attention_chunk_size": 16, "no_rope_layers": [1, 1, 0]}
DEEPSEEK = {**COMMON, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "n_group": 1}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "topk_group": 1}
DEEPSEEK |= {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-window": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-eager": ("Qwen2", {**GROUPED, **EAGER}),
    "qwen3": ("Qwen3", WIDE_HEADS),
    "qwen3-moe": (
        "Qwen3Moe",
        {**GROUPED, **EXPERTS, "moe_intermediate_size": 32, "head_dim": 8}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "llama": ("Llama", GROUPED),
    "llama4": ("Llama4Text", {**LLAMA4, "interleave_moe_layer_step": 1}),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 12}),
    "mixtral": ("Mixtral", {**TWO_OF_FOUR, "sliding_window": None}),
    "phi3": ("Phi3", GROUPED),
    "phi3-window": ("Phi3", {**GROUPED, "sliding_window": 9}),
    "gemma2": ("Gemma2", {**WINDOW, **EAGER, "head_dim": 16}),
    "gemma3": ("Gemma3Text", {**MIXED, "head_dim": 16}),
    "gpt-oss": ("GptOss", {**TWO_OF_FOUR, **MIXED, **EAGER, "head_dim": 8}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "cohere2": ("Cohere2", MIXED),
    "olmo2": ("Olmo2", GROUPED),
    "granite": ("Granite", GROUPED),
    "smollm3": ("SmolLM3", GROUPED),
    "glm4": ("Glm4", {**GROUPED, "head_dim": 8}),
    "gpt-neox": ("GPTNeoX", COMMON),
    "gpt2": ("GPT2", GPT),
    "gpt-j": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "opt": ("OPT", {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "bloom": ("Bloom", {**COMMON, "n_layer": 3, "n_head": 4}),
    "falcon": ("Falcon", {**COMMON, "alibi": False}),
    "falcon-alibi": ("Falcon", {**COMMON, "alibi": True}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {**WIDE_HEADS, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    ),
    "mamba": ("Mamba", {**COMMON, "state_size": 4}),
    "jamba": (
        "Jamba",
        {**GROUPED, "num_experts": 2, "use_mamba_kernels": False, "mamba_d_state": 4},
    ),
    "recurrent-gemma": (
        "RecurrentGemma",
        {**GROUPED, "lru_width": 32, "attention_window_size": 8},
    ),
    "rwkv": ("Rwkv", {**COMMON, "attention_hidden_size": 32}),
}


def build(family: str, settings: dict[str, Any]) -> Any:
    """A model of a family, with weights large enough that a wrong cache shows."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}Config")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def texts(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", some_fast(["qwen2-window", "gemma3"], FAMILIES))
def test_answers_are_exact_over_turns_groups_and_full_caches(family):
    play_turns(build(*FAMILIES[family]))


def play_turns(model: Any, atol: float = 5e-5) -> None:
    """Conversations of all lengths, a group among them, in a cache that is too small for all."""
    engine = TransformersEngine(model, TOKENIZER, seed=3, cache_tokens=700, max_batch_tokens=40)

    async def play():
        lengths = [1, 2, 5, 17, 30, 64, 64, 64]
        conversations = texts(lengths, 0)
        conversations[6] = conversations[7] = conversations[5]  # a group
        for turn in range(3):
            asked = [
                engine.generate(prompt, stop_token_ids=(), max_new_tokens=5 + 7 * (i % 3))
                for i, prompt in enumerate(conversations)
            ]
            answers = await asyncio.gather(*asked)
            assert_all_sampled_by(model, conversations, answers, atol)
            said = texts([3 + 5 * (i % 4) for i in range(len(lengths))], 1 + turn)
            conversations = [
                [*prompt, *answer.token_ids, *words]
                for prompt, answer, words in zip(conversations, answers, said, strict=True)
            ]

    asyncio.run(play())
    assert engine.stats()["shared_tokens"] > 0
    engine.close()


@pytest.mark.parametrize("family", some_fast(["qwen3-moe"], FAMILIES))
async def test_answers_are_exact_before_and_after_an_update(family):
    model = build(*FAMILIES[family])
    changed = changed_copy(copy.deepcopy(model))
    engine = TransformersEngine(model, TOKENIZER, seed=3, share_weights=False)
    requests = texts([20, 40, 5, 33], 7)
    tasks = started(engine, requests, stop_token_ids=(), max_new_tokens=60)
    await until(lambda: engine.stats()["generated_tokens"] >= 40)
    await asyncio.to_thread(engine.update_weights, changed)
    answers = await asyncio.gather(*tasks)
    assert {version for answer in answers for version in answer.versions} == {0, 1}
    assert_all_sampled_by([model, changed], requests, answers, 5e-5)


def test_long_rope_is_sampled_as_long_as_its_frequencies_stay():
    """They would change for every row of a batch with the longest, and for what is in the cache."""
    rope: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    settings = {**GROUPED, "original_max_position_embeddings": 64}
    if transformers.__version__.startswith("4."):
        settings["rope_scaling"] = {**rope, "type": "longrope"}
    else:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 64}
        settings["rope_parameters"] = {**rope, "rope_theta": 10_000.0}
    model = build("Phi3", settings)
    engine = TransformersEngine(model, TOKENIZER, max_new_tokens=14)
    assert engine.max_total_tokens == 64
    prompts = texts([50, 9], 0)

    answers = generate_all(engine, prompts, stop_token_ids=())
    assert_all_sampled_by([model], prompts, answers, 5e-5)
    with pytest.raises(ValueError, match="exceed the 64 tokens that"):
        asyncio.run(engine.generate(prompts[0], max_new_tokens=15))


def test_a_model_that_says_something_else_with_a_cache_is_refused():
    class Forgetful(transformers.Qwen2ForCausalLM):
        """Places every pass's tokens at the beginning."""

        def forward(self, input_ids=None, position_ids=None, **kwargs):
            position_ids = torch.arange(input_ids.shape[1])[None]
            return super().forward(input_ids, position_ids=position_ids, **kwargs)

    torch.manual_seed(0)
    model = Forgetful(transformers.Qwen2Config(**GROUPED))
    with pytest.raises(ValueError, match=r"Forgetful: its log-probabilities are .* nats off"):
        TransformersEngine(model, TOKENIZER)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_sampled_from(dtype):
    model = build(*FAMILIES["qwen2"]).to(dtype)
    engine = TransformersEngine(model, TOKENIZER, seed=3, max_new_tokens=20)
    prompts = texts([30, 9, 41], 0)

    answers = generate_all(engine, prompts, stop_token_ids=())
    for prompt, answer in zip(prompts, answers, strict=True):
        gap = plain_log_probs(model, prompt, answer) - torch.tensor(answer.log_probs)
        assert gap.abs().max() < 0.2


@pytest.mark.parametrize("family", some_fast(["mamba"], REFUSED))
def test_what_keeps_more_than_keys_and_values_is_refused(family):
    model = build(*REFUSED[family])
    with pytest.raises(ValueError, match=f"nothing else, got {type(model).__name__}: .*Wrap it in"):
        TransformersEngine(model, TOKENIZER)
