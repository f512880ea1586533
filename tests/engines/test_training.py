"""Training a model and rolling out with it, in turns, on one object."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LlamaForCausalLM

from torchrl_mt.engines import TransformersEngine
from torchrl_mt.testing import tiny_chat_model

from .helpers import assert_all_sampled_by, assert_sampled_by, generate_all, prompts


def state_of(model: LlamaForCausalLM) -> dict:
    """Everything that generation could have changed for training."""
    return {
        "training": [module.training for module in model.modules()],
        "attention": model.config._attn_implementation,
        "use_cache": model.config.use_cache,
        "checkpointing": model.is_gradient_checkpointing,
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "parameters": [id(p) for p in model.parameters()],
        "forward": model.forward.__func__,
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_and_rollout_leave_each_other_alone(tokenizer, attention, checkpointing):
    torch.manual_seed(0)
    model = tiny_chat_model(
        " ".join(map(str, range(22))),
        hidden_size=32,
        attention_dropout=0.5,
        attn_implementation=attention,
    )[0]
    model.model.embed_tokens.weight.requires_grad_(False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine = TransformersEngine(model, tokenizer, max_new_tokens=8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = state_of(model)
    requests = prompts(6, length=20)
    for version in range(3):
        answers = generate_all(engine, requests)
        assert state_of(model) == before
        for prompt, answer in zip(requests, answers, strict=True):
            assert set(answer.versions) == {version}
            assert_sampled_by(model, prompt, answer)  # no dropout acted on it
        batch = torch.tensor(requests)
        losses = [model(batch, labels=batch).loss for _ in range(2)]
        assert losses[0] != losses[1]  # dropout acts in training
        optimizer.zero_grad()
        losses[0].backward()
        for parameter in model.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
        optimizer.step()
        assert state_of(model) == before
        engine.update_weights()
    engine.close()
    assert state_of(model) == before


def test_no_grad_around_the_caller_is_the_callers(engine):
    with torch.no_grad():
        generate_all(engine, prompts(1))
        assert not torch.is_grad_enabled()
    with torch.enable_grad():
        generate_all(engine, prompts(1))
        assert torch.is_grad_enabled()


def test_a_model_of_its_own_may_be_sampled_while_the_other_is_trained(tokenizer, model):
    engine = TransformersEngine(model, tokenizer, share_weights=False)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    requests, answers = prompts(20, length=20), []
    thread = threading.Thread(
        target=lambda: answers.extend(generate_all(engine, requests, max_new_tokens=30))
    )
    thread.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    while thread.is_alive():
        batch = torch.tensor(requests)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    thread.join()
    assert model.training
    model.load_state_dict(original)
    assert_all_sampled_by(model, requests, answers)
