"""TorchRL's ``GRPOLoss(masking_strategy="rlhf")`` takes our rows and gives our loss and gradient.

What it needs: ``("tokens", "full")`` and ``("masks", "all_attention_mask")`` for the wrapper's forward
pass, ``("masks", "all_assistant_mask")`` for the distribution's mask, ``"advantage"`` ``[N, S, 1]``, and
the old log-probabilities ``[N, S]`` under the key given to ``set_keys(sample_log_prob=...)``.
"""

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from tests.objectives.helpers import MASK
from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss


@pytest.fixture
def wrapper(model, tokenizer):
    options = {"input_mode": "tokens", "generate": False, "pad_output": True}
    return TransformersWrapper(model, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip_epsilon", [0.2, (0.1, 0.3)])
def test_ppo_with_token_mean_is_grpo_loss(model, wrapper, rows, seed, clip_epsilon):
    batch = ExperienceMaker(model, old_log_probs="actor")(rows(seed))
    g = torch.Generator().manual_seed(seed)
    mask = batch["masks", "all_assistant_mask"]
    noise = torch.where(mask, 0.3 * torch.randn(mask.shape, generator=g), 0.0)
    batch["log_probs", "old"] = batch["log_probs", "old"] + noise

    theirs = GRPOLoss(
        wrapper, masking_strategy="rlhf", clip_epsilon=clip_epsilon, entropy_bonus=False
    )
    theirs.set_keys(sample_log_prob=("log_probs", "old"))
    ours = MultiTurnLoss(wrapper, clip_epsilon=clip_epsilon)

    results = []
    for loss in (theirs, ours):
        model.zero_grad()
        out = loss(batch.clone())
        value = out["loss_objective"] if loss is ours else out.loss_objective
        value.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((value.detach().reshape(()), gradient))
    assert results[1][1].abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def test_the_rows_suffice_without_experience_but_for_the_advantage(model, wrapper, rows):
    batch = rows()
    mask = batch["masks", "all_assistant_mask"]
    batch["advantage"] = torch.where(mask, 1.0, 0.0).unsqueeze(-1)
    theirs = GRPOLoss(wrapper, masking_strategy="rlhf", entropy_bonus=False)
    ours = MultiTurnLoss(model)
    ours.set_keys(sample_log_prob=("log_probs", "full"))
    expected = theirs(batch.clone()).loss_objective.reshape(())
    torch.testing.assert_close(ours(batch)["loss_objective"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid", ("my", "keep")])
@pytest.mark.parametrize("shape", ["rows", "column", "tokens", "last"])
def test_loss_masks_leave_out_what_they_do_of_grpo_loss(model, wrapper, rows, key, shape):
    batch = ExperienceMaker(model, old_log_probs="actor")(rows())
    mask = batch[MASK]
    g = torch.Generator().manual_seed(0)
    batch["log_probs", "old"] += torch.where(mask, 0.3 * torch.randn(mask.shape, generator=g), 0.0)
    keep = torch.rand(mask.shape, generator=g) < 0.6
    if shape in ("rows", "column"):
        keep = (torch.arange(len(mask)) % 3 != 1)[:, None]
    batch[key] = {"rows": keep[:, 0], "last": keep[..., None]}.get(shape, keep)
    theirs = GRPOLoss(wrapper, masking_strategy="rlhf", entropy_bonus=False)
    theirs.set_keys(sample_log_prob=("log_probs", "old"))
    ours, values = MultiTurnLoss(model), set()
    for name in ("auto", key, None):
        theirs.loss_mask_key = ours.loss_mask_key = name
        expected = theirs(batch.clone()).loss_objective.reshape(())
        torch.testing.assert_close(ours(batch)["loss_objective"], expected, atol=1e-5, rtol=1e-5)
        is_read = name == key or (name == "auto" and key != ("my", "keep"))
        assert ours.total(batch) == (mask & keep if is_read else mask).sum()
        values.add(round(float(expected.detach()), 5))
    assert len(values) == 2
    assert ours.total(batch[:0]) == 0
