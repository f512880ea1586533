"""Models that are moved, converted, hooked or offloaded, before and after engines are made of them."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper

from torchrl_mt.engines import PolicyEngine, TransformersEngine

from .helpers import (
    assert_all_sampled_by,
    assert_sampled_by,
    changed_copy,
    endless,
    generate_all,
    held,
    idle,
    prompts,
    sampled,
    until,
)


def double(model):
    model.to(torch.float64)


def replaced(model):
    """As ``to`` does where a device's tensors cannot take each other's place."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def half(model):
    model.to(torch.bfloat16)


@pytest.mark.parametrize("move", [double, replaced, half])
def test_the_engine_follows_a_model_that_is_converted(engine, model, move):
    generate_all(engine, prompts(3))
    move(model)
    tolerance = 0.1 if move is half else 1e-5
    for weights in (model, changed_copy(model)):
        model.load_state_dict(weights.state_dict())
        engine.update_weights()
        answers = generate_all(engine, prompts(3))
        assert_all_sampled_by(model, prompts(3), answers, tolerance)


async def test_requests_that_run_when_the_model_is_converted_go_on(model, tokenizer):
    engine = endless(model, tokenizer, max_new_tokens=64)
    answers = [asyncio.ensure_future(engine.generate(prompt)) for prompt in prompts(4)]
    await until(lambda: engine.stats()["generated_tokens"] > 20)
    with held(engine):
        assert engine.stats()["running"]
        double(model)
    results = await asyncio.gather(*answers)
    for prompt, answer in zip(prompts(4), results, strict=True):
        assert len(answer.token_ids) == 64
        assert_sampled_by(model, prompt, answer)


def test_a_model_that_is_converted_within_a_step_fails_its_requests_by_name(model, tokenizer):
    moves = []

    def hook(*_):
        for move in moves:
            move(model)

    model.model.layers[0].register_forward_hook(hook)
    engine = TransformersEngine(model, tokenizer, max_new_tokens=8)
    moves.append(double)
    with pytest.raises(RuntimeError, match="moved or converted while tokens were sampled"):
        generate_all(engine, prompts(2))
    moves.clear()
    asyncio.run(until(lambda: idle(engine)))
    sampled(engine, model, prompts(2))


class Monitor:
    """A hook that cannot be copied."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, *_):
        with self.lock:
            self.calls += 1


def policy_engine(model, tokenizer):
    return PolicyEngine(TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens"))


def own_weights(model, tokenizer):
    return TransformersEngine(model, tokenizer, share_weights=False)


@pytest.mark.parametrize("make", [TransformersEngine, own_weights, policy_engine])
def test_hooks_are_called_and_not_copied(model, tokenizer, make):
    monitor = Monitor()
    model.model.layers[0].register_forward_hook(monitor)
    model.lm_head.register_forward_pre_hook(monitor.__call__)
    engine = make(model, tokenizer)
    made = monitor.calls
    generate_all(engine, prompts(1), max_new_tokens=4)
    called = monitor.calls - made
    assert called > 0
    with torch.no_grad():  # the model's own calls are counted as before
        model(torch.tensor(prompts(1)))
    assert monitor.calls == made + called + 2


def offloaded(model, folder):
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_to_disk(model, folder):
    from accelerate import disk_offload

    disk_offload(model, folder, execution_device=torch.device("cpu"))
    return model


def mapped(model, folder):
    from accelerate import dispatch_model

    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


def hooked(model, folder):
    from accelerate.hooks import ModelHook, add_hook_to_module

    hook = ModelHook()
    hook.lock = threading.Lock()
    return add_hook_to_module(model, hook)


@pytest.mark.parametrize("change", [offloaded, offloaded_to_disk, mapped, hooked])
def test_models_with_hooks_of_accelerate_are_sampled_from(model, tokenizer, tmp_path, change):
    pytest.importorskip("accelerate")
    plain = TransformersEngine(model, tokenizer, seed=3)
    expected = generate_all(plain, prompts(3), max_new_tokens=6)
    source = changed_copy(model)
    engine = TransformersEngine(change(model, tmp_path), tokenizer, seed=3)
    found = generate_all(engine, prompts(3), max_new_tokens=6)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert engine.update_weights() == engine.update_weights(model) - 1 == 1
    if change in (offloaded, offloaded_to_disk):
        with pytest.raises(ValueError, match=r"source cannot be loaded into .* offloaded"):
            engine.update_weights(source)
        with pytest.raises(ValueError, match=r"share_weights must be True .* offloaded"):
            own_weights(model, tokenizer)
        assert engine.version == 2
