"""The loss is a function of the sampled tokens alone, exact over shards, and trains the actor."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import AdaptiveKLController, ConstantKLController
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives import LossModule
from torchrl.trainers import DefaultOptimizationStepper, OptimizerHook

from tests.objectives.helpers import (
    MASK,
    TokenCritic,
    completed_rows,
    gradients,
    log_probs,
    objective_of,
    value_model,
)
from tests.refusals import check_refused
from tests.scoring.helpers import entries
from tests.settings import OF_SINGLE_ROWS
from tests.tiers import pairs, slow, some_fast
from torchrl_mt.objectives import (
    EntropyController,
    ExperienceMaker,
    MultiTurnLoss,
    Passes,
    ValueLoss,
    row_log_probs,
)
from torchrl_mt.objectives.functional import aggregate, geometric, kl_estimate, ppo, token_tis
from torchrl_mt.objectives.functional.aggregation import Aggregation
from torchrl_mt.objectives.functional.corrections import CORRECTIONS
from torchrl_mt.objectives.functional.policy.objectives import OBJECTIVES, clip_bounds, takes

AGGREGATIONS = get_args(Aggregation)
TOKENS = ("tokens", "full")


@pytest.fixture
def experience(model):
    return partial(completed_rows, model)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_it_is_the_sum_of_its_parts(model, experience, aggregation):
    batch = experience()
    options = {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_epsilon": (0.1, 0.3)}
    out = MultiTurnLoss(model, aggregation=aggregation, **options)(batch)
    mask = batch[MASK]
    log_prob, entropy = row_log_probs(model, *entries(batch), passes=Passes(with_entropy=True))
    old, advantage = batch["log_probs", "old"], batch["advantage"].squeeze(-1)
    per_token, clipped = ppo(log_prob, old, advantage, mask, (0.1, 0.3))
    kl = kl_estimate(log_prob, batch["log_probs", "ref"], "k3")
    weight = (log_prob - old)[mask].exp()

    def mean(per_token):
        return aggregate(per_token, mask, aggregation, group=batch["group"])

    expected = {
        "loss_objective": mean(per_token),
        "loss_kl": 0.1 * mean(kl),
        "loss_entropy": -0.01 * mean(entropy),
        "clip_fraction": (clipped != 0)[mask].float().mean(),
        "clip_fraction_low": (clipped < 0)[mask].float().mean(),
        "clip_fraction_high": (clipped > 0)[mask].float().mean(),
        "approx_kl": kl_estimate(old, log_prob, "k3")[mask].mean(),
        "kl_to_ref": kl[mask].mean(),
        "entropy": entropy[mask].mean(),
        "ess": weight.sum() ** 2 / (weight**2).sum() / mask.sum(),
    }
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, msg=key)
    for key, value in out.items():
        assert value.requires_grad == key.startswith("loss_")
        assert value.shape == ()


def test_host_protocol(model):
    loss = MultiTurnLoss(model, kl_coef=0.1)
    assert isinstance(loss, LossModule)
    assert loss.in_keys == [
        ("tokens", "full"),
        ("masks", "all_attention_mask"),
        ("masks", "all_assistant_mask"),
        ("log_probs", "old"),
        "advantage",
        ("log_probs", "ref"),
    ]
    assert loss.optional_in_keys == [
        ("weights", "full"),
        "valid",
        ("sampling", "temperature"),
        ("collector", "mask"),
        "shifted_valid",
    ]
    assert "loss_kl" in loss.out_keys
    loss.set_keys(sample_log_prob=("log_probs", "full"))
    assert ("log_probs", "full") in loss.in_keys
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(reward="r")


@pytest.mark.parametrize("kl_coef", [0, 0.0, ConstantKLController(kl_coef=0.0)])
def test_a_kl_that_counts_for_nothing_needs_no_reference(model, experience, kl_coef):
    loss, plain = MultiTurnLoss(model, kl_coef=kl_coef), MultiTurnLoss(model)
    assert ("log_probs", "ref") not in loss.in_keys
    assert ("log_probs", "ref") in loss.optional_in_keys
    batch = experience()
    out, expected = loss(batch), MultiTurnLoss(model, kl_coef=0.3)(batch)
    assert set(out.keys()) == set(loss.out_keys)
    torch.testing.assert_close(out["kl_to_ref"], expected["kl_to_ref"])
    batch = batch.exclude(("log_probs", "ref"))
    torch.testing.assert_close(loss(batch), plain(batch), rtol=0, atol=0)
    loss.kl_coef = 0.1
    with pytest.raises(KeyError, match="'ref'"):
        loss(batch)


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


def regularised(model, objective, aggregation):
    """A loss with a term of each kind."""
    return MultiTurnLoss(
        model,
        objective=objective,
        aggregation=aggregation,
        correction=correction_for(objective, "sequence_tis"),
        critic=ValueLoss(TokenCritic(), clip_value=0.3),
        kl_coef=0.1,
        entropy_coef=0.01,
    )


@pytest.mark.parametrize(("objective", "aggregation"), pairs(OF_SINGLE_ROWS, AGGREGATIONS))
@pytest.mark.parametrize("size", some_fast([1], [1, 4]))
def test_shards_accumulate_to_the_full_batch(model, experience, aggregation, objective, size):
    batch, loss = experience(n=7, weighted=True), regularised(model, objective, aggregation)
    whole = objective_of(loss(batch))
    expected = gradients(loss, whole)
    total = loss.total(batch)
    shards = sum(objective_of(loss(shard, total=total)) for shard in batch.split(size))
    torch.testing.assert_close(shards, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(loss, shards), expected, atol=1e-5, rtol=1e-4)


def assert_same(loss, rows, expected, slopes):
    """The outputs and gradients of a loss are these."""
    got = loss(rows)
    torch.testing.assert_close(got.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
    got = gradients(loss, objective_of(got))
    torch.testing.assert_close(got, slopes, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("objective", "aggregation"), pairs(OF_SINGLE_ROWS, AGGREGATIONS))
def test_padding_and_order_change_nothing(model, experience, spread, aggregation, objective):
    batch, loss = experience(weighted=True), regularised(model, objective, aggregation)
    expected = loss(batch)
    slopes = gradients(loss, objective_of(expected))
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    for other in (spread(batch), batch[order]):
        assert_same(loss, other, expected, slopes)


@pytest.mark.parametrize("objective", [*OF_SINGLE_ROWS, "kl_cov"])
def test_what_lies_on_masked_tokens_is_not_read(model, experience, objective):
    batch = experience()
    loss = MultiTurnLoss(
        model, objective=objective, kl_coef=0.1, correction=correction_for(objective, "token_tis")
    )
    expected = loss(batch)
    slopes = gradients(model, objective_of(expected))
    mask = batch[MASK]
    for key in (("log_probs", "old"), ("log_probs", "full"), ("log_probs", "ref")):
        batch[key] = torch.where(mask, batch[key], torch.nan)
    batch["weights", "full"] = torch.where(mask, 1.0, torch.nan)
    batch["advantage"] = torch.where(mask[..., None], batch["advantage"], torch.nan)
    got = loss(batch)
    torch.testing.assert_close(got.detach(), expected.detach())
    torch.testing.assert_close(gradients(model, objective_of(got)), slopes)


@pytest.mark.parametrize(("objective", "aggregation"), pairs(OBJECTIVES, AGGREGATIONS))
@pytest.mark.parametrize("left", ["nothing sampled", "no row", slow("one token")])
def test_next_to_nothing_is_finite_and_nothing_trains_nothing(
    model, experience, aggregation, objective, left
):
    batch = experience()
    mask = batch[MASK]
    if left == "nothing sampled":
        mask.zero_()
    else:
        row = int(mask.any(-1).nonzero()[0])
        mask[row] &= mask[row].cumsum(-1) == 1
        batch = batch[row : row + (left == "one token")]
    options = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.1}
    correction = correction_for(objective, "geometric", "sequence_mis", "token_tis")
    out = MultiTurnLoss(model, objective=objective, correction=correction, **options)(batch)
    assert all(value.isfinite() for value in out.values())
    slopes = gradients(model, objective_of(out)).values()
    assert all(g.isfinite().all() for g in slopes)
    assert left == "one token" or not any(g.any() for g in slopes)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_token_that_nothing_predicts_is_not_trained(model, experience, spread, aggregation):
    batch = experience()
    loss = MultiTurnLoss(model, aggregation=aggregation, kl_coef=0.1, entropy_coef=0.01)
    expected, total = loss(batch), loss.total(batch)
    slopes = gradients(loss, objective_of(expected))
    batch[MASK][:, 0] = True
    for key in (("log_probs", "old"), ("log_probs", "ref"), "advantage"):
        batch[key][:, 0] = -5.0
    for rows in (batch, spread(batch)):
        assert_same(loss, rows, expected, slopes)
        assert torch.equal(loss.total(rows), total)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rejected_rows_are_left_out(model, experience, aggregation):
    batch = experience()
    kept = torch.arange(len(batch)) % 3 != 1
    options = {"aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    loss = MultiTurnLoss(model, **options)
    expected, total = loss(batch[kept]), loss.total(batch[kept])
    batch["valid"] = kept
    batch["advantage"][~kept] = torch.nan
    torch.testing.assert_close(loss(batch), expected)
    assert torch.equal(loss.total(batch), total)
    shards = sum(objective_of(loss(shard, total=total)) for shard in batch.split(2))
    torch.testing.assert_close(shards, objective_of(expected))


def test_packed_rows_have_the_same_loss_and_gradient(model, experience):
    batch = experience()
    options = {"kl_coef": 0.1, "entropy_coef": 0.01, "critic": value_model(model)}
    found = []
    for packed in (False, True):
        loss = MultiTurnLoss(model, passes=Passes(packed=packed), **options)
        out = loss(batch)
        found.append((out.detach(), gradients(loss, objective_of(out))))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_mixed_precision_trains_in_float32(model, experience):
    batch = experience()
    exact = MultiTurnLoss(model, entropy_coef=0.01)(batch)
    mixed = MultiTurnLoss(model, entropy_coef=0.01, passes=Passes(dtype=torch.bfloat16))(batch)
    assert all(value.dtype is torch.float32 for value in mixed.values())
    torch.testing.assert_close(mixed["entropy"], exact["entropy"], atol=0.1, rtol=0.1)
    assert not torch.equal(mixed["entropy"], exact["entropy"])
    grown = gradients(model, objective_of(mixed))
    assert all(g.dtype is torch.float32 and g.isfinite().all() for g in grown.values())


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (MASK, ("masks", "all_attention_mask")),
        ("group", ("masks", "all_attention_mask")),
        ("valid", ("masks", "all_attention_mask")),
        (("log_probs", "old"), None),
        (("log_probs", "ref"), None),
        ("advantage", None),
    ],
)
def test_what_does_not_fit_is_refused_by_both_keys_and_shapes(model, experience, key, other):
    batch = experience()
    batch["valid"] = torch.ones(len(batch), dtype=torch.bool)
    loss = MultiTurnLoss(model, aggregation="prompt_mean", kl_coef=0.1)
    right, wrong = batch[key], batch[key][..., :-1]
    batch = TensorDict(batch.to_dict(), batch_size=[]).set(key, wrong)
    text = f"{key!r} of rows must have shape {tuple(right.shape)}…got {tuple(wrong.shape)}"
    for call, fits in ((loss.total, other), (loss, other if key == "valid" else TOKENS)):
        if fits:
            check_refused(partial(call, batch), ValueError, text)
            check_refused(partial(call, batch), ValueError, repr(fits))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_keep_their_own_bounds(model, objective):
    default = inspect.signature(OBJECTIVES[objective]).parameters["clip_epsilon"].default
    assert MultiTurnLoss(model, objective=objective).clip_epsilon == default
    if default is not None:
        loss = MultiTurnLoss(model, objective=objective, clip_epsilon=0.1)
        assert loss.clip_epsilon == (0.1, 0.1)


def test_bounds_of_a_logarithm_may_be_above_one(model):
    loss = MultiTurnLoss(model, objective="gmpo", clip_epsilon=(1.5, 2.0))
    assert loss.clip_epsilon == (1.5, 2.0)


@pytest.mark.parametrize("clip_epsilon", [(0.1, 0.3), [0.1, 0.3]], ids=str)
def test_bounds_may_be_bound_and_are_used_once(model, experience, clip_epsilon):
    batch = experience()
    loss = MultiTurnLoss(model, objective=partial(ppo, clip_epsilon=clip_epsilon))
    assert loss.clip_epsilon == (0.1, 0.3)
    expected = MultiTurnLoss(model, clip_epsilon=(0.1, 0.3))(batch)
    torch.testing.assert_close(loss(batch), expected)


def test_a_controller_holds_the_entropy_at_its_target(model, experience):
    batch = experience()
    controller = EntropyController(0.2, init_coef=0.1, delta=0.04, max_coef=0.15)
    loss = MultiTurnLoss(model, entropy_coef=controller)
    coefficients = []
    for entropy in (0.1, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.1):
        out = loss(batch)
        expected = -controller.coef * out["entropy"]
        torch.testing.assert_close(out["loss_entropy"].detach(), expected)
        controller.update(entropy)
        coefficients.append(round(controller.coef, 6))
    assert coefficients == [0.14, 0.15, 0.11, 0, 0, 0, 0, 0.04]
    other = EntropyController(0.2)
    other.load_state_dict(controller.state_dict())
    assert other.coef == controller.coef


def test_a_kl_on_tokens_of_an_older_policy_is_weighed_by_the_ratio(model, experience):
    batch = experience()
    loss = MultiTurnLoss(model, objective="sft", kl_coef=0.1, kl_kind="k3_is")
    assert ("log_probs", "old") in loss.in_keys
    mask, new = batch[MASK], log_probs(model, batch)
    d, old = batch["log_probs", "ref"] - new, batch["log_probs", "old"]
    expected = 0.1 * ((new - old).exp() * (d.exp() - 1 - d))[mask].mean()
    torch.testing.assert_close(loss(batch)["loss_kl"].detach(), expected)


def correction_for(objective, *names):
    """These corrections, or those that go with an objective that weighs by itself or imitates."""
    return {"decoupled_ppo": ["geometric"], "sft": None}.get(objective, list(names))


WEIGHING = {"token_tis": token_tis, "geometric": partial(geometric, bounds=(0.8, 1.2))}


@pytest.mark.parametrize(
    ("objective", "corrections"),
    pairs(OBJECTIVES, [(), ("token_tis",), ("geometric", "token_tis")]),
)
@pytest.mark.parametrize("sequence", ["row", "turn"])
def test_the_objective_is_weighed_and_divided_by_all_tokens(
    model, experience, objective, sequence, corrections
):
    f = OBJECTIVES[objective]
    fitting = {"decoupled_ppo": ["geometric"], "sft": []}.get(objective, corrections)
    corrections = [WEIGHING[name] for name in corrections if name in fitting]
    options = {"objective": objective, "correction": corrections or None, "sequence": sequence}
    if sequence == "turn" and not any(takes(g, "turns") for g in (f, *corrections)):
        with pytest.raises(ValueError, match="sequence='turn' is for objectives and corrections"):
            MultiTurnLoss(model, **options)
        return
    batch, loss = experience(weighted=True), MultiTurnLoss(model, **options)
    mask, old, sampler = (batch[key] for key in (MASK, ("log_probs", "old"), ("log_probs", "full")))
    reads_sampler = bool(corrections) or objective == "decoupled_ppo"
    assert (("turns", "full") in loss.in_keys) == (sequence == "turn")
    assert (("log_probs", "full") in loss.in_keys) == reads_sampler
    out = loss(batch)

    def by_turn(function):
        is_by_turn = sequence == "turn" and takes(function, "turns")
        return {"turns": batch["turns", "full"]} if is_by_turn else {}

    extras = {"sampler_log_prob": sampler} if objective == "decoupled_ppo" else by_turn(f)
    given = log_probs(model, batch), old, batch["advantage"].squeeze(-1), mask
    per_token, _ = f(*given, clip_bounds(f), **extras)
    weight = batch["weights", "full"]
    for correction in corrections:
        weight = weight * correction(old, sampler, mask, **by_turn(correction))[0]
    expected = (per_token * weight)[mask].sum() / mask.sum()
    torch.testing.assert_close(out["loss_objective"].detach(), expected)
    if corrections:
        assert 0 < out["correction_ess"] <= 1


def test_without_a_need_the_samplers_log_probs_are_not_read(model, experience):
    batch = experience().exclude(("log_probs", "full"), ("turns", "full"), "group")
    assert MultiTurnLoss(model)(batch)["loss_objective"].isfinite()


# "clip_cov" draws at random, and compiled code draws otherwise.
@pytest.mark.parametrize(
    "name", some_fast(["cispo"], [name for name in OBJECTIVES if name != "clip_cov"])
)
def test_objectives_and_corrections_may_be_compiled(model, experience, name):
    batch = experience()
    correction = {"decoupled_ppo": "geometric", "sft": None}.get(name, "token_tis")
    expected = MultiTurnLoss(model, objective=name, correction=correction)(batch)
    compiled = MultiTurnLoss(
        model,
        objective=torch.compile(OBJECTIVES[name], backend="eager"),
        correction=correction and torch.compile(CORRECTIONS[correction], backend="eager"),
    )(batch)
    torch.testing.assert_close(compiled.to_dict(), expected.to_dict())


def test_the_kl_coefficient_may_be_a_controller_and_is_that_of_the_moment(model, experience):
    batch = experience()
    expected = MultiTurnLoss(model, kl_coef=0.3)(batch)["loss_kl"]
    adaptive = AdaptiveKLController(init_kl_coef=0.3, target=1.0, horizon=2)
    for controller in (ConstantKLController(kl_coef=0.3), adaptive):
        loss = MultiTurnLoss(model, kl_coef=controller)
        torch.testing.assert_close(loss(batch)["loss_kl"], expected)
        controller.coef = 0.6
        torch.testing.assert_close(loss(batch)["loss_kl"], 2 * expected)
    adaptive.update([-adaptive.coef * 100.0])
    assert adaptive.coef > 0.6
    torch.testing.assert_close(loss(batch)["loss_kl"], expected * float(adaptive.coef) / 0.3)
    owner = MultiTurnLoss(model, kl_coef=0.1)
    ConstantKLController(kl_coef=0.3, model=owner)
    torch.testing.assert_close(owner(batch)["loss_kl"], expected)


def test_neither_weights_nor_a_correction_changes_the_other_terms(model, experience):
    batch = experience()
    options = {"kl_coef": 0.1, "entropy_coef": 0.01}
    plain = MultiTurnLoss(model, **options)(batch)
    mask = batch[MASK]
    batch["weights", "full"] = torch.rand(mask.shape)
    weighed = MultiTurnLoss(model, correction="token_tis", **options)(batch)
    assert weighed["loss_objective"] != plain["loss_objective"]
    for key in ("loss_kl", "kl_to_ref", "loss_entropy", "entropy", "approx_kl", "ess"):
        torch.testing.assert_close(weighed[key], plain[key], atol=0, rtol=0)


def by_stepper(loss, optimizer, batch):
    clip = {"clip_grad_norm": True, "clip_norm": None}
    trainer = SimpleNamespace(compute_loss=loss, optimizer=optimizer, **clip)
    return DefaultOptimizationStepper().step(trainer, batch)


def by_hook(loss, optimizer, batch):
    with pytest.warns(FutureWarning, match="OptimizerHook"):
        hook = OptimizerHook(optimizer)
    return hook(loss(batch), clip_grad_norm=True, clip_norm=None, index=0)


@pytest.mark.parametrize("step", [by_stepper, by_hook])
def test_torchrl_optimizes_it(make_model, experience, step):
    batch = experience()
    losses = [MultiTurnLoss(make_model(), kl_coef=0.1, entropy_coef=0.01) for _ in range(2)]
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in losses]
    out = step(losses[0], optimizers[0], batch)
    objective_of(losses[1](batch)).backward()
    optimizers[1].step()
    assert any(key.startswith("grad_norm") for key in dict(out))
    torch.testing.assert_close(losses[0].state_dict(), losses[1].state_dict())


def test_on_policy_at_the_sampling_temperature_no_ratio_moves(model, rows):
    batch = rows()
    maker = ExperienceMaker(model, old_log_probs="actor", passes=Passes(temperature=0.6))
    out = MultiTurnLoss(model, passes=Passes(temperature=0.6))(maker(batch))
    assert float(out["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(MultiTurnLoss(model)(batch)["approx_kl"]) > 1e-4


def test_rows_sampled_at_another_temperature_are_refused(model, experience):
    batch, key = experience(), ("sampling", "temperature")
    loss = MultiTurnLoss(model, passes=Passes(temperature=0.7))
    expected = loss(batch)
    batch[key] = torch.full((len(batch),), 0.7)
    torch.testing.assert_close(loss(batch), expected)
    text = "0.7, but temperature is 1.0…Passes(temperature=0.7)"
    check_refused(partial(MultiTurnLoss(model), batch), ValueError, text)
    row = int(batch[MASK].any(-1).nonzero()[-1])
    for other, text in [
        (0.70001, "temperature=0.70001"),
        (0.0, "no policy samples at that temperature"),
        (torch.inf, "no policy samples at that temperature"),
        (torch.nan, "at different temperatures"),
    ]:
        batch[key][row] = other
        text = f"row {row} has {key} …, but … is 0.7…{text}"
        check_refused(partial(loss, batch), ValueError, text)
    batch["valid"] = torch.arange(len(batch)) != row
    assert loss(batch)["loss_objective"].isfinite()
    batch.rename_key_(key, ("sampling", "heat"))
    del batch["valid"]
    loss(batch)
    loss.set_keys(sampling_temperature=("sampling", "heat"))
    check_refused(partial(loss, batch), ValueError, "'heat'")
    batch["sampling", "heat"] = torch.full((len(batch), 2), 0.7)
    check_refused(partial(loss, batch), ValueError, "'heat'…must have shape")


def test_of_rows_that_train_nothing_the_temperature_does_not_matter(model, experience):
    batch = experience()
    batch[MASK][2] = False
    batch["sampling", "temperature"] = torch.ones(len(batch))
    batch["sampling", "temperature"][2] = torch.nan
    assert MultiTurnLoss(model)(batch)["loss_objective"].isfinite()
