"""Experience: scores, KL, returns and advantages by episode, group and turn, never by position."""

import copy

import pytest
import torch
from tensordict import NonTensorStack
from torch import nn
from torchrl.data import AdaptiveKLController, ConstantKLController
from torchrl.modules.llm import TransformersWrapper

from tests.objectives.helpers import (
    MASK,
    TokenCritic,
    first_sampled,
    log_probs,
    refused,
    rejecting,
    reward_model,
)
from tests.settings import grouped
from torchrl_mt.objectives import (
    Advantage,
    ExperienceMaker,
    MultiTurnLoss,
    Passes,
    RewardMix,
)
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS
from torchrl_mt.objectives.functional import RewardNormalizer, clip_reward, kl_estimate
from torchrl_mt.objectives.kl import update_kl_coefficient
from torchrl_mt.scoring.log_probs import scored_tokens


def scored(rows):
    return (rows["tokens", "full"] * rows["masks", "all_attention_mask"]).sum(-1) / 50


SOURCES = [("episode", 1.0), (scored, 0.5)]


def test_entries_have_the_promised_shapes_and_types(model, other_model, rows):
    maker = ExperienceMaker(model, ref=other_model)
    batch = rows()
    out = maker(batch)
    assert out is batch
    n, s = batch["tokens", "full"].shape
    assert all(key in out.keys(True) for key in maker.out_keys)
    for key in [("log_probs", "old"), ("log_probs", "ref"), "kl", "returns"]:
        assert out[key].shape == (n, s)
        assert out[key].dtype is torch.float32
        assert not out[key].requires_grad
        assert not out[key][~batch[MASK]].any()
    assert out["advantage"].shape == (n, s, 1)
    assert out["advantage"].dtype is torch.float32


def test_old_log_probs_come_from_who_was_asked(model, rows):
    sampler = ExperienceMaker(model, old_log_probs="sampler")(rows())
    assert torch.equal(sampler["log_probs", "old"], rows()["log_probs", "full"])
    batch = rows()
    actor = ExperienceMaker(model, old_log_probs="actor")(batch)
    torch.testing.assert_close(actor["log_probs", "old"], log_probs(model, batch))


def everything(model, other_model, **options):
    return ExperienceMaker(
        model,
        ref=other_model,
        critic=TokenCritic(),
        reward=[("episode", 1.0), (reward_model(model), 0.5)],
        old_log_probs="actor",
        kl_coef=0.1,
        **grouped(with_entropy=True, advantage="gae", **options),
    )


def test_torchrls_wrappers_are_models_too(model, other_model, rows, tokenizer):
    actor, ref = (
        TransformersWrapper(m, tokenizer=tokenizer, input_mode="tokens", generate=False)
        for m in (model, other_model)
    )
    options = {"old_log_probs": "actor", "kl_coef": 0.1}
    expected = ExperienceMaker(model, ref=other_model, **options)(rows())
    out = ExperienceMaker(actor, ref=ref, **options)(rows())
    for key in expected.keys(True, True):
        torch.testing.assert_close(out[key], expected[key])


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 2},
        pytest.param({"micro_batch_tokens": 13}, marks=pytest.mark.slow),
        pytest.param({"packed": True}, marks=pytest.mark.slow),
        {"packed": True, "micro_batch_tokens": 13},
    ],
)
def test_micro_batches_and_packs_change_nothing(model, other_model, rows, options):
    whole = everything(model, other_model)(rows())
    cut = everything(model, other_model, **options)(rows())
    for key in whole.keys(True, True):
        torch.testing.assert_close(cut[key], whole[key], atol=1e-5, rtol=1e-5)


def test_dropout_is_off_and_everything_is_restored(other_model, rows, make_model):
    model = make_model(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    maker = everything(model, other_model)
    modes = [module.training for module in maker.modules()]
    assert len(set(modes)) == 2
    state = torch.get_rng_state()
    batch = rows()
    out = maker(batch)
    assert [module.training for module in maker.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.requires_grad for parameter in maker.parameters())
    again = maker(rows())
    for key in maker.out_keys:
        assert not out[key].requires_grad
        assert torch.equal(out[key], again[key])
    torch.testing.assert_close(out["log_probs", "old"], log_probs(model.eval(), batch))


def test_mixed_precision_is_close_and_answers_in_float32(model, other_model, rows):
    exact = everything(model, other_model)(rows())
    mixed = everything(model, other_model, dtype=torch.bfloat16)(rows())
    for key in [("log_probs", "old"), ("log_probs", "ref"), "values"]:
        assert mixed[key].dtype is torch.float32
        torch.testing.assert_close(mixed[key], exact[key], atol=0.3, rtol=0.1)
    assert not torch.equal(mixed["log_probs", "old"], exact["log_probs", "old"])


def test_turn_advantage_takes_the_returns_that_came_with_the_rows(model, rows):
    batch = rows()
    made = ExperienceMaker(model, advantage="turn", gamma=0.7)(batch)
    given = rows()
    given["rewards", "to_go"] = made["returns"].clone()
    given["rewards", "full"] = torch.zeros_like(given["rewards", "full"])
    out = ExperienceMaker(model, advantage="turn", gamma=0.2)(given)
    torch.testing.assert_close(out["advantage"], made["advantage"])


@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
@pytest.mark.parametrize("given_returns", [False, True])
def test_making_experience_twice_is_making_it_once(
    model, other_model, rows, advantage, given_returns
):
    batch = rows()
    if given_returns:
        given = torch.randn(batch["rewards", "full"].shape)
        batch["rewards", "to_go"] = given
    options = {"ref": other_model, "critic": TokenCritic(), "gamma": 0.9}
    options["kl_coef"] = 0.0 if advantage == "gdpo" else 0.1
    maker = ExperienceMaker(model, advantage=advantage, **options)
    once = maker(batch).clone()
    if given_returns:
        assert torch.equal(once["rewards", "to_go"], given)
    twice = maker(batch)
    assert set(twice.keys(True, True)) == set(once.keys(True, True))
    for key in once.keys(True, True):
        torch.testing.assert_close(twice[key], once[key])


@pytest.mark.parametrize("advantage", ["dr_grpo", "turn", "gae"])
@pytest.mark.parametrize("given_returns", [False, True])
@pytest.mark.parametrize("kl_kind", ["k1", "k3"])
def test_kl_penalty_is_a_reward_on_each_token(
    model, other_model, rows, advantage, given_returns, kl_kind
):
    options = {"advantage": advantage, "gamma": 0.9, "critic": TokenCritic()}
    batch = rows()
    if given_returns:
        plain = ExperienceMaker(model, advantage="turn", gamma=0.9)(rows())
        batch["rewards", "to_go"] = plain["returns"].clone()
    maker = ExperienceMaker(model, ref=other_model, kl_coef=0.1, kl_kind=kl_kind, **options)
    penalised = maker(batch)
    old, ref = batch["log_probs", "full"], log_probs(other_model, batch)
    by_hand = rows()
    mask = by_hand[MASK]
    kl = torch.where(mask, kl_estimate(old, ref, kl_kind), 0.0)
    by_hand["rewards", "full"] -= 0.1 * kl
    expected = ExperienceMaker(model, **options)(by_hand)
    for key in ("advantage", "returns", "values"):
        torch.testing.assert_close(penalised[key], expected[key], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(penalised["kl"], kl, atol=1e-5, rtol=1e-4)
    assert maker.metrics["kl/mean"] == pytest.approx(float(kl[mask].mean()), abs=1e-4)
    assert maker.metrics["kl_coef"] == 0.1


@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
def test_rows_may_come_in_any_order(model, rows, advantage):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    maker = ExperienceMaker(model, critic=TokenCritic(), reward=SOURCES, advantage=advantage)
    out, permuted = maker(rows(n=12)), maker(rows(n=12)[order].clone())
    torch.testing.assert_close(permuted["advantage"], out["advantage"][order])


@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
def test_padding_anywhere_changes_nothing(model, other_model, rows, spread, advantage):
    maker = ExperienceMaker(
        model,
        ref=other_model,
        critic=TokenCritic(),
        reward=SOURCES,
        kl_coef=0.0 if advantage == "gdpo" else 0.1,
        advantage=advantage,
        old_log_probs="actor",
        passes=Passes(with_entropy=True),
    )
    batch, wide = maker(rows()), maker(spread(rows()))
    mask, wide_mask = (x["masks", "all_assistant_mask"] for x in (batch, wide))
    for key in maker.out_keys:
        got, expected = wide[key][wide_mask], batch[key][mask]
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
def test_copies_of_an_episode_are_episodes_of_their_own(model, rows, advantage):
    batch = torch.cat([rows(), rows()])
    batch["episode_index"] = batch["episode"] + 100 * (torch.arange(12) >= 6)
    renamed = torch.cat([rows(), rows()])
    renamed["episode"] = batch["episode_index"]
    maker = ExperienceMaker(model, critic=TokenCritic(), advantage=advantage, gamma=0.9)
    got, expected = maker(batch), maker(renamed)
    torch.testing.assert_close(got["returns"], expected["returns"])
    torch.testing.assert_close(got["advantage"], expected["advantage"])


def test_rows_that_cannot_be_told_apart_are_refused(model, rows):
    batch = rows()
    batch["episode_index"], batch["fork"] = (
        batch["episode"].clone(),
        (torch.arange(6) % 3 == 1).long(),
    )
    twice = torch.cat([batch, batch])
    refused(ExperienceMaker(model), twice, r"fork 0 of episode 0 .* more than once")
    twice["episode_index"][6:] += 100
    expected = ExperienceMaker(model, advantage="turn", gamma=0.9)(batch)["returns"]
    got = ExperienceMaker(model, advantage="turn", gamma=0.9)(twice)["returns"]
    torch.testing.assert_close(got, torch.cat([expected, expected]))


@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
def test_rows_of_which_nothing_was_sampled_are_finite(model, other_model, rows, advantage):
    batch = rows()
    mask = batch[MASK]
    mask[:-1] = False
    mask[-1, 1:3] = True
    out = ExperienceMaker(model, ref=other_model, critic=TokenCritic(), advantage=advantage)(batch)
    for key in ("advantage", "kl", "returns", "values", ("log_probs", "ref")):
        assert out[key].isfinite().all()
        assert not out[key][:-1].any()


def test_a_callable_sees_everything_else(model, other_model, rows):
    seen = []

    def advantage(rows):
        seen.extend(map(str, rows.keys(True, True)))
        return rows["returns"] - 1.0

    out = ExperienceMaker(model, ref=other_model, advantage=advantage)(rows())
    mask = out["masks", "all_assistant_mask"]
    expected = torch.where(mask, out["returns"] - 1.0, 0.0)
    torch.testing.assert_close(out["advantage"].squeeze(-1), expected)
    assert {"kl", "returns"} <= set(seen)


@pytest.mark.parametrize("advantage", ["dr_grpo", "gae", "turn_gae"])
def test_an_outcome_reaches_the_earlier_rows_of_its_episode(model, rows, advantage):
    batch = rows(n=3)
    batch["rewards", "full"].zero_()
    maker = ExperienceMaker(
        model, critic=torch.nn.Identity(), reward=scored, advantage=Advantage(advantage, lmbda=1.0)
    )
    maker.critic.forward = lambda input_ids, attention_mask: torch.zeros(input_ids.shape)
    out = maker(batch)
    earned = scored(batch)
    # The episode of rows 0 and 1 ends in row 1, whose score alone is the episode's.
    for n, score_of in [(0, earned[1]), (1, earned[1]), (2, earned[2])]:
        returns = out["returns"][n][batch[MASK][n]]
        torch.testing.assert_close(returns, score_of.expand_as(returns))


def test_a_reward_transform_acts_on_the_sum_before_the_kl(model, other_model, rows):
    batch = rows()
    options = {"ref": other_model, "advantage": "dr_grpo", "kl_coef": 0.1}
    maker = ExperienceMaker(
        model,
        reward=RewardMix(SOURCES, transform=lambda reward, mask: clip_reward(reward, -1, 1)[0]),
        **options,
    )
    out = maker(batch)
    by_hand = rows()
    by_hand["rewards", "full"] = (
        ExperienceMaker(model, reward=SOURCES)(rows())["rewards", "shaped"].clamp(-1, 1).clone()
    )
    assert torch.equal(out["rewards", "shaped"], by_hand["rewards", "full"])
    expected = ExperienceMaker(model, **options)(by_hand)
    for key in ("advantage", "returns"):
        torch.testing.assert_close(out[key], expected[key])


def test_rewards_are_normalised_by_all_batches_so_far(model, rows):
    normalizer = RewardNormalizer(center=True, clip=1.5)
    maker = ExperienceMaker(
        model, advantage="dr_grpo", reward=RewardMix("episode", transform=normalizer)
    )
    batches = [rows(seed, suffix_padding=False) for seed in range(3)]
    # Equal rewards first: nothing to divide by.
    batches[0]["rewards", "full"] = torch.where(batches[0][MASK], 0.1, 0.0)
    given = []
    normalizer.register_forward_pre_hook(lambda _, args: given.append(args))
    for batch in batches:
        after = maker(batch)["rewards", "shaped"]
        before, lies = given[-1]
        everything = torch.cat([reward[mask].double() for reward, mask in given])
        expected = torch.zeros(before.shape, dtype=torch.float64)
        if everything.min() < everything.max():
            expected = (before.double() - everything.mean()) / everything.std()
        expected = torch.where(lies, expected.clamp(-1.5, 1.5), 0.0)
        torch.testing.assert_close(after.double(), expected, atol=1e-4, rtol=1e-4)
    assert "reward.transform.mean" in maker.state_dict()
    assert int(normalizer.count) == len(everything)


def test_running_statistics_do_not_count_a_batch_that_could_not_be_scored(model, rows):
    seen = []

    class Broken(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            raise RuntimeError("out of memory")

    def transform(reward, mask):
        seen.append(mask)
        return reward

    with pytest.raises(RuntimeError, match="out of memory"):
        ExperienceMaker(model, critic=Broken(), reward=RewardMix("episode", transform=transform))(
            rows()
        )
    assert not seen


def test_controllers_are_told_each_batch_once_and_hold_for_the_next(model, other_model, rows):
    adaptive = AdaptiveKLController(init_kl_coef=0.1, target=0.01, horizon=10)
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive, kl_kind="k3")
    fixed = ExperienceMaker(model, ref=other_model, kl_coef=0.1, kl_kind="k3")
    first, expected = maker(rows()), fixed(rows())
    assert torch.equal(first["advantage"], expected["advantage"])
    assert maker.metrics["kl/mean"] > 0.012
    assert maker.metrics["kl_coef"] == 0.1
    assert adaptive.coef == pytest.approx(0.1 * (1 + 0.2 / 10))
    maker(rows())
    assert maker.metrics["kl_coef"] == pytest.approx(0.102)
    low = AdaptiveKLController(init_kl_coef=0.1, target=100.0, horizon=10)
    ExperienceMaker(model, ref=other_model, kl_coef=low, kl_kind="k3")(rows())
    assert low.coef == pytest.approx(0.1 * (1 - 0.2 / 10))
    constant = ExperienceMaker(
        model, ref=other_model, kl_coef=ConstantKLController(kl_coef=0.1), kl_kind="k3"
    )
    assert torch.equal(constant(rows())["advantage"], expected["advantage"])


def test_keys_may_be_set(model):
    maker = ExperienceMaker(model)
    maker.set_keys(action="ids", advantage="adv")
    assert "ids" in maker.in_keys
    assert "adv" in maker.out_keys
    maker.set_keys(advantage=None)
    assert "advantage" in maker.out_keys
    with pytest.raises(ValueError, match="set_keys must be one of"):
        maker.set_keys(advantages="adv")
    with pytest.raises(TypeError, match="advantage must be a key"):
        maker.set_keys(advantage=3)


def test_keys_that_are_read_are_all_that_is_needed(model, other_model, rows):
    for advantage in ADVANTAGE_KINDS:
        maker = ExperienceMaker(model, ref=other_model, critic=TokenCritic(), advantage=advantage)
        maker(rows().select(*maker.in_keys))
        for key in maker.in_keys:
            with pytest.raises(KeyError, match="rows lack the entry"):
                maker(rows().exclude(key))


def test_bad_arguments_are_refused_by_name(model, rows):
    for options, message in [
        ({"advantage": "best"}, "advantage must be one of"),
        ({"gamma": 1.5}, "gamma must lie in"),
        ({"kl_coef": 0.1}, "kl_coef needs a reference"),
        ({"old_log_probs": "critic"}, "old_log_probs must be one of"),
        ({"kl_kind": "k9"}, "kl_kind must be one of"),
        ({"advantage": "gae"}, "advantage='gae' needs a critic"),
        ({"lmbda": -0.5}, "lmbda must lie in"),
        ({"kl_coef": float("nan"), "ref": model}, "kl_coef must be finite"),
        (
            {
                "kl_coef": AdaptiveKLController(init_kl_coef=0.0, target=1.0, horizon=1),
                "ref": model,
            },
            "kl_coef must be finite and not 0",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            ExperienceMaker(model, **grouped(**options))
    with pytest.raises(TypeError, match="actor must be a causal language model"):
        ExperienceMaker(None)
    with pytest.raises(TypeError, match=r"critic must be a torch.nn.Module, got str"):
        ExperienceMaker(model, critic="x", advantage="gae")


def lacks(key):
    return lambda rows: rows.exclude(key)


def has(key, value):
    return lambda rows: rows.set(key, value)


FITS = r"of rows must have shape \(6, 12\) to fit"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lacks("log_probs"), KeyError, "old_log_probs='actor' does without"),
        (lacks("group"), KeyError, "lack the entry 'group'.*the collector"),
        (lacks("episode"), KeyError, "lack the entry 'episode'; MergeTurns"),
        (lacks("turns"), KeyError, "'turns', 'full'.*MergeTurns writes it"),
        (lacks("rewards"), KeyError, r"where the turns have \('next', 'reward'"),
        (
            has(("log_probs", "full"), torch.zeros(6, 3)),
            *(ValueError, rf"'log_probs', 'full'\) {FITS} \('tokens', 'full'\), got \(6, 3\)"),
        ),
        (
            has(("rewards", "full"), torch.zeros(6, 3)),
            *(ValueError, rf"'rewards', 'full'\) {FITS} .* got \(6, 3\)"),
        ),
        (has(MASK, torch.ones(6, 3).bool()), ValueError, rf"'all_assistant_mask'\) {FITS}"),
        (has(MASK, torch.ones(6, 12)), TypeError, "must be a bool tensor"),
        (has(MASK, torch.zeros(6, 12).bool()), ValueError, "no token of these 6 rows was sampled"),
        (
            has("group", torch.zeros(6, 1).long()),
            *(ValueError, r"'group' of rows must have shape \(6,\) to fit 'episode', got \(6, 1\)"),
        ),
        (has("group", torch.arange(6)), ValueError, "'group' must be the same .* in episode 0"),
        (has("valid", torch.arange(6) != 1), ValueError, "'valid' must be the same on all rows of"),
        (
            has("valid", torch.ones(6, 1).bool()),
            *(ValueError, r"'valid' of rows must have shape \(6,\) .*got \(6, 1\)"),
        ),
        (
            has("episode", NonTensorStack(*"abcdef")),
            *(TypeError, "'episode' of rows must hold integers, got NonTensorStack"),
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_left_alone(model, rows, spoil, error, message):
    batch = spoil(rows())
    refused(ExperienceMaker(model, advantage="grpo"), batch, message, error)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_sampler_that_gives_no_number_is_named(model, rows, bad):
    batch = rows()
    mask, log_probs = batch[MASK], batch["log_probs", "full"]
    log_probs[~mask] = bad
    ExperienceMaker(model)(batch.clone())
    n, t = mask[4:].nonzero()[0].tolist()
    log_probs[4 + n, t] = bad
    episode = int(batch["episode"][4 + n])
    where = rf"got {bad} in episode {episode} \(row {4 + n}, token {t}\)"
    refused(ExperienceMaker(model), batch, where)


def test_a_call_that_fails_late_changes_nothing(model, other_model, rows):
    def advantage(rows):
        rows["mine"] = rows["returns"]
        return rows["returns"][:1]

    adaptive = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    maker = ExperienceMaker(model, ref=other_model, kl_coef=adaptive, advantage=advantage)
    refused(maker, rows(), r"the result of advantage\(rows\) must have shape")
    assert adaptive.coef == 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("advantage", ADVANTAGE_KINDS)
def test_an_own_reward_that_is_no_number_is_named(model, rows, advantage, bad):
    batch = rows()
    batch["rewards", "full"][4, 0] = bad
    episode = int(batch["episode"][4])
    maker = ExperienceMaker(model, critic=TokenCritic(), advantage=advantage)
    where = rf"got {bad} in episode {episode} \(row 4, token 0\) and 0 more"
    refused(maker, batch, rf"\('rewards', 'full'\) must be finite where it counts, {where}")


def test_given_returns_that_are_no_number_are_named(model, rows):
    batch = rows()
    batch["rewards", "to_go"] = torch.zeros(6, 12)
    t = first_sampled(batch, 5)
    batch["rewards", "to_go"][~batch[MASK]] = float("nan")
    maker = ExperienceMaker(model, advantage="turn")
    maker(batch.clone())
    batch["rewards", "to_go"][5, t] = float("nan")
    refused(maker, batch, rf"\('rewards', 'to_go'\) must .*episode 5 \(row 5, token {t}\)")


def broken(make_model):
    model = make_model(3)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    return model


def test_models_that_give_no_number_are_named(model, rows, make_model):
    bad = broken(make_model)
    maker = ExperienceMaker(bad, old_log_probs="actor")
    refused(maker, rows(), r"\('log_probs', 'old'\) must be finite .*the model is at fault")
    for advantage in ("grpo", "dr_grpo", "turn"):
        coefficient = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
        maker = ExperienceMaker(model, ref=bad, advantage=advantage, kl_coef=coefficient)
        refused(maker, rows(), r"\('log_probs', 'ref'\) must be finite .*the model is at fault")
        assert coefficient.coef == 0.1
    critic = TokenCritic()
    critic.embedding.weight.data.fill_(float("nan"))
    for advantage in ("gae", "grpo"):
        maker = ExperienceMaker(model, critic=critic, advantage=advantage)
        refused(maker, rows(), r"'values' must be finite .*the model is at fault")


def test_a_kl_that_overflows_is_refused_before_anything_is_written(model, other_model, rows):
    batch = rows()
    t = first_sampled(batch, 2)
    batch["log_probs", "full"][2, t] = -1e30
    coefficient = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    maker = ExperienceMaker(model, ref=other_model, kl_kind="k2", kl_coef=coefficient)
    refused(maker, batch, rf"'kl' must be finite .*row 2, token {t}")
    assert coefficient.coef == 0.1
    with pytest.raises(ValueError, match="the KL of a controller's update must be finite"):
        update_kl_coefficient(coefficient, torch.full((1, 1), float("nan")), torch.ones(1, 1) > 0)
    assert coefficient.coef == 0.1


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_an_advantage_that_is_no_number_is_named(model, rows, bad, whiten):
    batch = rows()
    t = first_sampled(batch, 2)

    def advantage(rows):
        out = torch.where(rows[MASK], 1.0, float("nan")).double()
        out[2, t] = bad  # Float32 does not hold 1e300.
        return out

    maker = ExperienceMaker(model, advantage=Advantage(advantage, whiten=whiten))
    refused(maker, batch, rf"'advantage' must be finite .*row 2, token {t}")


def test_what_rejected_rows_hold_stops_no_batch(model, other_model, rows):
    batch = rejecting(rows(n=9), 2, 6)
    kept = batch["valid"]
    batch["label"] = ["maths" if keep else "nothing" for keep in kept.tolist()]
    for key in ("log_probs", "rewards"):
        batch[key, "full"][~kept] = float("nan")
    shown, asked = [], []

    def source(rows):
        asked.append(len(rows))
        return torch.ones(len(rows))

    def transform(reward, mask):
        shown.append(mask)
        return reward * 2

    def make(batch):
        maker = ExperienceMaker(
            model,
            ref=other_model,
            reward=RewardMix(
                {"maths": [("episode", 1.0), (source, 0.5)], "chat": [("episode", 1.0)]},
                transform=transform,
            ),
            kl_coef=AdaptiveKLController(init_kl_coef=0.1, target=0.3, horizon=10),
            process="dynamic_sampling",
        )
        return maker(batch), maker

    alone, reference = make(batch[kept].clone())
    out, maker = make(batch)
    assert asked == [int(kept.sum())] * 2
    assert not shown[1][~kept].any()
    assert torch.equal(shown[1][kept], shown[0])
    assert maker.metrics == pytest.approx(reference.metrics)
    for key in maker.out_keys:
        torch.testing.assert_close(out[key][kept], alone[key])
    assert not out["advantage"][~kept].any()
    assert not out["rewards", "shaped"][~kept].any()


def test_the_controller_is_told_the_kl_of_rows_that_count(model, other_model, rows):
    def told(batch):
        kl = []

        class Listening(AdaptiveKLController):
            def update(self, values):
                kl.extend(values)

        controller = Listening(init_kl_coef=0.1, target=0.3, horizon=10)
        maker = ExperienceMaker(model, ref=other_model, kl_coef=controller)
        maker(batch)
        return kl, maker.metrics

    batch = rejecting(rows(n=9), 0, 5)
    batch["log_probs", "full"][~batch["valid"]] -= 9.0
    kl, metrics = told(batch)
    expected, expected_metrics = told(batch[batch["valid"]].clone())
    assert kl == pytest.approx(expected)
    assert kl[0] == pytest.approx(-0.1 * metrics["kl/mean"])
    assert metrics == pytest.approx(expected_metrics)


@pytest.mark.parametrize("label", [["yes"] * 6, list(range(6))])
@pytest.mark.parametrize("reward", [None, SOURCES])
def test_labels_are_not_read_where_there_is_one_recipe(model, rows, label, reward):
    batch = rows()
    batch["label"] = label if isinstance(label[0], str) else torch.tensor(label)
    expected = ExperienceMaker(model, reward=reward)(rows())
    out = ExperienceMaker(model, reward=reward)(batch)
    assert torch.equal(out["advantage"], expected["advantage"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda rows: rows.set("advantage", rows.select("tokens")),
            "the entry 'advantage': 'advantage' is a TensorDict there",
        ),
        (
            lambda rows: rows.set(("returns", "mine"), torch.ones(6)),
            "the entry 'returns': 'returns' is a TensorDict there",
        ),
        (lambda rows: rows.lock_(), r"rows must not be locked.*rows.unlock_\(\)"),
    ],
)
def test_rows_that_cannot_be_written_are_refused_before_the_models_run(model, rows, spoil, message):
    def never(*args, **kwargs):
        raise AssertionError("the model ran")

    maker = ExperienceMaker(model, old_log_probs="actor")
    model.register_forward_pre_hook(never, with_kwargs=True)
    refused(maker, spoil(rows()), message)


def test_keys_that_would_overwrite_each_other_are_refused(model, rows):
    maker = ExperienceMaker(model)
    for keys in (
        {"advantage": "returns"},
        {"advantage": ("returns", "x")},
        {"kl": ("kl", "full"), "entropy": "kl"},
        {"sample_log_prob": ("log_probs", "full")},
    ):
        with pytest.raises(ValueError, match="must have keys of which none lies in the other"):
            maker.set_keys(**keys)
    assert maker.tensor_keys.advantage == "advantage"
    maker.set_keys(advantage="returns", value_target="advantage")
    expected = ExperienceMaker(model)(rows())
    assert torch.equal(maker(rows())["returns"], expected["advantage"])


class Scaled(nn.Module):
    """A transform that has its running statistics in a module of its own."""

    def __init__(self, normalizer):
        super().__init__()
        self.inner = normalizer

    def forward(self, reward, mask):
        return self.inner(reward, mask) * 2.0


@pytest.mark.parametrize(
    "transform_of", [lambda x: x, lambda x: x.forward, Scaled], ids=["module", "method", "within"]
)
@pytest.mark.parametrize("where", ["advantage", "process"])
def test_running_statistics_do_not_count_a_batch_that_failed_late(model, rows, where, transform_of):
    def fails(rows):
        raise RuntimeError("late")

    normalizer = RewardNormalizer()
    reward = RewardMix("episode", transform=transform_of(normalizer))
    ExperienceMaker(model, reward=reward)(rows(1))
    before = copy.deepcopy(normalizer.state_dict())
    refused(ExperienceMaker(model, reward=reward, **{where: fails}), rows(), "late", RuntimeError)
    assert normalizer.state_dict() == before
    ExperienceMaker(model, reward=reward)(rows())
    assert normalizer.count > before["count"]


def test_sampled_padding_is_refused(model, rows):
    batch = rows()
    n, t = (~batch["masks", "all_attention_mask"]).nonzero()[0].tolist()
    batch[MASK][n, t] = True
    where = rf"\('masks', 'all_attention_mask'\), but token {t} of row {n}"
    refused(ExperienceMaker(model), batch, rf"'all_assistant_mask'\) must lie within {where}")


def test_shape_errors_name_the_keys_that_were_set(model, rows):
    maker = ExperienceMaker(model)
    maker.set_keys(assistant_mask="sampled", reward="r")
    batch = rows()
    batch.rename_key_(("masks", "all_assistant_mask"), "sampled")
    batch["r"] = torch.zeros(6, 3)
    refused(maker, batch, r"'r' of rows must have shape \(6, 12\) to fit 'sampled', got \(6, 3\)")


@pytest.mark.parametrize("advantage", ["gae", "turn_gae", "opo"])
def test_tokens_that_are_never_trained_enter_no_statistic(model, rows, spread, advantage):
    batch = rows()
    batch[MASK][:, 0] = True
    batch = spread(batch)
    maker = ExperienceMaker(
        model, critic=TokenCritic(), advantage=Advantage(advantage, whiten=advantage != "opo")
    )
    out = maker(batch)
    masks = batch["masks"]
    trained = scored_tokens(masks["all_attention_mask"], masks["all_assistant_mask"])
    got = out["advantage"].squeeze(-1)
    if advantage != "opo":
        assert float(got[trained].mean()) == pytest.approx(0, abs=1e-5)
        assert float(got[trained].std()) == pytest.approx(1, abs=1e-4)
        return
    length, earned = {}, {}
    for n, e in enumerate(batch["episode"].tolist()):
        length[e] = length.get(e, 0) + int(trained[n].sum())
        earned[e] = earned.get(e, 0.0) + float(
            batch["rewards", "full"][n][masks["all_assistant_mask"][n]].sum()
        )
    baseline = sum(length[e] * earned[e] for e in length) / sum(length.values())
    for n, t in masks["all_assistant_mask"].nonzero().tolist():
        expected = earned[int(batch["episode"][n])] - baseline
        assert float(got[n, t]) == pytest.approx(expected, abs=1e-4)


def test_an_episode_alone_in_its_group_gets_the_lone_value(model, rows):
    batch = rows()
    lone = batch["episode"] < 3
    assert 0 < len(batch["episode"][~lone].unique()) < len(batch["episode"].unique())
    batch["group"] = torch.where(lone, batch["episode"], 3)
    mask = batch[MASK] & lone[:, None]
    out = ExperienceMaker(model, advantage=Advantage("grpo", lone_value=-0.5))(batch)
    assert torch.equal(out["advantage"][lone].squeeze(-1), torch.where(mask[lone], -0.5, 0.0))
    with pytest.raises(ValueError, match="lone_value must be finite"):
        ExperienceMaker(model, advantage=Advantage(lone_value=float("nan")))


def test_what_callables_do_in_place_stays_theirs(model, rows):
    def spoil(rows):
        for value in rows.values(True, True):
            if value.dtype.is_floating_point:
                value.fill_(3.0)

    def source(rows):
        spoil(rows)
        return torch.ones(len(rows))

    def advantage(rows):
        out = rows["returns"].clone()
        spoil(rows)
        return out

    def transform(reward, mask):
        out = reward.clone()
        reward.fill_(9.0)
        mask.fill_(False)
        return out

    def polite(rows):
        return rows["returns"]

    batch = rows()
    reward = [("episode", 1.0), (source, 1.0)]
    out = ExperienceMaker(
        model,
        reward=RewardMix(reward, transform=transform),
        advantage=advantage,
    )(batch)
    reward[1] = (lambda rows: torch.ones(len(rows)), 1.0)
    expected = ExperienceMaker(model, reward=reward, advantage=polite)(rows())
    for key in expected.keys(True, True):
        torch.testing.assert_close(out[key], expected[key])


def test_running_statistics_keep_their_precision(make_model, rows):
    normalizer = RewardNormalizer()
    maker = ExperienceMaker(make_model(), reward=RewardMix("episode", transform=normalizer))
    before = {name: buffer.dtype for name, buffer in normalizer.named_buffers()}
    normalizer.update(torch.arange(1000.0))
    for cast in (maker.bfloat16, maker.half, maker.float, maker.double):
        cast()
        assert {name: buffer.dtype for name, buffer in normalizer.named_buffers()} == before
    assert float(normalizer.count) == 1000
    assert float(normalizer.mean) == 499.5
    normalizer.to("meta")
    assert normalizer.mean.device.type == "meta"


def test_a_reward_in_a_row_without_sampled_tokens_is_its_episodes(model, rows):
    batch = rows(n=3, suffix_padding=False)
    batch["episode"] = torch.zeros(3, dtype=torch.long)
    mask = batch[MASK]
    mask[1] = False
    batch["rewards", "full"] = torch.zeros(3, 12)
    batch["turns", "full"] = torch.tensor([[4], [2], [0]]).expand(3, 12).clone()
    batch["turns", "full"][1, 6:] = -1
    last = int(mask[2].nonzero()[-1])
    first = int(mask[2].nonzero()[0])
    maker = ExperienceMaker(
        model, reward=RewardMix("episode", transform=lambda reward, mask: reward)
    )
    for turn, t, expected in ((2, 3, last), (2, 9, last), (7, 0, None), (0, 0, last)):
        given = batch.clone()
        given["turns", "full"][1, :6] = turn
        given["rewards", "full"][1, t] = 5.0
        place = (0, int(mask[0].nonzero()[-1])) if expected is None else (2, expected)
        shaped = maker(given)["rewards", "shaped"]
        assert shaped.nonzero().tolist() == [list(place)]
        assert float(shaped[place]) == 5.0
        assert maker.metrics["reward/default/episode/mean"] == 5.0
    given = batch.clone()
    given["turns", "full"][0] += 1
    given["turns", "full"][2] += 1
    given["turns", "full"][1] = 0
    given["rewards", "full"][1, 0] = 5.0
    assert maker(given)["rewards", "shaped"].nonzero().tolist() == [[2, first]]


def test_metrics_show_how_much_was_sampled_and_how_surely(model, rows):
    batch = rejecting(rows(n=9), 2)
    batch[MASK][:, 0] = True
    maker = ExperienceMaker(model, passes=Passes(with_entropy=True))
    out = maker(batch)
    mask, valid = batch[MASK], batch["valid"].tolist()
    per_row = [int(mask[n].sum()) for n in range(9) if valid[n]]
    per_episode = {}
    for n, e in enumerate(batch["episode"].tolist()):
        if valid[n]:
            per_episode[e] = per_episode.get(e, 0) + int(mask[n].sum())
    for name, counts in [
        ("tokens_per_row", torch.tensor(per_row).double()),
        ("tokens_per_episode", torch.tensor([*per_episode.values()]).double()),
        ("entropy", out["entropy"][:, 1:][(mask & batch["valid"][:, None])[:, 1:]].double()),
    ]:
        assert maker.metrics[f"{name}/count"] == len(counts)
        assert maker.metrics[f"{name}/mean"] == pytest.approx(float(counts.mean()))
        assert maker.metrics[f"{name}/std"] == pytest.approx(float(counts.std(correction=0)))
    assert len(per_episode) < len(per_row) < 9
    batch["valid"] = torch.zeros(9, dtype=torch.bool)
    maker(batch)
    assert maker.metrics["tokens_per_episode/count"] == 0.0


def test_metrics_show_how_whole_the_groups_are(model, rows):
    batch = rows(n=12)
    batch["group"] = torch.tensor([10**6, 7, -3])[batch["episode"] % 3]
    maker = ExperienceMaker(model, advantage="grpo")
    batch["valid"] = torch.arange(12) != 11
    maker(batch)
    of = {}
    for episode, group, valid in zip(
        *(batch[key].tolist() for key in ("episode", "group", "valid")), strict=True
    ):
        of.setdefault(group, set()).update({episode} if valid else ())
    counts = torch.tensor([float(len(episodes)) for episodes in of.values() if episodes])
    got = {k: v for k, v in maker.metrics.items() if k.startswith("episodes_per_group/")}
    assert got == {
        "episodes_per_group/mean": pytest.approx(float(counts.mean())),
        "episodes_per_group/std": pytest.approx(float(counts.std(correction=0))),
        "episodes_per_group/count": len(counts),
    }
    assert got["episodes_per_group/std"] > 0
    turns = ExperienceMaker(model, advantage="turn")
    turns(rows())
    assert not {"episodes_per_group/mean", "groups/without_spread"} & turns.metrics.keys()


def test_the_actor_as_its_own_reference_is_warned_of(model, other_model, caplog):
    ExperienceMaker(model, ref=other_model)
    ExperienceMaker(model, ref=copy.deepcopy(model))
    assert not caplog.records
    for ref in (model, nn.DataParallel(model)):
        caplog.clear()
        ExperienceMaker(model, ref=ref)
        assert "ref is the actor itself" in caplog.text


def test_a_reference_with_another_vocabulary_is_refused_by_name(model, make_model, rows):
    maker = ExperienceMaker(model, ref=make_model(vocab_size=6))
    refused(maker, rows(), r"tokens must be in \[0, 6\), .*Qwen2ForCausalLM.* got [0-9]+;")


def test_functions_of_rows_find_the_usual_keys_wherever_entries_lie(model, other_model, rows):
    def advantage(rows):
        return rows["returns"] + rows["kl"] + rows["episode"].unsqueeze(-1)

    expected = ExperienceMaker(model, ref=other_model, advantage=advantage)(rows())["advantage"]
    maker = ExperienceMaker(model, ref=other_model, advantage=advantage)
    maker.set_keys(value_target=("v", "target"), kl="divergence", episode="trajectory")
    out = maker(rows().rename_key_("episode", "trajectory"))
    torch.testing.assert_close(out["advantage"], expected)
    assert not {"returns", "kl", "episode"} & set(out.keys())


def test_labels_are_read_by_recipes_that_have_labels(model):
    own = [("episode", 1.0)]
    for recipe, needed, read in [
        (own, False, False),
        ({"maths": own}, True, False),
        ({"maths": own, "chat": own}, True, False),
        ({"default": own, "maths": own}, False, True),
        ({"default": own}, False, True),
    ]:
        maker = ExperienceMaker(model, reward=recipe)
        assert ("label" in maker.in_keys) == needed
        assert ("label" in maker.optional_in_keys) == read


def test_log_probs_of_the_wrong_sign_are_refused(model, rows):
    batch = rows()
    batch["log_probs", "full"][0, 0] = 1e-3  # What rounding may do, or lies on no sampled token.
    batch["log_probs", "full"] = batch["log_probs", "full"].clamp(min=-1e-3).neg()
    ExperienceMaker(model)(batch)
    wrong = rows()
    wrong["log_probs", "full"].neg_()
    refused(ExperienceMaker(model), wrong, r"'full'.* must be log-probabilities, .* other sign")
    wrong["valid"] = torch.zeros(6, dtype=torch.bool)
    ExperienceMaker(model)(wrong)
    ExperienceMaker(model, old_log_probs="actor")(rows().exclude(("log_probs", "full")))
    batch = ExperienceMaker(model, old_log_probs="actor")(rows())
    loss = MultiTurnLoss(model, correction="icepop")
    loss(batch)
    batch["log_probs", "full"].neg_()
    with pytest.raises(ValueError, match=r"'full'.* must be log-probabilities, .* other sign"):
        loss(batch)
    batch["log_probs", "old"].neg_()
    with pytest.raises(ValueError, match=r"'old'.* must be log-probabilities"):
        MultiTurnLoss(model)(batch)
    batch[MASK].zero_()
    MultiTurnLoss(model)(batch)


def test_functions_may_answer_with_lists(model, rows):
    batch = rows()
    shape = batch["tokens", "full"].shape
    number = torch.arange(1.0, 1 + shape.numel()).view(shape)
    weight = torch.arange(1.0, 1 + len(batch))
    answers = {
        "reward": lambda rows: weight,
        "reward_transform": lambda reward, mask: number,
        "advantage": lambda rows: number,
    }

    def listed(answer):
        return lambda *args: answer(*args).tolist()

    as_tensors = ExperienceMaker(model, **grouped(**answers))(batch.clone())
    as_lists = ExperienceMaker(model, **grouped(**{k: listed(v) for k, v in answers.items()}))(
        batch.clone()
    )
    for key in (("rewards", "shaped"), "advantage"):
        assert torch.equal(as_tensors[key], as_lists[key])
