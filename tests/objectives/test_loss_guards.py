"""What would train something else than was meant is refused, read or said, and never ignored."""

import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torchrl.data import AdaptiveKLController

from tests.objectives.helpers import (
    MASK,
    Spoiled,
    TokenCritic,
    completed_rows,
    objective_of,
    value_model,
)
from tests.settings import grouped
from torchrl_mt.objectives import MultiTurnLoss, Passes, ValueModel
from torchrl_mt.objectives.functional import merge_totals
from torchrl_mt.objectives.functional.corrections import CORRECTIONS
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES


@pytest.fixture
def batch(model):
    return completed_rows(model, weighted=True)


FULL = {"objective": "decoupled_ppo", "kl_coef": 0.1, "clip_value": 0.2}


LOG_PROBS = [("log_probs", name) for name in ("old", "full", "ref")]


@pytest.mark.parametrize("key", [*LOG_PROBS, ("weights", "full"), "advantage", "values", "returns"])
def test_entries_that_carry_a_graph_are_refused_by_key(model, batch, key):
    loss = MultiTurnLoss(model, **grouped(critic=TokenCritic(), **FULL))
    loss(batch)
    batch[key] = batch[key].clone().requires_grad_() * 1
    with pytest.raises(ValueError) as error:
        loss(batch)
    assert repr(key) in str(error.value)
    assert "torch.no_grad()" in str(error.value)
    batch[key] = batch[key].detach()
    loss(batch)


def test_selecting_what_the_loss_reads_changes_nothing(model, batch):
    batch["valid"] = torch.arange(len(batch)) != 2
    batch["collector", "mask"] = torch.arange(len(batch)) != 4
    batch["something"] = torch.zeros(len(batch))
    loss = MultiTurnLoss(model, kl_coef=0.1)
    chosen = batch.select(*loss.in_keys, *loss.optional_in_keys, strict=False)
    assert "something" not in chosen
    torch.testing.assert_close(loss(chosen), loss(batch))
    assert torch.equal(loss.total(chosen), loss.total(batch))
    batch["sampling", "temperature"] = torch.full((len(batch),), 0.5)
    with pytest.raises(ValueError, match=r"'temperature'\) 0.5"):
        loss(batch.select(*loss.in_keys, *loss.optional_in_keys, strict=False))
    batch.rename_key_("valid", "kept")
    batch.rename_key_(("weights", "full"), "share")
    loss.set_keys(valid="kept", weight="share")
    loss.loss_mask_key = "mine"
    assert loss.optional_in_keys == ["share", "kept", ("sampling", "temperature"), "mine"]


def test_entries_that_may_be_there_are_read_where_they_were_moved(model, batch):
    batch["group"] = torch.arange(len(batch)) // 2
    batch["valid"] = torch.arange(len(batch)) != 2
    loss = MultiTurnLoss(model, aggregation="prompt_mean")
    expected, total = loss(batch), loss.total(batch)
    for key in ("valid", ("weights", "full")):
        assert loss(batch.exclude(key))["loss_objective"] != expected["loss_objective"]
    moves = {"weight": ("weights", "full"), "valid": "valid", "group": "group"}
    moves["advantage"] = "advantage"
    for name, key in moves.items():
        moved = batch.exclude(key)
        moved["moved", name] = batch[key]
        loss = MultiTurnLoss(model, aggregation="prompt_mean")
        loss.set_keys(**{name: ("moved", name)})
        torch.testing.assert_close(loss(moved), expected)
        assert torch.equal(loss.total(moved), total)


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "prompt_mean"])
def test_the_hosts_mask_is_anded_into_what_is_trained(model, batch, aggregation):
    """Whatever averages over rows, and the critic's loss; of the mean over tokens TorchRL tells."""
    loss = MultiTurnLoss(model, aggregation=aggregation, critic=TokenCritic())
    keep = torch.rand(batch[MASK].shape, generator=torch.Generator().manual_seed(0)) < 0.6
    batch["collector", "mask"], fewer = keep, batch.clone()
    fewer[MASK] &= keep
    torch.testing.assert_close(loss(batch), loss(fewer.exclude("collector")))
    assert torch.equal(loss.total(batch), loss.total(fewer.exclude("collector")))


def test_a_mask_of_the_host_that_does_not_fit_is_refused(model, batch):
    loss = MultiTurnLoss(model)
    for call in (loss, loss.total):
        batch["collector", "mask"] = torch.ones(len(batch), 3, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"\('collector', 'mask'\).*loss_mask_key"):
            call(batch)
        batch["collector", "mask"] = torch.ones(len(batch))
        with pytest.raises(TypeError, match="must be a bool tensor"):
            call(batch)


@pytest.mark.parametrize("correction", ["token_tis", "sequence_tis", "geometric", None])
def test_a_correction_of_the_samplers_own_log_probs_is_warned_of_once(
    model, batch, correction, caplog
):
    objective = "ppo" if correction else "decoupled_ppo"
    loss = MultiTurnLoss(model, objective=objective, correction=correction)
    different = batch.clone()
    batch["log_probs", "old"] = batch["log_probs", "full"].clone()
    batch["log_probs", "old"][~batch[MASK]] = 7.0
    nothing = batch.clone()
    nothing[MASK].zero_()
    MultiTurnLoss(model, objective=objective, correction=correction)(different)
    for harmless in (nothing, batch[:0]):
        loss(harmless)
    assert not caplog.records
    for _ in range(2):
        loss(batch)
    (record,) = caplog.records
    assert "old_log_probs='actor'" in record.getMessage()
    assert record.name == "torchrl_mt"


def test_a_shard_of_tokens_that_are_certain_is_not_warned_of(model, batch, caplog):
    for key in ("old", "full"):
        batch["log_probs", key].zero_()
    MultiTurnLoss(model, correction="token_tis")(batch)
    assert not caplog.records


def test_totals_that_mean_nothing_are_refused(model, batch):
    for total in ("12", True, [12]):
        with pytest.raises(TypeError, match=r"total must be .*loss\.total\(rows\)"):
            MultiTurnLoss(model)(batch, total=total)


def test_diagnostics_of_shards_average_by_their_trained_tokens(model, batch):
    loss = MultiTurnLoss(model, kl_coef=0.1)
    batch["valid"] = torch.arange(len(batch)) != 3
    whole = loss(batch)
    mask = batch[MASK] & batch["valid"][:, None]
    assert float(whole["trained_tokens"]) == int(mask.sum())
    total = loss.total(batch)
    shards = [loss(shard, total=total) for shard in batch.split(2)]
    count = torch.stack([shard["trained_tokens"] for shard in shards])
    assert len(count.unique()) > 1
    for key in ("clip_fraction", "approx_kl", "entropy", "kl_to_ref"):
        mean = (torch.stack([shard[key] for shard in shards]) * count).sum() / count.sum()
        torch.testing.assert_close(mean, whole[key])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_shard_reaches_every_parameter(model, other_model, batch, packed, objective):
    critic = ValueModel.from_model(other_model)
    options = {"objective": objective, "aggregation": "prompt_mean", "packed": packed}
    loss = MultiTurnLoss(model, **grouped(critic=critic, kl_coef=0.1, entropy_coef=0.1, **options))
    rows = batch[torch.zeros(len(batch), dtype=torch.bool)]
    total = merge_totals(loss.total(rows), loss.total(batch))
    out = loss(rows, total=total)
    assert float(out["trained_tokens"]) == 0
    objective_of(out).backward()
    parameters = [*model.parameters(), *critic.parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


def test_the_largest_share_of_clipped_weights_is_reported(model, batch):
    mask = batch[MASK]
    drift = torch.where(torch.arange(mask.shape[1]) % 2 == 0, 1.0, 0.0)
    batch["log_probs", "full"] = batch["log_probs", "old"] - torch.where(mask, drift, 0.0)
    tight, loose = (partial(CORRECTIONS["token_tis"], cap=cap) for cap in (2.0, 100.0))
    share = float((drift.expand_as(mask)[mask] > 0).float().mean())
    assert 0 < share < 1
    for corrections in ([tight, loose], [loose, tight]):
        out = MultiTurnLoss(model, correction=corrections)(batch)
        assert float(out["correction_clip_fraction"]) == pytest.approx(share)


def test_a_norm_divides_every_term(model, batch):
    options = {"kl_coef": 0.1, "entropy_coef": 0.1, "critic": TokenCritic()}
    options["aggregation"] = "seq_mean_token_sum"
    plain = MultiTurnLoss(model, **options)(batch)
    loss = MultiTurnLoss(model, **options)
    loss.aggregation_norm = 8
    divided = loss(batch)
    terms = [key for key in plain.keys() if key.startswith("loss_")]  # noqa: SIM118
    assert len(terms) == 4
    for key in terms:
        assert plain[key] != 0
        torch.testing.assert_close(divided[key], plain[key] / 8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_critic_is_run_as_the_actor_is(model, batch, packed, dtype):
    critic, seen = value_model(model), []
    critic.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append("position_ids" in kwargs), with_kwargs=True
    )
    product = critic.backbone.layers[0].mlp.down_proj
    product.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    MultiTurnLoss(model, critic=critic, passes=Passes(packed=packed, dtype=dtype))(batch)
    assert seen[-2] == packed
    assert seen[-1] == (dtype or torch.float32)


def test_the_pages_example_leads_the_kl_to_its_target(model, batch):
    page = (Path(__file__).parents[2] / "docs" / "learning.rst").read_text()
    start = page.index("   controller = AdaptiveKLController(init_kl_coef=0.05")
    example = textwrap.dedent(page[start : page.index("``update`` takes", start)])
    total = MultiTurnLoss(model).total(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = {"MultiTurnLoss": MultiTurnLoss, "model": model, "rows": batch, "total": total}
    names |= {"AdaptiveKLController": AdaptiveKLController, "optimizer": optimizer}
    for share in (0.95, 1.05):
        kl = float(MultiTurnLoss(model, kl_coef=0.1)(batch)["kl_to_ref"])
        told = example.replace("target=0.1", f"target={kl / share}").replace("16", "2")
        exec(told, names)
        # One step of a horizon of 10, by the relative error of the KL.
        expected = 0.05 * (1 + (share - 1) / 10)
        assert float(names["controller"].coef) == pytest.approx(expected, rel=1e-5)


def at(row, token):
    """The place of one token, of rows of any tokens."""
    place = torch.tensor(row), torch.tensor(token)
    return lambda ids: torch.zeros_like(ids).index_put(place, torch.tensor(1)).bool()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_actor_that_gives_no_number_is_named(model, batch, objective, bad):
    mask = batch[MASK]
    row, token = (mask & (torch.arange(12) > 1)).nonzero()[3].tolist()
    # Logits lie one place before the token that they predict.
    loss = MultiTurnLoss(Spoiled(model, at(row, token - 1), bad), objective=objective)
    where = rf"must be finite .*\(row {row}, token {token}\) and 0 more: the model"
    with pytest.raises(ValueError, match=f"log-probabilities {where}"):
        loss(batch)
    batch["valid"] = torch.arange(len(batch)) != row
    assert all(value.isfinite() for value in loss(batch).values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_critic_that_gives_no_number_is_named(model, batch, bad):
    row, token = batch[MASK].nonzero()[3].tolist()
    loss = MultiTurnLoss(model, critic=Spoiled(TokenCritic(), at(row, token - 1), bad))
    with pytest.raises(ValueError, match=rf"the critic's values must be .*token {token}\)"):
        loss(batch)


@pytest.mark.parametrize(
    ("training", "p", "checkpointing", "said"),
    [
        (True, 0.1, False, "drops out"),
        (False, 0.1, False, None),
        (True, 0.0, True, None),
        (False, 0.0, True, "saves no memory"),
    ],
)
def test_a_mode_that_spoils_training_is_warned_of_once(
    model, batch, caplog, training, p, checkpointing, said
):
    model.config.attention_dropout = p
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(training)
    loss_module = MultiTurnLoss(model)
    with torch.no_grad():
        loss_module(batch)
    assert not caplog.records
    for _ in range(2):
        loss_module(batch)
    assert [said in record.getMessage() for record in caplog.records] == [True] * (said is not None)
