"""What the engine says of its tokens is what a plain forward pass over them says."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.engines.helpers import endless, generate_all, plain_log_probs, until
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.transforms import MergeTurns

from .helpers import QUESTIONS, Chat, asked, nudged

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["as it comes", "with LoRA"])
def actor(request, model):
    if request.param == "as it comes":
        return model
    peft = pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
    config = peft.LoraConfig(r=8, target_modules="all-linear")
    return nudged(peft.get_peft_model(nudged(model), config).eval())


@pytest.fixture
def prompts(tokenizer):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


def test_log_probs_over_turns_and_groups_are_those_of_one_forward(actor, tokenizer):
    with MultiTurnCollector(
        Chat(),
        TransformersEngine(actor, tokenizer, seed=0),
        asked(*QUESTIONS),
        episodes_per_batch=9,
        total_episodes=9,
        group_size=3,
        limits=Limits(max_response_tokens=24, on_cut="continue"),
        postproc=MergeTurns(pad_token_id=tokenizer.pad_token_id),
    ) as collector:
        (rows,) = collector
    assert len(rows) == 9
    ids, attended = rows["tokens", "full"], rows["masks", "all_attention_mask"]
    with torch.no_grad():
        logits = actor(input_ids=ids, attention_mask=attended.long()).logits
    expected = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    sampled = rows["masks", "all_assistant_mask"][:, 1:]
    assert sampled.sum() > 9 * 3 * 8
    found = rows["log_probs", "full"][:, 1:]
    torch.testing.assert_close(found[sampled], expected[sampled], atol=1e-4, rtol=0)


def test_an_update_in_mid_answer_is_stamped_where_it_came(actor, tokenizer, prompts):
    engine = endless(actor, tokenizer, share_weights=False, seed=0)
    changed = nudged(actor, seed=1)

    async def run():
        tasks = [asyncio.create_task(engine.generate(p, max_new_tokens=60)) for p in prompts]
        await until(lambda: engine.stats()["generated_tokens"] >= 3 * 15)
        await asyncio.to_thread(engine.update_weights, changed)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(run())
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        versions = torch.tensor(answer.versions)
        assert set(answer.versions) == {0, 1}
        assert versions.diff().min() >= 0
        before, after = (plain_log_probs(model, prompt, answer) for model in (actor, changed))
        assert (before - after).abs().max() > 0.01
        expected = torch.where(versions == 0, before, after)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def test_greedy_answers_are_those_of_generate(actor, tokenizer, prompts):
    engine = TransformersEngine(actor, tokenizer)
    answers = generate_all(engine, prompts, temperature=0.0, max_new_tokens=40)
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        found = actor.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=tokenizer.eos_token_id,
        )
        assert answer.token_ids == found[0, len(prompt) :].tolist()
