"""LoRA through PEFT: the adapter alone is trained, and the reference is the actor without it."""

import copy
import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules.llm import TransformersWrapper

from tests.adapters import lora, stirred
from tests.objectives.helpers import log_probs
from tests.scoring.vision_rows import rows_with_images, vl_model
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, ValueModel

exact = {"atol": 0.0, "rtol": 0.0}
close = {"atol": 1e-5, "rtol": 1e-5}


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: p.requires_grad for name, p in model.named_parameters()},
        [module.training for module in model.modules()],
    )


def assert_unchanged(model, before):
    state, trained, modes = state_of(model)
    assert trained == before[1]
    assert modes == before[2]
    assert all(torch.equal(value, before[0][name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, False),
        ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, True),
        ({"modules_to_save": ["lm_head"]}, False),
    ],
    ids=["layers", "dora_and_head", "whole_head"],
)
def test_the_reference_is_the_base_model(make_model, rows, options, packed):
    base, given = make_model(), rows()
    expected = log_probs(base, given, packed=packed)
    actor = lora(copy.deepcopy(base), **options).train()
    some = next(p for p in actor.parameters() if p.requires_grad).requires_grad_(False)
    before = state_of(actor)
    maker = ExperienceMaker(actor, ref="base", old_log_probs="actor", passes=Passes(packed=packed))
    out = maker(given)
    assert_unchanged(actor, before)
    assert not some.requires_grad
    assert torch.equal(out["log_probs", "ref"], expected)
    old = log_probs(actor.eval(), given, packed=packed)
    assert torch.equal(out["log_probs", "old"], old)
    assert out["kl"].abs().max() > 0.01
    merged = log_probs(copy.deepcopy(actor).merge_and_unload(), given, packed=packed)
    torch.testing.assert_close(old, merged, **close)


def test_wrappers_show_the_same_base(make_model, rows, tokenizer):
    base = make_model()
    expected = log_probs(base, rows())
    actor = lora(base)
    wrapper = TransformersWrapper(
        actor, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    for wrapped in (wrapper, torch.nn.DataParallel(actor)):
        out = ExperienceMaker(wrapped, ref="base")(rows())
        torch.testing.assert_close(out["log_probs", "ref"], expected, **exact)


def test_a_failure_switches_the_adapter_on_again(make_model, rows, monkeypatch):
    actor, given = lora(make_model()), rows()
    before, expected = state_of(actor), log_probs(actor, given)
    maker = ExperienceMaker(actor, ref="base")
    layer = actor.get_base_model().model.norm
    handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        maker(given.copy())
    handle.remove()
    assert_unchanged(actor, before)
    torch.testing.assert_close(log_probs(actor, given), expected, **exact)


def test_other_threads_never_score_without_the_adapter(make_model, rows):
    actor, given = lora(make_model()), rows()
    expected = log_probs(actor, given)
    maker, stop, wrong = ExperienceMaker(actor, ref="base"), threading.Event(), []

    def score():
        while not stop.is_set():
            if not torch.equal(log_probs(actor, given), expected):
                wrong.append(1)

    thread = threading.Thread(target=score)
    thread.start()
    try:
        for _ in range(10):
            maker(given.copy())
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_the_loss_trains_the_adapter_alone(make_model, rows):
    actor = lora(make_model())
    merged = copy.deepcopy(actor).merge_and_unload().requires_grad_(True)
    given = ExperienceMaker(actor, ref="base", advantage="batch")(rows())
    gradients = {}
    for model in (actor, merged):
        out = MultiTurnLoss(model, kl_coef=0.1)(given)
        (out["loss_objective"] + out["loss_kl"]).backward()
        gradients[model] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients[actor]
    assert all(".lora_" in name for name in gradients[actor])
    # The chain rule: dL/dB = scale * dL/dW @ A'.
    layer = actor.base_model.model.model.layers[0].self_attn.q_proj
    whole = gradients[merged]["model.layers.0.self_attn.q_proj.weight"]
    expected = layer.scaling["default"] * whole @ layer.lora_A["default"].weight.T
    torch.testing.assert_close(layer.lora_B["default"].weight.grad, expected, atol=1e-5, rtol=1e-4)


def test_a_critic_has_adapters_of_its_own(make_model, rows):
    actor = lora(make_model())
    critic = ValueModel.from_model(copy.deepcopy(actor))
    maker = ExperienceMaker(actor, ref="base", critic=critic, advantage="gae")
    loss = MultiTurnLoss(actor, critic=critic)(maker(rows()))
    (loss["loss_objective"] + loss["loss_critic"]).backward()
    trained = {name for name, p in critic.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in critic.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trained
    assert all(".lora_" in name or name.startswith("head.") for name in trained)


def test_an_actor_without_a_base_is_refused(make_model, rows, caplog):
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for actor, ref, message in [
        (make_model(), "base", r"ref='base' needs .* PEFT adapters .* got Qwen2ForCausal"),
        (lora(make_model()), "adapter", "ref must be one of 'base', got 'adapter'"),
        (lora(make_model(), bias="all"), "base", r"must be frozen, .*k_proj.bias.*bias='none'"),
        (peft.get_peft_model(make_model(), prompt), "base", "got PROMPT_TUNING, which changes"),
    ]:
        with pytest.raises(ValueError, match=message):
            ExperienceMaker(actor, ref=ref)
    actor = lora(make_model())
    maker = ExperienceMaker(actor, ref="base")
    actor.merge_adapter()
    with pytest.raises(ValueError, match="merged into the base model: call unmerge_adapter"):
        maker(rows())
    ExperienceMaker(actor, ref=actor.get_base_model())
    assert "ref='base'" in caplog.text


@pytest.mark.slow
def test_a_frozen_tower_stays_frozen():
    model, _ = vl_model("qwen2_5_vl")
    rows, _ = rows_with_images("qwen2_5_vl", (1, 0, 2), 0)
    base = copy.deepcopy(model)
    actor = stirred(lora(model, target_modules=["q_proj", "qkv"]))
    loss = MultiTurnLoss(actor, freeze_vision=True)
    before = state_of(actor)
    trained = [name for name, flag in before[1].items() if flag]
    assert trained
    assert not any(".visual." in name for name in trained)
    given = TensorDict(dict(rows.items()), rows.batch_size)
    out = ExperienceMaker(actor, ref="base", old_log_probs="actor", advantage="batch")(given)
    assert_unchanged(actor, before)
    expected = ExperienceMaker(actor, ref=base, old_log_probs="actor", advantage="batch")(rows)
    torch.testing.assert_close(out["log_probs", "ref"], expected["log_probs", "ref"], **exact)
    loss(out)["loss_objective"].backward()
    assert {n for n, p in actor.named_parameters() if p.grad is not None} == set(trained)
