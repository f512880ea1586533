"""The loss is a function of the sampled tokens alone, exact over shards, and trains the actor."""

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives import LossModule

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, row_log_probs
from torchrl_mt.objectives.functional import aggregate, kl_estimate, ppo

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
OBJECTIVES = ["ppo", "reinforce"]


@pytest.fixture
def experience(model, other_model, rows):
    def make(seed=0, **options):
        batch = ExperienceMaker(model, ref=other_model)(rows(seed, **options))
        g = torch.Generator().manual_seed(seed)
        noise = 0.3 * torch.randn(batch["log_probs", "old"].shape, generator=g)
        mask = batch["masks", "all_assistant_mask"]
        masks = batch["masks"]
        with torch.no_grad():
            log_prob = row_log_probs(
                model, batch["tokens", "full"], masks["all_attention_mask"], mask
            )
        batch["log_probs", "old"] = torch.where(mask, log_prob[0] + noise, 0.0)
        batch["advantage"] = torch.where(mask, torch.randn(mask.shape, generator=g), 0.0)[..., None]
        return batch

    return make


def objective_of(out):
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_it_is_the_sum_of_its_parts(model, experience, aggregation):
    batch = experience()
    out = MultiTurnLoss(
        model, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01, clip_epsilon=(0.1, 0.3)
    )(batch)
    masks = batch["masks"]
    mask = masks["all_assistant_mask"]
    log_prob, entropy = row_log_probs(
        model, batch["tokens", "full"], masks["all_attention_mask"], mask, with_entropy=True
    )
    old, advantage = batch["log_probs", "old"], batch["advantage"].squeeze(-1)
    per_token, clipped = ppo(log_prob, old, advantage, mask, (0.1, 0.3))
    kl = kl_estimate(log_prob, batch["log_probs", "ref"], "k3")
    expected = {
        "loss_objective": aggregate(per_token, mask, aggregation),
        "loss_kl": 0.1 * aggregate(kl, mask, aggregation),
        "loss_entropy": -0.01 * aggregate(entropy, mask, aggregation),
        "clip_fraction": (clipped != 0)[mask].float().mean(),
        "clip_fraction_low": (clipped < 0)[mask].float().mean(),
        "clip_fraction_high": (clipped > 0)[mask].float().mean(),
        "approx_kl": kl_estimate(old, log_prob, "k3")[mask].mean(),
        "kl_to_ref": kl[mask].mean(),
        "entropy": entropy[mask].mean(),
    }
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, msg=key)
    weight = (log_prob - old)[mask].exp()
    ess = weight.sum() ** 2 / (weight**2).sum() / mask.sum()
    torch.testing.assert_close(out["ess"], ess)
    for key, value in out.items():
        assert value.requires_grad == key.startswith("loss_")
        assert value.shape == ()


def test_host_protocol(model):
    loss = MultiTurnLoss(model, kl_coef=0.1)
    assert isinstance(loss, LossModule)
    assert ("log_probs", "ref") in loss.in_keys
    assert "loss_kl" in loss.out_keys
    loss.set_keys(sample_log_prob=("log_probs", "full"))
    assert ("log_probs", "full") in loss.in_keys
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(reward="r")


def test_out_keys_are_what_comes_out(model, experience):
    for options in ({}, {"kl_coef": 0.1}, {"entropy_coef": 0.1, "kl_coef": 0.0}):
        loss = MultiTurnLoss(model, **options)
        assert set(loss(experience()).keys()) == set(loss.out_keys)


def test_set_keys_changes_what_is_read(model, experience):
    batch = experience()
    expected = MultiTurnLoss(model)(batch)["loss_objective"]
    batch.rename_key_("advantage", "credit")
    loss = MultiTurnLoss(model)
    loss.set_keys(advantage="credit")
    torch.testing.assert_close(loss(batch)["loss_objective"], expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_are_the_actors_own(model, experience, tokenizer, wrapped):
    actor = model
    if wrapped:
        actor = TransformersWrapper(
            model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
        )
    loss = MultiTurnLoss(actor)
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    batch = experience()
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-2)
    before = float(loss(batch)["loss_objective"].detach())
    for _ in range(3):
        optimizer.zero_grad()
        loss(batch)["loss_objective"].backward()
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert float(loss(batch)["loss_objective"].detach()) < before


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("size", [1, 4])
def test_shards_accumulate_to_the_full_batch(model, experience, aggregation, objective, size):
    batch = experience(n=7)
    loss = MultiTurnLoss(
        model, objective=objective, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01
    )
    whole = objective_of(loss(batch))
    expected = gradients(model, whole)
    total = loss.total(batch)
    shards = sum(objective_of(loss(shard, total=total)) for shard in batch.split(size))
    torch.testing.assert_close(shards, whole, atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(model, shards), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_and_order_change_nothing(model, experience, spread, aggregation, objective):
    batch = experience()
    loss = MultiTurnLoss(
        model, objective=objective, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01
    )
    expected = loss(batch)
    slopes = gradients(model, objective_of(expected))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    for other in (spread(batch), batch[order]):
        got = loss(other)
        torch.testing.assert_close(got.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
        assert_same_gradients(gradients(model, objective_of(got)), slopes, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_lies_on_masked_tokens_is_not_read(model, experience, objective):
    batch = experience()
    loss = MultiTurnLoss(model, objective=objective, kl_coef=0.1)
    expected = loss(batch)
    slopes = gradients(model, objective_of(expected))
    mask = batch["masks", "all_assistant_mask"]
    for key in (("log_probs", "old"), ("log_probs", "ref")):
        batch[key] = torch.where(mask, batch[key], torch.nan)
    batch["advantage"] = torch.where(mask[..., None], batch["advantage"], torch.nan)
    got = loss(batch)
    torch.testing.assert_close(got.detach(), expected.detach())
    assert_same_gradients(gradients(model, objective_of(got)), slopes)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_sampled_trains_nothing(model, experience, aggregation, objective):
    batch = experience()
    batch["masks", "all_assistant_mask"].zero_()
    loss = MultiTurnLoss(
        model, objective=objective, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.1
    )
    out = loss(batch)
    assert all(value.isfinite() for value in out.values())
    assert not any(g.any() for g in gradients(model, objective_of(out)).values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_token_that_nothing_predicts_is_not_trained(model, experience, spread, aggregation):
    batch = experience()
    loss = MultiTurnLoss(model, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    expected, total = loss(batch), loss.total(batch)
    slopes = gradients(model, objective_of(expected))
    batch["masks", "all_assistant_mask"][:, 0] = True
    for key in (("log_probs", "old"), ("log_probs", "ref"), "advantage"):
        batch[key][:, 0] = -5.0
    for rows in (batch, spread(batch)):
        got = loss(rows)
        torch.testing.assert_close(got.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
        assert_same_gradients(gradients(model, objective_of(got)), slopes, atol=1e-5, rtol=1e-4)
        assert loss.total(rows) == total


def test_entropy_bonus_raises_the_entropy(model, experience):
    batch = experience()
    batch["advantage"].zero_()
    loss = MultiTurnLoss(model, entropy_coef=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = loss(batch)["entropy"]
    objective_of(loss(batch)).backward()
    optimizer.step()
    assert loss(batch)["entropy"] > before


def test_an_objective_may_be_a_function(model, experience):
    def squared(log_prob, old_log_prob, advantage, mask, clip_epsilon):
        return torch.where(mask, log_prob.square(), 0.0), torch.zeros_like(mask)

    assert MultiTurnLoss(model, objective=squared)(experience())["loss_objective"] > 0


def test_bad_input_is_refused_by_name(model, experience):
    for options, message in [
        ({"objective": "trpo"}, "objective must be one of"),
        ({"aggregation": "median"}, "aggregation must be one of"),
        ({"clip_epsilon": 1.5}, "clip_epsilon must be"),
        ({"clip_epsilon": (0.1, -0.1)}, "clip_epsilon must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            MultiTurnLoss(model, **options)
    with pytest.raises(KeyError, match="ExperienceMaker writes it"):
        MultiTurnLoss(model)(experience().exclude(("log_probs", "old")))
    batch = experience()
    batch["advantage"] = batch["advantage"].squeeze(-1)
    with pytest.raises(ValueError, match="advantage must have shape"):
        MultiTurnLoss(model)(batch)


def test_on_policy_at_the_sampling_temperature_no_ratio_moves(model, rows):
    batch = rows()
    maker = ExperienceMaker(model, old_log_probs="actor", temperature=0.6)
    out = MultiTurnLoss(model, temperature=0.6)(maker(batch))
    assert float(out["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(MultiTurnLoss(model)(batch)["approx_kl"]) > 1e-4


def test_a_temperature_that_is_not_positive_is_refused(model):
    for make in (ExperienceMaker, MultiTurnLoss):
        with pytest.raises(ValueError, match="temperature must be positive, got 0"):
            make(model, temperature=0)
