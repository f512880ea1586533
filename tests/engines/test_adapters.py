"""Engines and PEFT adapters: merged for the base model, as they are for models like the source."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.adapters import lora, stirred
from tests.tiers import some_fast
from torchrl_mt.engines import TransformersEngine, adapter_weights, merged_weights, save_adapter
from torchrl_mt.engines.weights import fitting_weights
from torchrl_mt.testing import tiny_chat_model

from .helpers import assert_sampled_by, endless, generate_all, prompts, sampled

peft = pytest.importorskip("peft")


def untied():
    torch.manual_seed(0)
    words = " ".join(map(str, range(22)))
    return tiny_chat_model(words, tie_word_embeddings=False, attention_bias=True)[0].eval()


CONFIGS = {
    "lora": peft.LoraConfig(target_modules=["q_proj", "v_proj"]),
    "rslora": peft.LoraConfig(target_modules="all-linear", use_rslora=True),
    "dora": peft.LoraConfig(target_modules=["q_proj", "lm_head", "embed_tokens"], use_dora=True),
    "lora_bias": peft.LoraConfig(target_modules=["q_proj"], lora_bias=True),
    "modules_to_save": peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]
    ),
    "bias": peft.LoraConfig(target_modules=["q_proj"], bias="all"),
    "tokens": peft.LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5]}
    ),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "lokr": peft.LoKrConfig(target_modules=["q_proj"]),
}


@pytest.mark.parametrize("name", some_fast(["rslora", "dora", "modules_to_save"], CONFIGS))
def test_merged_weights_are_those_of_peft_under_the_base_models_names(name):
    base = untied().to(torch.bfloat16 if name == "lora" else torch.float32)
    model = stirred(peft.get_peft_model(copy.deepcopy(base), CONFIGS[name]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = merged_weights(nn.DataParallel(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    assert found.keys() == expected.keys() == base.state_dict().keys()
    for key, value in found.items():
        assert value.dtype is base.state_dict()[key].dtype
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=1e-6)
    changed = {
        key for key, value in found.items() if not torch.equal(value, base.state_dict()[key])
    }
    assert changed  # The adapter does something.


def test_merging_copies_the_layers_with_adapters_alone():
    model = lora(untied(), target_modules=["q_proj"])
    of_model = {value.data_ptr() for value in model.state_dict().values()}
    merged = merged_weights(model)
    copied = {name for name, value in merged.items() if value.data_ptr() not in of_model}
    assert copied == {name for name in merged if "q_proj" in name} != set()


def test_an_engine_of_the_base_model_samples_from_the_merged_policy(tokenizer, model):
    engine = endless(model, tokenizer, share_weights=False, max_new_tokens=8)
    actor = lora(copy.deepcopy(model)).train()
    try:
        for version in (1, 2):
            assert engine.update_weights(actor) == version
            requests = prompts(4)
            for prompt, answer in zip(requests, generate_all(engine, requests), strict=True):
                assert set(answer.versions) == {version}
                assert_sampled_by(actor, prompt, answer)
            stirred(actor, seed=version)
    finally:
        engine.close()


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_of_the_peft_model_takes_it_as_it_is(tokenizer, model, shared):
    actor = lora(model)
    engine = endless(actor, tokenizer, share_weights=shared, max_new_tokens=8)
    stirred(actor, seed=7)
    try:
        assert engine.update_weights(actor) == 1
        assert engine.update_weights() == 2
        sampled(engine, actor, prompts(4))
        with actor.disable_adapter():  # The engine has layers of its own.
            during = generate_all(engine, prompts(1))[0]
        assert_sampled_by(actor, prompts(1)[0], during)
    finally:
        engine.close()


def test_what_cannot_be_merged_is_refused(tokenizer, model):
    engine = TransformersEngine(model, tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = copy.deepcopy(model)
    actor = lora(model)
    with pytest.raises(ValueError, match="shares its weights with the base model"):
        engine.update_weights(actor)
    assert actor.get_base_model().model.norm.weight.equal(before["model.norm.weight"])
    with pytest.raises(ValueError, match="give the PEFT model itself, not its state dict"):
        fitting_weights(actor.state_dict(), plain)
    tied = copy.deepcopy(untied())
    tied.config.tie_word_embeddings = True
    tied.lm_head.weight = tied.model.embed_tokens.weight
    whole = lora(copy.deepcopy(tied), modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match=r"must be equal, since they are one tensor"):
        fitting_weights(whole, tied)
    with pytest.raises(ValueError, match=r"lm_head cannot be merged: .* are one weight"):
        merged_weights(lora(copy.deepcopy(tied), target_modules=["lm_head"]))
    invoked = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]
    )
    with pytest.raises(ValueError, match=r"'default' \(LORA\) cannot be merged: aLoRA"):
        merged_weights(peft.get_peft_model(copy.deepcopy(plain), invoked))
    with pytest.raises(TypeError, match=r"must have a PEFT adapter .*, got LlamaForCausalLM"):
        merged_weights(plain)


@pytest.mark.parametrize("name", ["default", "second"])
def test_a_saved_adapter_is_loaded_by_peft(tmp_path, model, name):
    base = copy.deepcopy(model)
    config = peft.LoraConfig(target_modules=["q_proj"])
    actor = peft.get_peft_model(model, config, adapter_name=name)
    actor.add_adapter("idle", config)
    stirred(actor)
    folder = save_adapter(nn.DataParallel(actor), tmp_path / "adapters" / "v1")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in folder.iterdir()
    }
    assert [path.name for path in folder.parent.iterdir()] == ["v1"]
    stored = peft.load_peft_weights(str(folder))
    weights = adapter_weights(actor)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in stored.items())
    loaded = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    ids = torch.tensor(prompts(1))
    torch.testing.assert_close(loaded(ids).logits, actor.eval()(ids).logits)
    with pytest.raises(FileExistsError, match="give a new one for each version"):
        save_adapter(actor, folder)
