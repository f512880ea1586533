"""What a model is loaded with for training: adapters, learning rate, number type, one line about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.small_families import SMALL_FAMILIES
from torchrl_mt import pretrained
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import MergeTurns


@pytest.fixture
def folder(tmp_path):
    model, tokenizer = tiny_chat_model("yes no")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def trained(policy):
    return [p for p in policy.model.parameters() if p.requires_grad]


def test_by_default_only_adapters_are_trained_and_one_line_says_so(folder, capsys):
    policy = pretrained.load(folder)
    assert isinstance(policy.model, PeftModel)
    assert all("lora_" in name for name, p in policy.model.named_parameters() if p.requires_grad)
    config = policy.model.active_peft_config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    (group,) = policy.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (3e-4, 0.0)
    assert {id(p) for p in group["params"]} == {id(p) for p in trained(policy)}
    assert not policy.model.training
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert f"{folder}: trains LoRA, " in line
    assert "lr 0.0003, float32 on cpu" in line


def test_all_weights_are_trained_if_asked(folder):
    policy = pretrained.load(folder, lora=False, lr=2e-6)
    assert len(trained(policy)) == len(list(policy.model.parameters()))
    assert policy.optimizer.param_groups[0]["lr"] == 2e-6


def test_adapters_and_models_of_ones_own_are_kept(folder):
    model, tokenizer = tiny_chat_model("yes no")
    config = LoraConfig(r=2, target_modules=["q_proj"])
    assert pretrained.load(model, tokenizer, lora=config).model.peft_config["default"] is config
    given = pretrained.load(tiny_chat_model("yes no")[0], tokenizer, lora={"r": 4})
    assert (given.model.active_peft_config.r, given.model.active_peft_config.lora_alpha) == (4, 8)
    actor = get_peft_model(tiny_chat_model("yes no")[0], config)
    policy = pretrained.load(actor, tokenizer, lora=False)
    assert policy.model is actor
    assert policy.optimizer.param_groups[0]["lr"] == 3e-4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_adapters_are_in_full_precision(folder, dtype):
    policy = pretrained.load(folder, dtype=dtype)
    assert next(policy.model.parameters()).dtype == (dtype or torch.float32)
    assert {p.dtype for p in trained(policy)} == {torch.float32}


def test_a_tokenizer_without_padding_pads_with_its_last_token():
    model, tokenizer = tiny_chat_model("yes no")
    tokenizer.pad_token = None
    assert pretrained.load(model, tokenizer).tokenizer.pad_token == tokenizer.eos_token


def test_plain_text_is_as_likely_as_the_model_itself_says():
    words = " ".join(dict.fromkeys(" ".join(pretrained.PLAIN_TEXT).split()))
    policy = pretrained.load(*tiny_chat_model(words))
    with torch.no_grad():
        for p in trained(policy):
            p.normal_()
    losses, counts = [], []
    for text in pretrained.PLAIN_TEXT:
        ids = policy.tokenizer(text, return_tensors="pt")["input_ids"]
        losses.append(policy.model(input_ids=ids, labels=ids).loss.item())
        counts.append(ids.shape[1] - 1)
    expected = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    assert policy.plain_text_nll() == pytest.approx(expected, abs=1e-5)


def test_plain_text_of_unknown_words_is_told(folder):
    for policy in (pretrained.load(folder), pretrained.load(*tiny_chat_model("yes no"))):
        with pytest.raises(ValueError, match="has no tokens for 'The sun rises"):
            policy.plain_text_nll()


def test_learning_rates_by_size_and_kind():
    sizes = (int(5e8), int(7e9), int(7e10))
    assert [pretrained.learning_rate(n, lora=True) for n in sizes] == [3e-4, 1e-4, 5e-5]
    assert [pretrained.learning_rate(n, lora=False) for n in sizes] == [1e-5, 3e-6, 1e-6]


def test_what_cannot_be_trained_is_refused_by_name(folder, tmp_path):
    model, tokenizer = tiny_chat_model("yes no")
    with pytest.raises(OSError, match=r"there is no folder .*smollm"):
        pretrained.load(str(tmp_path / "smollm"))
    with pytest.raises(ValueError, match="lr must be"):
        pretrained.load(folder, lr=0)
    with pytest.raises(TypeError, match="revision is for loading a model by its name"):
        pretrained.load(model, tokenizer, revision="main")
    with pytest.raises(TypeError, match="tokenizer must be given with a LlamaForCausalLM"):
        pretrained.load(model)
    with pytest.raises(ValueError, match="requires_grad"):
        pretrained.load(model.requires_grad_(False), tokenizer, lora=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        pretrained.load(model, tokenizer)


class Chatty(GuessNumber):
    """Rewards what any model does: every second letter."""

    def step(self, response):
        return replace(super().step(response), reward=float(len(response) % 2))


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_other_families_play_and_learn(family):
    policy = pretrained.load(*SMALL_FAMILIES[family]())
    model = policy.model
    before = [p.clone() for p in trained(policy)]
    with MultiTurnCollector(
        Chatty(4, turns=2),
        TransformersEngine(model, policy.tokenizer, seed=0),
        episodes_per_batch=8,
        total_episodes=16,
        limits=Limits(max_response_tokens=6, on_cut="continue"),
        postproc=MergeTurns(pad_token_id=policy.tokenizer.pad_token_id),
    ) as collector:
        maker = ExperienceMaker(model, ref="base", advantage="turn")
        loss_module = MultiTurnLoss(model)
        for rows in collector:
            rows = maker(rows)
            ids, attended = rows["tokens", "full"], rows["masks", "all_attention_mask"]
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=attended.long()).logits
            expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            sampled = rows["masks", "all_assistant_mask"][:, 1:]
            found = rows["log_probs", "full"][:, 1:]
            torch.testing.assert_close(found[sampled], expected[sampled], atol=1e-5, rtol=0)
            loss_module(rows)["loss_objective"].backward()
            policy.optimizer.step()
            policy.optimizer.zero_grad()
            collector.update_policy_weights_(model)
    changed = [not torch.equal(a, b) for a, b in zip(before, trained(policy), strict=True)]
    assert all(changed)
    assert (rows["kl"] != 0).any()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"there is no folder .*smollm"):
        pretrained.load(str(tmp_path / "smollm"))


def test_the_training_of_saved_adapters_goes_on(folder, tmp_path):
    policy = pretrained.load(folder)
    with torch.no_grad():
        for p in trained(policy):
            p.normal_()
    saved = str(tmp_path / "adapters")
    policy.model.save_pretrained(saved)
    again = pretrained.load(saved, lora=False)  # its tokenizer is that of the base model
    assert [p.shape for p in trained(again)] == [p.shape for p in trained(policy)]
    for ours, theirs in zip(trained(again), trained(policy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again.model(ids).logits, policy.model(ids).logits, rtol=0, atol=0)
    assert again.optimizer.param_groups[0]["lr"] == 3e-4
    injected = AutoModelForCausalLM.from_pretrained(saved)  # transformers makes no PeftModel
    with pytest.raises(ValueError, match="no adapters or be a PeftModel, got adapters in a Llama"):
        pretrained.load(injected, policy.tokenizer)
