"""Experience: scores, KL, returns and advantages by episode, group and turn, never by position."""

import pytest
import torch

from torchrl_mt.objectives import ExperienceMaker, row_log_probs
from torchrl_mt.objectives.functional import kl_estimate

KINDS = ["grpo", "dr_grpo", "rloo", "batch", "turn"]


def score(model, rows):
    masks = rows["masks"]
    with torch.no_grad():
        return row_log_probs(
            model,
            rows["tokens", "full"],
            masks["all_attention_mask"],
            masks["all_assistant_mask"],
        )[0]


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
        assert not out[key][~batch["masks", "all_assistant_mask"]].any()
    assert out["advantage"].shape == (n, s, 1)
    assert out["advantage"].dtype is torch.float32


def test_old_log_probs_come_from_who_was_asked(model, rows):
    sampler = ExperienceMaker(model, old_log_probs="sampler")(rows())
    assert torch.equal(sampler["log_probs", "old"], rows()["log_probs", "full"])
    batch = rows()
    actor = ExperienceMaker(model, old_log_probs="actor")(batch)
    torch.testing.assert_close(actor["log_probs", "old"], score(model, batch))


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, {"micro_batch_tokens": 13}])
def test_micro_batches_change_nothing(model, other_model, rows, options):
    whole = ExperienceMaker(model, ref=other_model, old_log_probs="actor")(rows())
    cut = ExperienceMaker(model, ref=other_model, old_log_probs="actor", **options)(rows())
    for key in whole.keys(True, True):
        torch.testing.assert_close(cut[key], whole[key], atol=1e-5, rtol=1e-5)


def test_dropout_is_off_and_everything_is_restored(rows, make_model):
    model = make_model(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    batch = rows()
    out = ExperienceMaker(model, old_log_probs="actor")(batch)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(out["log_probs", "old"], score(model.eval(), batch))


def outcomes(batch, gamma):
    """Discounted return of each episode from its first turn, in a loop."""
    earned = {}
    for n in range(len(batch)):
        for t in batch["masks", "all_assistant_mask"][n].nonzero().flatten().tolist():
            turns = earned.setdefault(int(batch["episode"][n]), {})
            turn = int(batch["turns", "full"][n, t])
            turns[turn] = turns.get(turn, 0.0) + float(batch["rewards", "full"][n, t])
    return {
        e: {t: sum(gamma ** (u - t) * r for u, r in turns.items() if u >= t) for t in turns}
        for e, turns in earned.items()
    }


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_outcome_advantage_counts_each_episode_once(model, rows, gamma, seed):
    batch = rows(seed, n=12)
    out = ExperienceMaker(model, advantage="dr_grpo", gamma=gamma)(batch)
    returns = outcomes(batch, gamma)
    first = {e: turns[min(turns)] for e, turns in returns.items()}
    group_of = dict(zip(batch["episode"].tolist(), batch["group"].tolist(), strict=True))
    for n, t in batch["masks", "all_assistant_mask"].nonzero().tolist():
        e, turn = int(batch["episode"][n]), int(batch["turns", "full"][n, t])
        peers = [first[f] for f in first if group_of[f] == group_of[e]]
        expected = first[e] - sum(peers) / len(peers)
        assert float(out["advantage"][n, t, 0]) == pytest.approx(expected, abs=1e-4)
        assert float(out["returns"][n, t]) == pytest.approx(returns[e][turn], abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_turn_advantage_is_normalised_per_turn_id(model, rows, seed):
    batch = rows(seed, n=12)
    out = ExperienceMaker(model, advantage="turn", gamma=0.9)(batch)
    returns = outcomes(batch, 0.9)
    for n, t in batch["masks", "all_assistant_mask"].nonzero().tolist():
        e, turn = int(batch["episode"][n]), int(batch["turns", "full"][n, t])
        peers = torch.tensor([turns[turn] for turns in returns.values() if turn in turns])
        expected = 0.0
        if len(peers) > 1:
            expected = (returns[e][turn] - float(peers.mean())) / (float(peers.std()) + 1e-6)
        assert float(out["advantage"][n, t, 0]) == pytest.approx(expected, abs=1e-3)


def test_turn_advantage_takes_the_returns_that_came_with_the_rows(model, rows):
    batch = rows()
    made = ExperienceMaker(model, advantage="turn", gamma=0.7)(batch)
    given = rows()
    given["rewards", "to_go"] = made["returns"].clone()
    given["rewards", "full"] = torch.zeros_like(given["rewards", "full"])
    out = ExperienceMaker(model, advantage="turn", gamma=0.2)(given)
    torch.testing.assert_close(out["advantage"], made["advantage"])


@pytest.mark.parametrize("advantage", KINDS)
@pytest.mark.parametrize("given_returns", [False, True])
def test_making_experience_twice_is_making_it_once(
    model, other_model, rows, advantage, given_returns
):
    batch = rows()
    if given_returns:
        given = torch.randn(batch["rewards", "full"].shape)
        batch["rewards", "to_go"] = given
    maker = ExperienceMaker(model, ref=other_model, kl_coef=0.1, advantage=advantage, gamma=0.9)
    once = maker(batch).clone()
    if given_returns:
        assert torch.equal(once["rewards", "to_go"], given)
    twice = maker(batch)
    assert set(twice.keys(True, True)) == set(once.keys(True, True))
    for key in once.keys(True, True):
        torch.testing.assert_close(twice[key], once[key])


@pytest.mark.parametrize("advantage", ["dr_grpo", "turn"])
@pytest.mark.parametrize("given_returns", [False, True])
def test_kl_penalty_is_a_reward_on_each_token(model, other_model, rows, advantage, given_returns):
    batch = rows()
    if given_returns:
        plain = ExperienceMaker(model, advantage="turn", gamma=0.9)(rows())
        batch["rewards", "to_go"] = plain["returns"].clone()
    penalised = ExperienceMaker(
        model, ref=other_model, advantage=advantage, gamma=0.9, kl_coef=0.1
    )(batch)
    old, ref = batch["log_probs", "full"], score(other_model, batch)
    by_hand = rows()
    mask = by_hand["masks", "all_assistant_mask"]
    by_hand["rewards", "full"] -= 0.1 * torch.where(mask, old - ref, 0.0)
    expected = ExperienceMaker(model, advantage=advantage, gamma=0.9)(by_hand)
    for key in ("advantage", "returns"):
        torch.testing.assert_close(penalised[key], expected[key], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(penalised["kl"], torch.where(mask, kl_estimate(old, ref, "k1"), 0.0))


@pytest.mark.parametrize("advantage", KINDS)
def test_rows_may_come_in_any_order(model, rows, advantage):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    maker = ExperienceMaker(model, advantage=advantage)
    out, permuted = maker(rows(n=12)), maker(rows(n=12)[order].clone())
    torch.testing.assert_close(permuted["advantage"], out["advantage"][order])


@pytest.mark.parametrize("advantage", KINDS)
def test_padding_anywhere_changes_nothing(model, other_model, rows, spread, advantage):
    maker = ExperienceMaker(
        model, ref=other_model, kl_coef=0.1, advantage=advantage, old_log_probs="actor"
    )
    batch, wide = maker(rows()), maker(spread(rows()))
    mask, wide_mask = (x["masks", "all_assistant_mask"] for x in (batch, wide))
    for key in maker.out_keys:
        got, expected = wide[key][wide_mask], batch[key][mask]
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("advantage", KINDS)
def test_copies_of_an_episode_are_episodes_of_their_own(model, rows, advantage):
    batch = torch.cat([rows(), rows()])
    batch["episode_index"] = batch["episode"] + 100 * (torch.arange(12) >= 6)
    renamed = torch.cat([rows(), rows()])
    renamed["episode"] = batch["episode_index"]
    maker = ExperienceMaker(model, advantage=advantage, gamma=0.9)
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
    keys = set(twice.keys(True))
    with pytest.raises(ValueError, match=r"fork 0 of episode 0 .* more than once"):
        ExperienceMaker(model)(twice)
    assert set(twice.keys(True)) == keys
    twice["episode_index"][6:] += 100
    expected = ExperienceMaker(model, advantage="turn", gamma=0.9)(batch)["returns"]
    got = ExperienceMaker(model, advantage="turn", gamma=0.9)(twice)["returns"]
    torch.testing.assert_close(got, torch.cat([expected, expected]))


def test_a_token_that_nothing_predicts_has_no_kl(model, other_model, rows, spread):
    batch = rows()
    batch["masks", "all_assistant_mask"][:, 0] = True
    batch["log_probs", "full"][:, 0] = -5.0
    maker = ExperienceMaker(model, ref=other_model, kl_coef=0.1)
    wide = spread(batch)
    out, wide_out = maker(batch), maker(wide)
    assert not out["kl"][:, 0].any()
    assert out["kl"][:, 1:].any()
    for key in ("kl", "returns", "advantage"):
        got = wide_out[key][wide["masks", "all_assistant_mask"]]
        expected = out[key][batch["masks", "all_assistant_mask"]]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("advantage", KINDS)
def test_nothing_sampled_is_finite(model, other_model, rows, advantage):
    batch = rows()
    batch["masks", "all_assistant_mask"].zero_()
    out = ExperienceMaker(model, ref=other_model, advantage=advantage)(batch)
    assert not out["advantage"].any()
    assert all(out[key].isfinite().all() for key in ("kl", "returns", ("log_probs", "ref")))


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


def test_bad_arguments_are_refused_by_name(model, rows):
    for options, message in [
        ({"advantage": "best"}, "advantage must be one of"),
        ({"gamma": 1.5}, "gamma must lie in"),
        ({"kl_coef": 0.1}, "kl_coef needs a reference"),
        ({"old_log_probs": "critic"}, "old_log_probs must be one of"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"kl_kind": "k9"}, "kl_kind must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            ExperienceMaker(model, **options)
    with pytest.raises(TypeError, match="actor must be a causal language model"):
        ExperienceMaker(None)


def test_a_refused_call_changes_nothing(model, rows):
    with pytest.raises(KeyError, match="old_log_probs='actor' does without"):
        ExperienceMaker(model)(rows().exclude("log_probs"))
    batch = rows().exclude("group")
    before = batch.clone()
    with pytest.raises(KeyError, match="rows lack the entry 'group'"):
        ExperienceMaker(model)(batch)
    assert set(batch.keys(True)) == set(before.keys(True))
    with pytest.raises(ValueError, match=r"the result of advantage\(rows\) must have shape"):
        ExperienceMaker(model, advantage=lambda rows: rows["returns"][:1])(batch)
    assert set(batch.keys(True)) == set(before.keys(True))
