"""Experience: scores, KL, returns and advantages by episode, group and turn, never by position."""

import copy
import re

import pytest
import torch
from torch import nn
from torchrl.data import AdaptiveKLController, ConstantKLController
from torchrl.modules.llm import TransformersWrapper

from tests.objectives.helpers import (
    MASK,
    Spoiled,
    TokenCritic,
    first_sampled,
    log_probs,
    refused,
    rejecting,
    reward_model,
)
from tests.settings import grouped
from tests.tiers import slow
from torchrl_mt.objectives import Advantage, ExperienceMaker, MultiTurnLoss, Passes, RewardMix
from torchrl_mt.objectives.credit import ADVANTAGE_KINDS
from torchrl_mt.objectives.functional import RewardNormalizer, clip_reward, kl_estimate
from torchrl_mt.objectives.kl import update_kl_coefficient


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


PACKED = {"packed": True, "micro_batch_tokens": 13}


@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 2}, slow({"micro_batch_tokens": 13}), slow({"packed": True}), PACKED],
    ids=str,
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


def test_a_reward_transform_acts_on_the_sum_before_the_kl(model, other_model, rows):
    options = {"ref": other_model, "advantage": "dr_grpo", "kl_coef": 0.1}
    clipped = RewardMix(SOURCES, transform=lambda reward, mask: clip_reward(reward, -1, 1)[0])
    out = ExperienceMaker(model, reward=clipped, **options)(rows())
    by_hand, plain = rows(), ExperienceMaker(model, reward=SOURCES)(rows())
    by_hand["rewards", "full"] = plain["rewards", "shaped"].clamp(-1, 1)
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


def test_controllers_are_told_each_batch_once_and_hold_for_the_next(model, other_model, rows):
    def make(coefficient):
        return ExperienceMaker(model, ref=other_model, kl_coef=coefficient, kl_kind="k3")

    adaptive, low = (
        AdaptiveKLController(init_kl_coef=0.1, target=target, horizon=10)
        for target in (0.01, 100.0)
    )
    maker = make(adaptive)
    first, expected = maker(rows()), make(0.1)(rows())
    assert torch.equal(first["advantage"], expected["advantage"])
    assert maker.metrics["kl/mean"] > 0.012
    assert maker.metrics["kl_coef"] == 0.1
    assert adaptive.coef == pytest.approx(0.1 * (1 + 0.2 / 10))
    maker(rows())
    assert maker.metrics["kl_coef"] == pytest.approx(0.102)
    make(low)(rows())
    assert low.coef == pytest.approx(0.1 * (1 - 0.2 / 10))
    constant = make(ConstantKLController(kl_coef=0.1))
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


@pytest.mark.parametrize(
    ("broken", "key", "advantages"),
    [
        ("actor", "('log_probs', 'old')", ["turn"]),
        ("ref", "('log_probs', 'ref')", ["grpo", "dr_grpo", "turn"]),
        ("critic", "'values'", ["gae", "grpo"]),
    ],
)
def test_models_that_give_no_number_are_named(model, other_model, rows, broken, key, advantages):
    models = {"actor": model, "ref": other_model, "critic": TokenCritic()}
    models[broken] = Spoiled(models[broken], lambda ids: ids >= 0)
    for advantage in advantages:
        adaptive = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
        options = {"advantage": advantage, "old_log_probs": "actor", "kl_coef": adaptive}
        message = rf"{re.escape(key)} must be finite .*the model is at fault"
        refused(ExperienceMaker(**models, **options), rows(), message)
        assert adaptive.coef == 0.1


def test_a_kl_that_overflows_is_refused_before_anything_is_written(model, other_model, rows):
    batch = rows()
    t = first_sampled(batch, 2)
    batch["log_probs", "full"][2, t] = -1e30
    adaptive = AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=10)
    maker = ExperienceMaker(model, ref=other_model, kl_kind="k2", kl_coef=adaptive)
    refused(maker, batch, rf"'kl' must be finite .*row 2, token {t}")
    with pytest.raises(ValueError, match="the KL of a controller's update must be finite"):
        update_kl_coefficient(adaptive, torch.full((1, 1), torch.nan), torch.ones(1, 1) > 0)
    assert adaptive.coef == 0.1


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


def test_what_rejected_rows_hold_stops_no_batch_and_is_not_told(model, other_model, rows):
    batch = rejecting(rows(n=9), 2, 6)
    kept = batch["valid"]
    batch["label"] = ["maths" if keep else "nothing" for keep in kept.tolist()]
    for key in ("log_probs", "rewards"):
        batch[key, "full"][~kept] = torch.nan
    shown, asked, told = [], [], []

    def source(rows):
        asked.append(len(rows))
        return torch.ones(len(rows))

    def transform(reward, mask):
        shown.append(mask)
        return reward * 2

    class Listening(AdaptiveKLController):
        def update(self, values):
            told.append(values)

    recipe = {"maths": [("episode", 1.0), (source, 0.5)], "chat": [("episode", 1.0)]}

    def make(batch):
        maker = ExperienceMaker(
            model,
            ref=other_model,
            reward=RewardMix(recipe, transform=transform),
            kl_coef=Listening(init_kl_coef=0.1, target=0.3, horizon=10),
            process="dynamic_sampling",
        )
        return maker(batch), maker

    alone, reference = make(batch[kept].clone())
    out, maker = make(batch)
    assert asked == [int(kept.sum())] * 2
    assert not shown[1][~kept].any()
    assert torch.equal(shown[1][kept], shown[0])
    assert maker.metrics == pytest.approx(reference.metrics)
    assert told[1] == pytest.approx(told[0])
    assert told[1][0] == pytest.approx(-0.1 * maker.metrics["kl/mean"])
    for key in maker.out_keys:
        torch.testing.assert_close(out[key][kept], alone[key])
    assert not out["advantage"][~kept].any()
    assert not out["rewards", "shaped"][~kept].any()


@pytest.mark.parametrize("label", [["yes"] * 6, list(range(6))])
@pytest.mark.parametrize("reward", [None, SOURCES])
def test_labels_are_not_read_where_there_is_one_recipe(model, rows, label, reward):
    batch = rows()
    batch["label"] = label if isinstance(label[0], str) else torch.tensor(label)
    expected = ExperienceMaker(model, reward=reward)(rows())
    out = ExperienceMaker(model, reward=reward)(batch)
    assert torch.equal(out["advantage"], expected["advantage"])


@pytest.mark.parametrize(
    "keys",
    [
        {"advantage": "returns"},
        {"advantage": ("returns", "x")},
        {"kl": ("kl", "full"), "entropy": "kl"},
        {"sample_log_prob": ("log_probs", "full")},
    ],
    ids=str,
)
def test_keys_that_would_overwrite_each_other_are_refused(model, rows, keys):
    maker = ExperienceMaker(model)
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
@pytest.mark.parametrize("where", ["critic", "advantage", "process"])
def test_running_statistics_do_not_count_a_batch_that_failed(model, rows, where, transform_of):
    def fails(*args, **kwargs):
        raise RuntimeError("late")

    normalizer, critic = RewardNormalizer(), TokenCritic()
    reward = RewardMix("episode", transform=transform_of(normalizer))
    ExperienceMaker(model, reward=reward)(rows(1))
    before = copy.deepcopy(normalizer.state_dict())
    critic.register_forward_pre_hook(fails)
    options = {where: critic if where == "critic" else fails}
    refused(ExperienceMaker(model, reward=reward, **options), rows(), "late", RuntimeError)
    assert normalizer.state_dict() == before
    ExperienceMaker(model, reward=reward)(rows())
    assert normalizer.count > before["count"]


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
    whiten = advantage != "opo"
    kind = Advantage(advantage, whiten=whiten)
    maker = ExperienceMaker(model, critic=TokenCritic(), advantage=kind)
    got, mask = maker(batch)["advantage"].squeeze(-1), batch[MASK]
    trained = mask & (batch["masks", "all_attention_mask"].cumsum(-1) > 1)
    if whiten:
        assert float(got[trained].mean()) == pytest.approx(0, abs=1e-5)
        assert float(got[trained].std()) == pytest.approx(1, abs=1e-4)
        return
    ids, episode = batch["episode"].unique(return_inverse=True)
    length, earned = torch.zeros(2, len(ids)).index_add(
        1, episode, torch.stack([trained, mask * batch["rewards", "full"]]).sum(-1)
    )
    expected = (earned - (length * earned).sum() / length.sum())[episode]
    torch.testing.assert_close(got, expected[:, None] * mask, atol=1e-4, rtol=1e-4)


def test_an_episode_alone_in_its_group_gets_the_lone_value(model, rows):
    batch = rows()
    lone = batch["episode"] < 3
    assert 0 < len(batch["episode"][~lone].unique()) < len(batch["episode"].unique())
    batch["group"] = torch.where(lone, batch["episode"], 3)
    out = ExperienceMaker(model, advantage=Advantage("grpo", lone_value=-0.5))(batch)
    expected = torch.where(batch[MASK], -0.5, 0.0)
    assert torch.equal(out["advantage"][lone].squeeze(-1), expected[lone])


def test_what_callables_do_in_place_stays_theirs(model, rows):
    def spoil(rows):
        for value in rows.values(True, True):
            if value.dtype.is_floating_point:
                value.fill_(3.0)
        rows["mine"] = rows["episode"]

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

    reward = RewardMix([("episode", 1.0), (source, 1.0)], transform=transform)
    out = ExperienceMaker(model, reward=reward, advantage=advantage)(rows())
    reward = [("episode", 1.0), (lambda rows: torch.ones(len(rows)), 1.0)]
    polite = ExperienceMaker(model, reward=reward, advantage=lambda rows: rows["returns"])
    expected = polite(rows())
    assert set(out.keys(True)) == set(expected.keys(True))
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
    mask, valid = batch[MASK], batch["valid"]
    per_row = mask.sum(-1)[valid]
    ids, of_row = batch["episode"][valid].unique(return_inverse=True)
    entropy = out["entropy"][:, 1:][(mask & valid[:, None])[:, 1:]]
    for name, counts in [
        ("tokens_per_row", per_row.double()),
        (
            "tokens_per_episode",
            torch.zeros(len(ids)).double().index_add(0, of_row, per_row.double()),
        ),
        ("entropy", entropy.double()),
    ]:
        assert maker.metrics[f"{name}/count"] == len(counts)
        assert maker.metrics[f"{name}/mean"] == pytest.approx(float(counts.mean()))
        assert maker.metrics[f"{name}/std"] == pytest.approx(float(counts.std(correction=0)))
    assert len(ids) < len(per_row) < 9
    batch["valid"] = torch.zeros(9, dtype=torch.bool)
    maker(batch)
    assert maker.metrics["tokens_per_episode/count"] == 0.0


def test_metrics_show_how_whole_the_groups_are(model, rows):
    batch = rows(n=12)
    batch["group"] = torch.tensor([10**6, 7, -3])[batch["episode"] % 3]
    batch["valid"] = torch.arange(12) != 11
    maker = ExperienceMaker(model, advantage="grpo")
    maker(batch)
    places = torch.stack([batch["group"], batch["episode"]], 1)[batch["valid"]].unique(dim=0)
    _, counts = places[:, 0].unique(return_counts=True)
    got = {k: v for k, v in maker.metrics.items() if k.startswith("episodes_per_group/")}
    assert got == {
        "episodes_per_group/mean": pytest.approx(float(counts.double().mean())),
        "episodes_per_group/std": pytest.approx(float(counts.double().std(correction=0))),
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


def test_functions_of_rows_find_the_usual_keys_wherever_entries_lie(model, other_model, rows):
    def advantage(rows):
        return rows["returns"] + rows["kl"] + rows["episode"].unsqueeze(-1)

    maker = ExperienceMaker(model, ref=other_model, advantage=advantage)
    usual = maker(rows())
    expected = torch.where(usual[MASK], advantage(usual), 0.0).unsqueeze(-1)
    torch.testing.assert_close(usual["advantage"], expected)
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


def test_log_probs_of_the_wrong_sign_are_read_where_nothing_counts(model, rows):
    batch = rows()
    batch["log_probs", "full"][0, 0] = 1e-3  # What rounding may do, or lies on no sampled token.
    batch["log_probs", "full"] = batch["log_probs", "full"].clamp(min=-1e-3).neg()
    ExperienceMaker(model)(batch)
    batch = ExperienceMaker(model)(rows())
    for key in ("full", "old"):
        batch["log_probs", key].neg_()
    batch["valid"] = torch.zeros(6, dtype=torch.bool)
    ExperienceMaker(model)(batch)
    ExperienceMaker(model, old_log_probs="actor")(rows().exclude(("log_probs", "full")))
    del batch["valid"]
    batch[MASK].zero_()
    MultiTurnLoss(model, correction="icepop")(batch)


def test_functions_may_answer_with_lists(model, rows):
    number = torch.arange(1.0, 1 + 6 * 12).view(6, 12)
    answers = {
        "reward": lambda rows: number[:, 0],
        "reward_transform": lambda reward, mask: number,
        "advantage": lambda rows: number,
    }
    listed = {k: lambda *args, f=f: f(*args).tolist() for k, f in answers.items()}
    expected, out = (ExperienceMaker(model, **grouped(**x))(rows()) for x in (answers, listed))
    for key in (("rewards", "shaped"), "advantage"):
        assert torch.equal(out[key], expected[key])
