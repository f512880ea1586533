"""LoRA on a real model: it begins as the base, learns, and is read by PEFT."""

from __future__ import annotations

import copy

import pytest
import torch

from torchrl_mt import pretrained
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine, save_adapter
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss
from torchrl_mt.transforms import MergeTurns

from .helpers import QUESTIONS, Chat, asked, nudged

peft = pytest.importorskip("peft", reason="LoRA needs the extra [lora]")

pytestmark = pytest.mark.slow


@pytest.fixture
def policy(folder):
    return pretrained.load(folder)


@pytest.fixture
def rows(policy):
    engine = TransformersEngine(policy.model, policy.tokenizer, seed=0)
    with MultiTurnCollector(
        Chat(),
        engine,
        asked(*QUESTIONS),
        episodes_per_batch=6,
        total_episodes=6,
        group_size=2,
        limits=Limits(max_response_tokens=12, on_cut="continue"),
        postproc=MergeTurns(pad_token_id=policy.tokenizer.pad_token_id),
    ) as collector:
        (rows,) = collector
    return rows


def test_at_first_the_actor_is_its_reference_to_the_last_bit(policy, rows):
    def kl(actor, old_log_probs):
        maker = ExperienceMaker(actor, ref="base", advantage="grpo", old_log_probs=old_log_probs)
        made = maker(rows)
        return made["kl"][:, 1:][made["masks", "all_assistant_mask"][:, 1:]]

    assert (kl(policy.model, "actor") == 0).all()
    assert kl(policy.model, "sampler").abs().max() < 1e-4
    changed = kl(nudged(policy.model), "actor") != 0
    assert changed.float().mean() > 0.9  # a token that both are certain of has 0


def test_the_loss_falls_and_the_base_stays(policy, rows):
    before = copy.deepcopy(policy.model.get_base_model().lm_head.weight)
    loss_module = MultiTurnLoss(policy.model, objective="sft")
    losses = []
    for _ in range(6):
        loss = loss_module(rows)["loss_objective"]
        losses.append(loss.item())
        loss.backward()
        policy.optimizer.step()
        policy.optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(policy.model.get_base_model().lm_head.weight, before)


def test_peft_reads_the_adapter(policy, model, tmp_path):
    changed = nudged(policy.model)
    folder = save_adapter(changed, tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
    ids = policy.tokenizer(QUESTIONS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, changed(ids).logits)
        assert not torch.allclose(read(ids).logits, model(ids).logits, atol=0.1)
