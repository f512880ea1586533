"""TorchRL's ``GRPOLoss(masking_strategy="rlhf")`` takes our rows and gives our loss and gradient.

What it needs: ``("tokens", "full")`` and ``("masks", "all_attention_mask")`` for the wrapper's forward
pass, ``("masks", "all_assistant_mask")`` for the distribution's mask, ``"advantage"`` ``[N, S, 1]``, and
the old log-probabilities ``[N, S]`` under the key given to ``set_keys(sample_log_prob=...)``.
"""

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from torchrl.objectives.llm.grpo import CISPOLoss

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, Passes, row_log_probs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip_epsilon", [0.2, (0.1, 0.3)])
def test_ppo_with_token_mean_is_grpo_loss(model, tokenizer, rows, seed, clip_epsilon):
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
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


def test_the_rows_suffice_without_experience_but_for_the_advantage(model, tokenizer, rows):
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    batch = rows()
    mask = batch["masks", "all_assistant_mask"]
    batch["advantage"] = torch.where(mask, 1.0, 0.0).unsqueeze(-1)
    theirs = GRPOLoss(wrapper, masking_strategy="rlhf", entropy_bonus=False)
    ours = MultiTurnLoss(model)
    ours.set_keys(sample_log_prob=("log_probs", "full"))
    expected = theirs(batch.clone()).loss_objective.reshape(())
    torch.testing.assert_close(ours(batch)["loss_objective"], expected, atol=1e-5, rtol=1e-5)


def test_log_probs_agree_where_it_matters(model, tokenizer, rows):
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    batch = rows()
    masks = batch["masks"]
    mask = masks["all_assistant_mask"]
    dist = wrapper._get_rlhf_dist(batch.clone())
    log_prob, entropy = row_log_probs(
        model,
        batch["tokens", "full"],
        masks["all_attention_mask"],
        mask,
        passes=Passes(with_entropy=True),
    )
    torch.testing.assert_close(dist.log_prob(batch["tokens", "full"])[mask], log_prob[mask])
    torch.testing.assert_close(dist.entropy()[mask], entropy[mask], atol=1e-5, rtol=1e-5)


def test_cispo_trains_clipped_tokens_and_torchrls_does_not(model, tokenizer, rows):
    """All ratios above the bounds: ours is the gradient of -1.2 A log π, theirs is 0."""
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    batch = ExperienceMaker(model, old_log_probs="actor")(rows())
    masks = batch["masks"]
    mask = masks["all_assistant_mask"]
    batch["log_probs", "old"] = batch["log_probs", "old"] - torch.where(mask, 5.0, 0.0)
    batch["advantage"] = torch.where(mask, 1.0, 0.0).unsqueeze(-1)

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    theirs = CISPOLoss(
        wrapper, masking_strategy="rlhf", clip_epsilon=(0.2, 0.2), entropy_bonus=False
    )
    theirs.set_keys(sample_log_prob=("log_probs", "old"))
    assert not gradient(theirs(batch.clone()).loss_objective.sum()).any()
    out = MultiTurnLoss(model, objective="cispo", clip_epsilon=0.2)(batch)
    assert out["clip_fraction_high"] == 1
    tokens, attention_mask = batch["tokens", "full"], masks["all_attention_mask"]
    log_prob, _ = row_log_probs(model, tokens, attention_mask, mask)
    expected = gradient(-1.2 * log_prob[mask].mean())
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(out["loss_objective"]), expected)


@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid", ("my", "keep")])
@pytest.mark.parametrize("shape", ["rows", "tokens", "last"])
def test_loss_masks_leave_out_what_they_do_of_grpo_loss(model, tokenizer, rows, key, shape):
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    batch = ExperienceMaker(model, old_log_probs="actor")(rows())
    mask = batch["masks", "all_assistant_mask"]
    g = torch.Generator().manual_seed(0)
    batch["log_probs", "old"] += torch.where(mask, 0.3 * torch.randn(mask.shape, generator=g), 0.0)
    keep = torch.rand(mask.shape, generator=g) < 0.6
    keep = {"rows": torch.arange(len(mask)) % 3 != 1, "tokens": keep, "last": keep[..., None]}
    batch[key] = keep[shape]
    theirs = GRPOLoss(wrapper, masking_strategy="rlhf", entropy_bonus=False)
    theirs.set_keys(sample_log_prob=("log_probs", "old"))
    ours = MultiTurnLoss(model)
    values = []
    for name in ("auto", key, None):
        theirs.loss_mask_key = ours.loss_mask_key = name
        expected = theirs(batch.clone()).loss_objective.reshape(())
        torch.testing.assert_close(ours(batch)["loss_objective"], expected, atol=1e-5, rtol=1e-5)
        values.append(round(float(expected.detach()), 5))
    assert len(set(values)) == 2
