"""The value loss inside the policy loss: its value, its gradient, its diagnostics, exact shards."""

import pytest
import torch
from torch import nn

from torchrl_mt.objectives import ExperienceMaker, MultiTurnLoss, ValueLoss
from torchrl_mt.objectives.functional import aggregate, value_loss
from torchrl_mt.scoring.values import row_values


class Critic(nn.Module):
    """One value per token, of the token alone."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(24, 1)

    def forward(self, input_ids, attention_mask):
        return self.embedding(input_ids)


@pytest.fixture
def batch(model, rows):
    batch = ExperienceMaker(model)(rows(n=7))
    mask = batch["masks", "all_assistant_mask"]
    g = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, *mask.shape, generator=g)
    batch["values"] = torch.where(mask, old, torch.nan)
    batch["returns"] = torch.where(mask, returns, torch.nan)
    return batch


def inputs(batch):
    masks = batch["masks"]
    return batch["tokens", "full"], masks["all_attention_mask"], masks["all_assistant_mask"]


@pytest.mark.parametrize("clip_value", [None, 0.3])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_it_is_the_value_loss(model, batch, clip_value, aggregation):
    critic = Critic()
    loss = MultiTurnLoss(
        model, aggregation=aggregation, critic=ValueLoss(critic, coef=0.5, clip_value=clip_value)
    )
    out = loss(batch)
    assert set(out.keys()) == set(loss.out_keys)
    assert "returns" in loss.in_keys
    assert ("values" in loss.in_keys) == (clip_value is not None)
    mask = inputs(batch)[2]
    value = row_values(critic, *inputs(batch))
    error, cut = value_loss(
        value, batch["returns"], mask, old_value=batch["values"], clip_value=clip_value
    )
    expected = 0.5 * aggregate(error, mask, aggregation, group=batch["group"])
    torch.testing.assert_close(out["loss_critic"], expected)
    torch.testing.assert_close(out["value_clip_fraction"], cut[mask].float().mean())
    left = (batch["returns"] - value)[mask].var(correction=0)
    explained = 1 - left / batch["returns"][mask].var(correction=0)
    torch.testing.assert_close(out["explained_variance"], explained.detach())
    got = torch.autograd.grad(out["loss_critic"], critic.embedding.weight)
    torch.testing.assert_close(got, torch.autograd.grad(expected, critic.embedding.weight))
    assert got[0].any()
    assert all(p.grad is None for p in model.parameters())


def test_shards_accumulate_to_the_full_batch(model, batch):
    critic = Critic()
    loss = MultiTurnLoss(model, aggregation="prompt_mean", critic=ValueLoss(critic, clip_value=0.3))
    weight, total = critic.embedding.weight, loss.total(batch)
    (expected,) = torch.autograd.grad(loss(batch)["loss_critic"], weight)
    shards = sum(loss(shard, total=total)["loss_critic"] for shard in batch.split(2))
    torch.testing.assert_close(torch.autograd.grad(shards, weight)[0], expected)


def test_both_models_are_the_losss(model, batch, make_model):
    loss = MultiTurnLoss(model, critic=Critic(0))
    own = {id(p) for m in (model, loss.critic_network) for p in m.parameters()}
    assert {id(p) for p in loss.parameters()} == own
    other = MultiTurnLoss(make_model(5), critic=Critic(1))
    other.load_state_dict(loss.state_dict())
    torch.testing.assert_close(other(batch), loss(batch))


@pytest.mark.parametrize("returns", [0.0, 0.1])
def test_returns_without_variance_explain_nothing(model, batch, returns):
    batch["returns"] = torch.full_like(batch["returns"], returns)
    out = MultiTurnLoss(model, critic=Critic())(batch)
    assert out["explained_variance"] == 0
    batch["masks", "all_assistant_mask"].zero_()
    out = MultiTurnLoss(model, critic=Critic())(batch)
    assert all(value.isfinite() for value in out.values())


def test_missing_entries_name_who_writes_them(model, batch):
    for key, message in [
        ("returns", "'returns'; ExperienceMaker writes it"),
        ("values", "'values'; ExperienceMaker writes it when it has a critic"),
    ]:
        with pytest.raises(KeyError, match=message):
            MultiTurnLoss(model, critic=ValueLoss(Critic(), clip_value=0.2))(batch.exclude(key))
