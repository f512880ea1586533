"""The value loss inside the policy loss: its value, its gradient, its diagnostics."""

import pytest
import torch

from tests.objectives.helpers import MASK, TokenCritic, completed_rows
from tests.scoring.helpers import entries
from torchrl_mt.objectives import MultiTurnLoss, ValueLoss
from torchrl_mt.objectives.functional import aggregate, value_loss
from torchrl_mt.scoring.values import row_values


@pytest.fixture
def batch(model):
    batch = completed_rows(model, n=7)
    for key in ("values", "returns"):
        batch[key] = torch.where(batch[MASK], batch[key], torch.nan)
    return batch


@pytest.mark.parametrize("clip_value", [None, 0.3])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_it_is_the_value_loss(model, batch, clip_value, aggregation):
    critic = TokenCritic()
    loss = MultiTurnLoss(
        model, aggregation=aggregation, critic=ValueLoss(critic, coef=0.5, clip_value=clip_value)
    )
    out = loss(batch)
    assert set(out.keys()) == set(loss.out_keys)
    assert "returns" in loss.in_keys
    assert ("values" in loss.in_keys) == (clip_value is not None)
    mask, value = batch[MASK], row_values(critic, *entries(batch))
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


def test_both_models_are_the_losss(model, batch, make_model):
    loss = MultiTurnLoss(model, critic=TokenCritic(0))
    own = {id(p) for m in (model, loss.critic_network) for p in m.parameters()}
    assert {id(p) for p in loss.parameters()} == own
    other = MultiTurnLoss(make_model(5), critic=TokenCritic(1))
    assert other(batch)["loss_objective"] != loss(batch)["loss_objective"]
    other.load_state_dict(loss.state_dict())
    torch.testing.assert_close(other(batch), loss(batch))


@pytest.mark.parametrize("returns", [0.0, 0.1])
def test_returns_without_variance_explain_nothing(model, batch, returns):
    batch["returns"] = torch.full_like(batch["returns"], returns)
    out = MultiTurnLoss(model, critic=TokenCritic())(batch)
    assert out["explained_variance"] == 0
    batch[MASK].zero_()
    out = MultiTurnLoss(model, critic=TokenCritic())(batch)
    assert all(value.isfinite() for value in out.values())
